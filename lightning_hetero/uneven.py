"""Loaders whose replicas need not have equally many batches, and the check that a replica's ranks see the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hetero.boundary.exchange import Transport
from lightning_hetero.errors import HeteroError
from lightning_hetero.layout import ResolvedLayout

_END = object()


class AgreedLoader:
    """A loader that stops on all ranks together.

    Streaming, packing and iterable datasets give replicas different numbers of batches; a rank that goes on alone waits
    for the others forever. Ranks exchange before each batch whether they have one: one small collective on the host.

    Args:
        loader: This rank's loader.
        transport: Between all ranks.
        drain: Go on until the last replica has ended; the others repeat a batch, which does not count
            (:meth:`num_real`). Otherwise stop with the first, as fit does.
    """

    def __init__(self, loader: Iterable[Any], transport: Transport, *, drain: bool) -> None:
        self.loader = loader
        self.transport = transport
        self.drain = drain
        self._real: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self._real = None
        last: Any = _END
        batches = 0
        iterator = iter(self.loader)
        while True:
            batch = next(iterator, _END)
            has = batch is not _END
            states = self.transport.share([has, has or last is not _END])
            if not (any if self.drain else all)(state[0] for state in states):
                return
            if not all(state[1] for state in states):
                # A replica without any batch of its own repeats another one's.
                batches_of_others = self.transport.share_objects(batch if has else None)
                if not has:
                    last = next(other for other in batches_of_others if other is not None)
            if has:
                last = batch
            elif self._real is None:
                self._real = batches
            yield last
            batches += 1

    @property
    def dataset(self) -> Any:
        return getattr(self.loader, "dataset", None)

    @property
    def sampler(self) -> Any:
        """Where Lightning sets the epoch."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """Where Lightning sets the epoch."""
        return getattr(self.loader, "batch_sampler", None)

    def num_real(self, batch_idx: int) -> int:
        """0 for a batch that is repeated, else 1."""
        return int(self._real is None or batch_idx < self._real)


class SizedAgreedLoader(AgreedLoader):
    """An :class:`AgreedLoader` whose length is known beforehand."""

    def __init__(self, loader: Iterable[Any], transport: Transport, *, drain: bool, length: int) -> None:
        super().__init__(loader, transport, drain=drain)
        self._length = length

    def __len__(self) -> int:
        return self._length


def agree_on_end(loader: Iterable[Any], transport: Transport, *, drain: bool) -> AgreedLoader:
    """Makes a loader stop on all ranks together. Collective.

    Its length is the smallest (for ``drain`` the largest) of all ranks', if all know theirs.
    """
    try:
        length = len(loader) if isinstance(loader, Sized) else -1
    except TypeError:  # a DataLoader of an iterable dataset without length
        length = -1
    lengths = [values[0] for values in transport.share([length])]
    if min(lengths) < 0:
        return AgreedLoader(loader, transport, drain=drain)
    return SizedAgreedLoader(loader, transport, drain=drain, length=(max if drain else min)(lengths))


def batch_hash(batch: Any) -> int:
    """A number that is equal for equal batches: of all tensors' bytes, and of plain values."""
    digest = hashlib.sha1()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
            data = leaf.detach().contiguous().reshape(-1).cpu()
            digest.update(data.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (str, bytes, int, float, bool, type(None))):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest()[:7], "big")


def check_same_data(batch: Any, driver: ResolvedLayout, transport: Transport) -> None:
    """Checks that the ranks of each driver replica have the same batch. Collective.

    Raises:
        HeteroError: On all ranks, naming the ranks that differ.
    """
    hashes = [values[0] for values in transport.share([batch_hash(batch)])]
    for replica, ranks in enumerate(driver.replicas):
        if len({hashes[rank] for rank in ranks}) > 1:
            raise HeteroError(
                f"the ranks of driver replica {replica} ({', '.join(map(str, ranks))}) got different batches: they are "
                "copies of one replica and must see the same data. Load by replica, not by rank: share "
                "trainer.strategy.loader_rank of trainer.strategy.loader_world_size, and seed what is random "
                "(shuffling, augmentation) equally on these ranks"
            )

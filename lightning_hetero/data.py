"""Which samples a driver replica takes: one global order, cut into global batches, cut into shares.

The union of the replicas' batches number ``b`` is exactly the batch that one process with the whole batch size would
take. Every sample counts once: no sampler here repeats samples to make lengths equal.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
    _IndexBatchSamplerWrapper,
)
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_hetero.errors import HeteroError


class GlobalOrder(Sampler[int]):
    """The order of an epoch's samples, the same on every rank.

    Args:
        source: The number of samples, or a sampler whose order is taken. A sampler that draws from the global random
            generators of Python, NumPy or torch draws from streams seeded with ``seed + epoch`` instead, so that ranks
            agree whatever else they have drawn; a generator of its own is left alone.
        shuffle: Whether to permute, anew each epoch. A sampler decides for itself.
        seed: Of the permutation; must be equal on all ranks.
    """

    def __init__(self, source: int | Sampler[int], *, shuffle: bool = False, seed: int = 0) -> None:
        if not isinstance(source, (int, Sized)):
            raise HeteroError(
                f"the sampler {type(source).__name__} has no length, so its samples cannot be divided over the "
                "driver's replicas: give it a __len__, or divide them in the sampler itself (strategy.loader_rank and "
                "strategy.loader_world_size) and set Trainer(use_distributed_sampler=False)"
            )
        self.source = source
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.source if isinstance(self.source, int) else len(self.source)

    def __iter__(self) -> Iterator[int]:
        if not isinstance(self.source, int):
            return iter(self._order_of_sampler(self.source))
        if not self.shuffle:
            return iter(range(self.source))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.source, generator=generator).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration is for. Lightning calls this."""
        self.epoch = epoch
        set_epoch = getattr(self.source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def _order_of_sampler(self, sampler: Sampler[int]) -> list[int]:
        seed = self.seed + self.epoch
        with isolate_rng(include_cuda=False):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch the accelerators' generators too
            order = list(sampler)
        if len(order) != len(self):
            raise HeteroError(
                f"the sampler {type(sampler).__name__} has length {len(self)} but yielded {len(order)} samples: the "
                "driver's replicas would disagree on the number of batches; make its __len__ exact"
            )
        return order


class ReplicaBatchSampler(Sampler[list[int]]):
    """The batches of one driver replica.

    Global batch ``b`` is the next ``batch_size * num_replicas`` samples of the global order and each replica takes a
    contiguous share of it. The last global batch, if short, is split as evenly as it goes, earlier replicas first. All
    replicas yield the same number of batches: one whose share is empty yields a stand-in, the first sample of that
    global batch, for which :meth:`num_real` is 0.

    Args:
        source: The number of samples, or the sampler that orders them.
        batch_size: Samples a replica takes from a full global batch.
        num_replicas: The driver's data-parallel size.
        replica: Which of the replicas this is.
        shuffle: Whether to permute the samples each epoch; not for a sampler.
        seed: Of the permutation; must be equal on all ranks.
        drop_last: Whether to leave out the short global batch, on all replicas.
    """

    def __init__(
        self,
        source: int | Sampler[int],
        batch_size: int,
        *,
        num_replicas: int = 1,
        replica: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"expected a batch_size of at least 1, got {batch_size}")
        if not 0 <= replica < num_replicas:
            raise ValueError(f"expected a replica of 0 to {num_replicas - 1} of {num_replicas}, got {replica}")
        self.sampler = GlobalOrder(source, shuffle=shuffle, seed=seed)  # the name under which Lightning sets the epoch
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.replica = replica
        self.drop_last = drop_last

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.batch_size * self.num_replicas)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for batch_idx in range(len(self)):
            start = batch_idx * self.batch_size * self.num_replicas
            offset, size = self._share(batch_idx, self.replica)
            yield order[start + offset : start + offset + size] or order[start : start + 1]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration is for."""
        self.sampler.set_epoch(epoch)

    def num_real(self, batch_idx: int, replica: int | None = None) -> int:
        """How many samples of a batch count: its size, or 0 for a stand-in.

        Args:
            batch_idx: The batch's position in the epoch.
            replica: Whose batch; default: this replica's.
        """
        if not 0 <= batch_idx < len(self):
            raise IndexError(f"batch {batch_idx} of an epoch of {len(self)} batches")
        return self._share(batch_idx, self.replica if replica is None else replica)[1]

    def _share(self, batch_idx: int, replica: int) -> tuple[int, int]:
        """Where in the global batch a replica's share starts, and its size."""
        whole = self.batch_size * self.num_replicas
        each, rest = divmod(min(whole, len(self.sampler) - batch_idx * whole), self.num_replicas)
        return each * replica + min(replica, rest), each + (replica < rest)


def shard_dataloader(
    dataloader: DataLoader[Any],
    *,
    num_replicas: int,
    replica: int,
    shuffle: bool | None = None,
    seed: int = 0,
) -> DataLoader[Any]:
    """A copy of a map-style loader that yields one driver replica's batches; ``batch_size`` is what a replica takes.

    A distributed sampler, such as Lightning injects, is taken out, and what it knows is kept: the sampler it wraps, and
    its shuffling and seed. Lightning injects one that shuffles into every training loader whose sampler is a plain
    sequential or random one. Everything else about the loader stays, whatever its class.

    Returned as they are, because it is theirs to divide the data: loaders of iterable datasets, without automatic
    batching (``batch_size=None``), with a batch sampler other than torch's own, or with a distributed sampler of the
    user's own class. ``loader_rank`` and ``loader_world_size`` of the strategy say into what.

    Args:
        dataloader: The loader, before or after Lightning's injection of a distributed sampler.
        num_replicas: The driver's data-parallel size.
        replica: Which of its replicas this rank belongs to.
        shuffle: Overrides whether to shuffle; None: as the loader says. The order of a custom sampler is never changed.
        seed: Of the shuffling, where no injected sampler has one; must be equal on all ranks.
    """
    batch_sampler = dataloader.batch_sampler
    predicting = isinstance(batch_sampler, _IndexBatchSamplerWrapper)
    if isinstance(batch_sampler, _IndexBatchSamplerWrapper):
        batch_sampler = batch_sampler._batch_sampler
    if isinstance(dataloader.dataset, IterableDataset) or type(batch_sampler) is not BatchSampler:
        return dataloader
    order = _order(batch_sampler.sampler, seed)
    if order is None:
        return dataloader
    source, shuffled, seed = order
    replica_sampler = ReplicaBatchSampler(
        source,
        batch_sampler.batch_size,
        num_replicas=num_replicas,
        replica=replica,
        shuffle=shuffled if shuffle is None else shuffle,
        seed=seed,
        drop_last=batch_sampler.drop_last,
    )
    # A copy and not a new instance: a subclass need not expose the arguments that its __init__ took. The values are
    # those that torch's __init__ leaves behind when it is given a batch sampler.
    sharded = copy.copy(dataloader)
    vars(sharded).update(
        batch_sampler=_IndexBatchSamplerWrapper(replica_sampler) if predicting else replica_sampler,
        sampler=replica_sampler.sampler,
        batch_size=None,
        drop_last=False,
        _iterator=None,
    )
    return sharded


def replica_batch_sampler(dataloader: object) -> ReplicaBatchSampler | None:
    """The sampler that :func:`shard_dataloader` gave a loader, or None where it left the loader as it was."""
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    if isinstance(batch_sampler, _IndexBatchSamplerWrapper):
        batch_sampler = batch_sampler._batch_sampler
    return batch_sampler if isinstance(batch_sampler, ReplicaBatchSampler) else None


def _order(sampler: Any, seed: int) -> tuple[int | Sampler[int], bool, int] | None:
    """The number of samples or the sampler behind ``sampler``, whether it shuffles, and its seed; None: not known."""
    if type(sampler) in (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper):
        inner = _order(sampler.dataset._sampler, sampler.seed)
        return inner and (inner[0], inner[1], sampler.seed)
    if type(sampler) in (DistributedSampler, UnrepeatedDistributedSampler):
        return len(sampler.dataset), sampler.shuffle, sampler.seed
    if isinstance(sampler, DistributedSampler):
        return None
    if type(sampler) is SequentialSampler:
        return len(sampler), False, seed
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return len(sampler), True, seed
    return sampler, False, seed

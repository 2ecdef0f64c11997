"""Parity with one process: the oracle of the gradient contract.

``assert_parity`` trains a LightningModule for some steps under layouts, through ``Trainer.fit`` on real processes, and
compares every gradient of every step with one process that takes each global batch whole. It also holds every rank to
closed forms, written down here independently of the package, for the bytes of parameters and optimizer states, the
items that it encodes and the bytes that it sends at the boundary: gathering everything everywhere would pass a
gradient test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ModuleLayout
from tests.harness.pool import Pool

SILENT = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
}


@dataclass
class Reference:
    """What one process computed: gradients before each optimizer step, parameters after the last, losses and norms."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Recorder(Callback):
    """Collects whole gradients before each optimizer step, and how long they are after clipping."""

    def __init__(self) -> None:
        self.record = Reference()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.record.gradients.append({name: whole(p.grad) for name, p in module.named_parameters()})

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.record.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.record.parameters = {name: whole(p) for name, p in module.named_parameters()}


class WeightlessOptimizer(torch.optim.SGD):
    """Stands still: its gradients after clipping are what is looked at."""


def whole(tensor: Tensor | None) -> Tensor | None:
    """The global value of a parameter or gradient."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    """``||value - reference|| / ||reference||``; a gradient that only one side has is an error of 1."""
    if value is None or reference is None:
        return 0.0 if value is reference else 1.0
    return float((value - reference).norm() / reference.norm()) if reference.norm() > 0 else float(value.norm())


def loader(batches: Sequence[Sequence[Any]], collate: Callable[[list[Any]], Any], replicas: int) -> DataLoader:
    """A plain loader of the batches' samples; each global batch must divide into ``replicas`` equal shares."""
    samples = [sample for batch in batches for sample in batch]
    return DataLoader(samples, batch_size=len(batches[0]) // replicas, collate_fn=collate, shuffle=False)


def reference_run(
    factory: Callable[[], LightningModule],
    batches: Sequence[Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    **trainer: Any,
) -> Reference:
    """Trains in this process, without the package's strategy, on whole global batches."""
    recorder = Recorder()
    module = factory()
    fit = Trainer(max_epochs=1, devices=1, callbacks=[recorder], **SILENT | trainer)
    fit.fit(module, loader(batches, collate, 1))
    return recorder.record


@dataclass
class RankReport:
    """What one rank found."""

    errors: list[dict[str, float]]
    parameter_errors: dict[str, float]
    losses: list[float]
    parameter_bytes: dict[str, int]
    optimizer_bytes: dict[str, int]
    items: dict[str, int]
    forward_bytes: dict[str, int]
    backward_bytes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    driver_replica: int

    @property
    def worst(self) -> float:
        return max(max(errors.values()) for errors in self.errors)


def train_rank(
    factory: Callable[[], LightningModule],
    layouts: dict[str, ModuleLayout],
    driver: str | None,
    batches: Sequence[Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    reference: Reference,
    mutations: Sequence[Callable[[], contextlib.AbstractContextManager[Any]] | None],
    world: int,
    trainer: dict[str, Any],
) -> list[RankReport]:
    """One rank of a run, once for each mutation (``None``: as it is). All ranks call this together."""
    return [
        _train_once(factory, layouts, driver, batches, collate, reference, mutation, world, trainer)
        for mutation in mutations
    ]


def _train_once(factory, layouts, driver, batches, collate, reference, mutation, world, trainer) -> RankReport:  # type: ignore[no-untyped-def]
    recorder = Recorder()
    strategy = HeteroStrategy(layouts=layouts, driver=driver)
    module = factory()
    with mutation() if mutation is not None else contextlib.nullcontext():
        fit = Trainer(max_epochs=1, devices=world, strategy=strategy, callbacks=[recorder], **SILENT | trainer)
        replicas = len(Placed.of(strategy.driver_config or _driver(layouts), layouts, world).replicas)
        fit.fit(module, loader(batches, collate, replicas))
    record = recorder.record
    assert len(record.gradients) == len(reference.gradients), (len(record.gradients), len(reference.gradients))
    parameters = dict(module.named_parameters())
    (optimizer,) = strategy.optimizers
    return RankReport(
        errors=[
            {name: relative_error(gradients[name], value) for name, value in expected.items()}
            for gradients, expected in zip(record.gradients, reference.gradients, strict=True)
        ],
        parameter_errors={n: relative_error(record.parameters[n], v) for n, v in reference.parameters.items()},
        losses=record.losses,
        parameter_bytes={name: _local_bytes(p) for name, p in parameters.items()},
        optimizer_bytes={
            name: sum(_local_bytes(v) for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor) and v.ndim)
            for name, p in parameters.items()
        },
        items={name: boundary.traffic.items for name, boundary in strategy.boundaries.items()},
        forward_bytes={name: boundary.traffic.forward_bytes for name, boundary in strategy.boundaries.items()},
        backward_bytes={name: boundary.traffic.backward_bytes for name, boundary in strategy.boundaries.items()},
        shapes={name: tuple(p.shape) for name, p in parameters.items()},
        driver_replica=strategy.loader_rank,
    )


def _driver(layouts: Mapping[str, ModuleLayout]) -> str:
    return "llm" if "llm" in layouts else next(iter(layouts))


def _local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


# ---------------------------------------------------------------- closed forms, independent of the package


@dataclass(frozen=True)
class Placed:
    """Which ranks hold what, from the sizes alone: rank = (replicate * shard + s) * tensor + t on colocated ranks."""

    data: int
    shard: int
    tensor: int

    @classmethod
    def of(cls, name: str, layouts: Mapping[str, ModuleLayout], world: int) -> Placed:
        layout = layouts[name]
        data = world // layout.tensor_parallel_size
        shard = data if layout.shard_size == "full" else layout.shard_size
        return cls(data, shard, layout.tensor_parallel_size)

    @property
    def replicas(self) -> list[list[int]]:
        return [list(range(d * self.tensor, (d + 1) * self.tensor)) for d in range(self.data)]

    def elements(self, shape: tuple[int, ...], tensor_dim: int | None, rank: int) -> int:
        """Elements of a parameter on a rank: chunks over the tensor axis, then rows over the shard axis."""
        shape = list(shape)
        if tensor_dim is not None:
            shape[tensor_dim] = shape[tensor_dim] // self.tensor
        rows = ceil(shape[0] / self.shard)
        place = (rank // self.tensor) % self.shard
        shape[0] = max(0, min(rows, shape[0] - place * rows))
        total = 1
        for size in shape:
            total *= size
        return total


def owners(counts: Sequence[int], replicas: int) -> list[tuple[int, int, int]]:
    """Which module replica encodes which item: ``(driver replica, item, module replica)``.

    Item ``i`` of ``n`` of driver replica ``r`` of ``R`` lies at ``(r + (i + f) / n) / R`` of the unit interval; the
    module replica that covers it takes it. ``f`` just below 1 puts a cut's own item behind the cut.
    """
    total = len(counts)
    result = []
    for r, n in enumerate(counts):
        for i in range(n):
            # the item belongs to the first module replica whose end lies at or behind the item's end
            e = next(
                e
                for e in range(replicas)
                if int(n * max(Fraction(0), min(Fraction(1), Fraction((e + 1) * total, replicas) - r))) >= i + 1
            )
            result.append((r, i, e))
    return result


def bytes_sent(
    counts: Sequence[int], source: Placed, destination: Placed, moves: Sequence[tuple[int, int]], size: int, world: int
) -> list[int]:
    """Bytes that each rank sends so that every copy of each item's destination has it, from itself where it can.

    Args:
        counts: Unused items are not listed in ``moves``.
        source: Who holds.
        destination: Who needs.
        moves: ``(source replica, destination replica)`` of each item.
        size: Bytes of an item.
        world: Number of ranks.
    """
    sent = [0] * world
    for s, d in moves:
        for copy, rank in enumerate(destination.replicas[d]):
            holders = source.replicas[s]
            if rank not in holders:
                sent[holders[copy % len(holders)]] += size
    return sent

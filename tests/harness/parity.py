"""Parity with one process: the oracle of the gradient contract.

``assert_parity`` trains a LightningModule for some steps under layouts, through ``Trainer.fit`` on real processes, and
compares every gradient of every step with one process that takes each global batch whole. It also holds every rank to
closed forms, written down here independently of the package, for the bytes of parameters and optimizer states, the
items that it encodes and the bytes that it sends at the boundary: gathering everything everywhere would pass a
gradient test.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor, prod
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
    """What one process computed.

    Attributes:
        gradients: Before clipping, of each optimizer step.
        clipped: As the optimizer saw them.
        norms: Total norm of the gradients before clipping.
        parameters: After the last step.
        losses: What ``training_step`` returned.
    """

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    clipped: list[dict[str, Tensor | None]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


class Recorder(Callback):
    """Collects whole gradients before each optimizer step, before and after clipping."""

    def __init__(self) -> None:
        self.record = Reference()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.record.gradients.append({name: whole(p.grad) for name, p in module.named_parameters()})
        strategy = trainer.strategy
        if isinstance(strategy, HeteroStrategy):
            norm = strategy.gradient_norm()
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        self.record.norms.append(float(norm))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.record.losses.append(float(outputs["loss"]))
        if len(self.record.clipped) < len(self.record.gradients):  # this batch ended with an optimizer step
            self.record.clipped.append({name: whole(p.grad) for name, p in module.named_parameters()})

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.record.parameters = {name: whole(p) for name, p in module.named_parameters()}


def whole(tensor: Tensor | None) -> Tensor | None:
    """The global value of a parameter or gradient."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    """``||value - reference|| / ||reference||``; a gradient other than zero that only one side has is an error of 1."""
    if value is None or reference is None:
        given = reference if value is None else value
        return 0.0 if given is None or not given.any() else 1.0
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
    clipped_errors: list[dict[str, float]]
    norm_errors: list[float]
    parameter_errors: dict[str, float]
    losses: list[float]
    parameter_bytes: dict[str, int]
    optimizer_bytes: dict[str, int]
    items: dict[str, int]
    forward_bytes: dict[str, int]
    backward_bytes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]

    @property
    def worst(self) -> float:
        return max(max(errors.values()) for errors in self.errors)


@dataclass(frozen=True)
class Case:
    """One training run of a parity test.

    Attributes:
        layouts: As given to the strategy.
        driver: As given to the strategy.
        mutation: Breaks the package while the run lasts; the run is then expected to differ.
        trainer: Arguments of the Trainer.
        strategy: Further arguments of the strategy.
    """

    layouts: dict[str, ModuleLayout]
    driver: str | None = None
    mutation: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)


def train_rank(
    cases: Sequence[Case],
    factory: Callable[[], LightningModule],
    batches: Sequence[Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    reference: Reference,
) -> list[RankReport]:
    """What one rank does: each case in turn, on one default process group. All ranks call it together."""
    return [_train_once(case, factory, batches, collate, reference) for case in cases]


def _train_once(
    case: Case,
    factory: Callable[[], LightningModule],
    batches: Sequence[Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    reference: Reference,
) -> RankReport:
    world = int(os.environ["WORLD_SIZE"])
    recorder = Recorder()
    strategy = HeteroStrategy(layouts=case.layouts, driver=case.driver, **case.strategy)
    module = factory()
    replicas = Placed.of(case.layouts[case.driver or "llm"], world).data
    with case.mutation() if case.mutation is not None else contextlib.nullcontext():
        fit = Trainer(max_epochs=1, devices=world, strategy=strategy, callbacks=[recorder], **SILENT | case.trainer)
        fit.fit(module, loader(batches, collate, replicas))
    record = recorder.record
    parameters = dict(module.named_parameters())
    (optimizer,) = strategy.optimizers
    traffic = {name: boundary.traffic for name, boundary in strategy.boundaries.items()}
    return RankReport(
        errors=_compare(record.gradients, reference.gradients),
        clipped_errors=_compare(record.clipped, reference.clipped),
        norm_errors=[abs(a - b) / b for a, b in zip(record.norms, reference.norms, strict=True)],
        parameter_errors={n: relative_error(record.parameters[n], v) for n, v in reference.parameters.items()},
        losses=record.losses,
        parameter_bytes={name: _local_bytes(p) for name, p in parameters.items()},
        optimizer_bytes={
            name: sum(_local_bytes(v) for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor) and v.ndim)
            for name, p in parameters.items()
        },
        items={name: t.items for name, t in traffic.items()},
        forward_bytes={name: t.forward_bytes for name, t in traffic.items()},
        backward_bytes={name: t.backward_bytes for name, t in traffic.items()},
        shapes={name: tuple(p.shape) for name, p in parameters.items()},
    )


def _compare(
    record: Sequence[dict[str, Tensor | None]], reference: Sequence[dict[str, Tensor | None]]
) -> list[dict[str, float]]:
    return [
        {name: relative_error(gradients[name], value) for name, value in expected.items()}
        for gradients, expected in zip(record, reference, strict=True)
    ]


def _local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


# ---------------------------------------------------------------- closed forms, independent of the package


@dataclass(frozen=True)
class Placed:
    """Which ranks hold what, from the sizes alone: rank ``(replicate * shard + s) * tensor + t`` on colocated ranks."""

    data: int
    shard: int
    tensor: int

    @classmethod
    def of(cls, layout: ModuleLayout, world: int) -> Placed:
        data = world // layout.tensor_parallel_size
        return cls(data, data if layout.shard_size == "full" else layout.shard_size, layout.tensor_parallel_size)

    @property
    def replicas(self) -> list[list[int]]:
        return [list(range(d * self.tensor, (d + 1) * self.tensor)) for d in range(self.data)]

    def elements(self, shape: Sequence[int], tensor_dim: int | None, rank: int) -> int:
        """Elements of a parameter on a rank: chunks over the tensor axis, then rows over the shard axis."""
        sizes = list(shape)
        if tensor_dim is not None:
            sizes[tensor_dim] //= self.tensor
        rows = ceil(sizes[0] / self.shard)
        sizes[0] = max(0, min(rows, sizes[0] - (rank // self.tensor) % self.shard * rows))
        return prod(sizes)


def owners(counts: Sequence[int], replicas: int) -> list[tuple[int, int]]:
    """Which module replica encodes which item: ``(driver replica, module replica)`` of each item.

    Replica ``r`` of ``R`` covers ``[r/R, (r+1)/R)`` of the unit interval; module replica ``e`` of ``E`` ends at
    ``(e+1)/E`` and takes the items that lie wholly before its end and that no replica before it took.
    """
    result = []
    for r, count in enumerate(counts):
        ends = [
            min(max(Fraction((e + 1) * len(counts), replicas) - r, Fraction(0)), Fraction(1)) for e in range(replicas)
        ]
        result += [(r, next(e for e in range(replicas) if floor(count * ends[e]) > item)) for item in range(count)]
    return result


def bytes_sent(
    source: Placed, destination: Placed, moves: Sequence[tuple[int, int]], size: int, world: int
) -> list[int]:
    """Bytes that each rank sends so that every copy of each item's destination gets it, from itself where it can.

    Args:
        source: Who holds.
        destination: Who needs.
        moves: ``(source replica, destination replica)`` of each item.
        size: Bytes of an item.
        world: Number of ranks.
    """
    sent = [0] * world
    for held, needed in moves:
        holders = source.replicas[held]
        for copy, rank in enumerate(destination.replicas[needed]):
            if rank not in holders:
                sent[holders[copy % len(holders)]] += size
    return sent


# ---------------------------------------------------------------- the assertion


def assert_parity(
    pool: Pool,
    world: int,
    cases: Sequence[Case],
    factory: Callable[[], LightningModule],
    batches: Sequence[Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    reference: Reference,
    *,
    tolerance: float = 1e-10,
) -> list[list[RankReport]]:
    """Holds every case to the gradient contract.

    Args:
        pool: The workers.
        world: Number of ranks.
        cases: Runs without mutation.
        factory: Builds the LightningModule, with the same weights in every process.
        batches: Global batches of samples.
        collate: Makes a batch of samples.
        reference: What one process computed (:func:`reference_run`).
        tolerance: Of the relative error of each tensor.

    Returns:
        For each case the reports by rank, for further assertions.
    """
    by_rank = pool.run(train_rank, world, cases, factory, batches, collate, reference, timeout=60 + 20 * len(cases))
    by_case = [list(reports) for reports in zip(*by_rank, strict=True)]
    for case, reports in zip(cases, by_case, strict=True):
        for rank, report in enumerate(reports):
            found = {f"gradients of step {step}": errors for step, errors in enumerate(report.errors)}
            found |= {f"clipped gradients of step {step}": errors for step, errors in enumerate(report.clipped_errors)}
            found["gradient norm of step"] = {str(step): error for step, error in enumerate(report.norm_errors)}
            found["parameters after the last step"] = report.parameter_errors
            for what, errors in found.items():
                wrong = {name: error for name, error in errors.items() if not error <= tolerance}
                assert not wrong, f"{case.layouts}, {case.trainer}: rank {rank}, {what}: {wrong}"
    return by_case

"""The gradient check: silent on what is right, and on what is wrong it names the module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroError, HeteroStrategy, ModuleLayout
from lightning_hetero import check as package
from lightning_hetero.check import check_gradients
from lightning_hetero.check_report import CheckReport
from tests.dist import test_ragged as ragged
from tests.dist import vlm
from tests.harness import Pool
from tests.harness import mutations as m

WORLD = 4
MIXED = {"vision": ModuleLayout(), "llm": ModuleLayout(tensor_parallel_size=2)}  # two driver replicas
Mutation = Callable[[], contextlib.AbstractContextManager[Any]]


class OwnWords(vlm.SmallModule):
    """Declares no tokens, so that every microbatch has a mean of its own, and no batch can be cut along dim 0."""

    count_tokens = None  # type: ignore[assignment]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch | {"labels": batch["targets"]}, batch_idx)


class Rounded(vlm.SmallModule):
    """Computes its features in float32, whatever the model is in."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.vision(batch["images"]).float()
        return self.llm(batch["input_ids"], features.to(self.dtype), batch["feature_mask"])


class Noisy(vlm.SmallModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + torch.rand(())


class Gathering(vlm.SmallModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.all_gather(loss, sync_grads=True).mean()


class BuiltLate(LightningModule):
    """Everything is built on the meta device in configure_model, and depends on the number of the batch."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.vision, self.llm = nn.Linear(3, 4), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch_idx + 1) * self.llm(torch.tanh(self.vision(batch))).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def small(cls: type[vlm.SmallModule] = vlm.SmallModule, dropout: float = 0.0) -> LightningModule:
    module = vlm.build(dropout=dropout)
    module.__class__ = cls
    return module


def small_float() -> LightningModule:
    return vlm.build().float()


def float_images(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = vlm.collate(samples)
    return batch | {"images": batch["images"].float()}


def own_words(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = vlm.collate(samples)
    return batch | {"targets": batch.pop("labels")}


@contextlib.contextmanager
def one_rank_off(name: str) -> Iterator[None]:
    """A replicated parameter's gradient drifts on the last rank only."""
    original = HeteroStrategy.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.global_rank == WORLD - 1:
            m.gradients.local(self.lightning_module.get_parameter(name).grad).mul_(1 + 1e-6)
        return result

    with mock.patch.object(HeteroStrategy, "backward", backward):
        yield


@contextlib.contextmanager
def one_rank_without(name: str) -> Iterator[None]:
    original = HeteroStrategy.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.global_rank == WORLD - 1:
            self.lightning_module.get_parameter(name).grad = None
        return result

    with mock.patch.object(HeteroStrategy, "backward", backward):
        yield


def large_from_here() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(package, "LARGE", 1000)


@dataclass
class Case:
    factory: Callable[[], LightningModule] = small
    layouts: dict[str, ModuleLayout] | None = field(default_factory=lambda: MIXED)
    samples: int = 8
    data: list[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = vlm.collate
    mutation: Mutation = contextlib.nullcontext
    strategy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


RAGGED = [(1, 0, 1), (0, 2, 0), (0,), (0,), (0,), (3, 1)]  # images, videos, audios of each sample
REPLICATED = {"vision": ModuleLayout(shard_size=1), "llm": ModuleLayout(tensor_parallel_size=2, shard_size=1)}
RECOMPUTED = {
    "vision": ModuleLayout(activation_checkpointing="full"),
    "llm": ModuleLayout(tensor_parallel_size=2, activation_checkpointing="full"),
}
TOWERS = ragged.layouts(ragged.FSDP, ragged.FSDP)
TOWER_DATA = [ragged.sample(i + 1, *counts) for i, counts in enumerate(RAGGED)]
towers = partial(
    Case, factory=ragged.Ragged, layouts=TOWERS, data=TOWER_DATA + TOWER_DATA[:2], collate=list, options={"steps": 1}
)

CASES = {
    "two steps": Case(samples=16, options={"steps": 2}),
    "vision doubled": Case(mutation=partial(m.scaled_gradient, "vision", 2.0)),
    "llm doubled": Case(mutation=partial(m.scaled_gradient, "llm", 2.0)),
    "block doubled": Case(mutation=partial(m.scaled_gradient, "llm.blocks.1", 2.0)),
    "infinite": Case(mutation=partial(m.scaled_gradient, "llm", float("inf"))),
    "swapped": Case(mutation=m.swapped_siblings),
    "ragged": towers(),
    "ragged, projector doubled": towers(mutation=partial(m.scaled_gradient, "projector", 2.0)),
    "frozen": towers(factory=partial(ragged.Ragged, frozen=("vision", "llm.embed"))),
    "copy off": Case(layouts=REPLICATED, mutation=partial(one_rank_off, "vision.norm.weight")),
    "copy missing": Case(layouts=REPLICATED, mutation=partial(one_rank_without, "vision.norm.weight")),
    "dropout": Case(factory=partial(small, dropout=0.3), layouts=RECOMPUTED),
    "microbatches": Case(strategy={"microbatches": 3}),
    "own words": Case(
        factory=partial(small, OwnWords), collate=own_words, strategy={"microbatches": 2}, options={"microbatches": 2}
    ),
    "accumulated": Case(samples=15, options={"accumulate_grad_batches": 2}),
    "stand-in": Case(samples=9, options={"steps": 2}),
    "float32": Case(factory=small_float, collate=float_images, options={"precision": "32-true"}),
    "rounded": Case(factory=partial(small, Rounded)),
    "noisy": Case(factory=partial(small, Noisy)),
    "built late": Case(
        factory=BuiltLate,
        layouts=None,
        data=list(torch.randn(32, 3, generator=torch.Generator().manual_seed(0))),
        collate=None,
        options={"steps": 2},
    ),
    "large": Case(mutation=large_from_here),
}


def check(case: Case) -> CheckReport:
    data = vlm.samples(case.samples, images=(0, 3)) if case.data is None else case.data
    loader: DataLoader = DataLoader(data, batch_size=4 if case.data is None else 2, collate_fn=case.collate)
    options = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"])} | case.options
    with case.mutation():
        return check_gradients(
            case.factory(), loader, strategy=HeteroStrategy(case.layouts, **case.strategy), **options
        )


def check_all() -> dict[str, CheckReport]:
    """What every rank does: each case in turn."""
    return {name: check(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def reports(pool: Pool) -> dict[str, CheckReport]:
    first, *others = pool.run(check_all, WORLD, timeout=300)
    for name, report in first.items():
        assert all(asdict(other[name]) == asdict(report) for other in others), f"{name}: not equal on all ranks"
    return first


def printed(report: CheckReport, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    report.print()
    text = capsys.readouterr().out
    print(text)
    return text


GOOD = "two steps, ragged, frozen, dropout, microbatches, own words, accumulated, stand-in, built late, large".split(
    ", "
)


@pytest.mark.parametrize("name", GOOD)
def test_passes(reports: dict[str, CheckReport], name: str) -> None:
    report = reports[name]
    assert report.passed, report.failures
    assert report.tolerance == 1e-10
    assert report.worst < 1e-12
    report.raise_if_failed()


def test_says_what_it_covered(reports: dict[str, CheckReport], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(reports["two steps"], capsys)
    assert "Covered: 2 steps, 4 batches, 16 samples." in text
    assert "PASSED with tolerance 1e-10" in text
    assert [line.split("│")[2].strip() for line in text.splitlines() if "vision " in line] == [
        "data 4 (shard 4) x tensor 1"
    ] * 2
    (step,) = reports["accumulated"].steps
    assert (step.batches, step.samples) == (4, 15)
    assert [(step.batches, step.samples) for step in reports["stand-in"].steps] == [(2, 8), (1, 1)]


@pytest.mark.parametrize(
    ("name", "module", "parameter", "ratio"),
    [
        ("vision doubled", "vision", "vision.", "2 times"),
        ("llm doubled", "llm", "llm.", "2 times"),
        ("block doubled", "llm", "llm.blocks.1.", ""),
        ("infinite", "llm", "llm.", "inf times"),
        ("ragged, projector doubled", "(outside)", "projector.", "2 times"),
        ("copy off", "vision", "vision.norm.weight", "1 times"),
        ("copy missing", "vision", "vision.norm.weight", "only some ranks have one"),
    ],
)
def test_names_the_module(
    reports: dict[str, CheckReport],
    capsys: pytest.CaptureFixture[str],
    name: str,
    module: str,
    parameter: str,
    ratio: str,
) -> None:
    report = reports[name]
    assert not report.passed
    wrong = [line for line in report.failures if not line.startswith("gradient norm")]
    assert len(wrong) == 1
    assert wrong[0].startswith(f"{module}: gradient of {parameter}")
    assert ratio in wrong[0]
    assert f"FAILED {module}" in printed(report, capsys)
    with pytest.raises(HeteroError, match="gradient check failed"):
        report.raise_if_failed()


def test_a_swap_between_replicas_shows_in_their_losses(reports: dict[str, CheckReport]) -> None:
    assert not reports["swapped"].passed
    assert reports["swapped"].steps[0].loss_error > 1e-4


def test_says_what_it_does_not_cover(reports: dict[str, CheckReport], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(reports["frozen"], capsys)
    assert "Not covered, without gradient: 9 parameters (vision.embed.weight" in text
    assert not reports["two steps"].notes


def test_notes(reports: dict[str, CheckReport]) -> None:
    assert reports["dropout"].notes == ["dropout was switched off"]
    assert "draws random numbers" in reports["noisy"].notes[0]
    assert reports["large"].notes == ["batches were cut into 4 microbatches, since the model has 48,704 parameters"]


def test_tolerance_follows_the_precision(reports: dict[str, CheckReport]) -> None:
    assert reports["float32"].tolerance == 1e-5
    assert reports["float32"].passed
    assert reports["rounded"].tolerance == 1e-5
    assert reports["rounded"].passed
    assert "float32" in reports["rounded"].notes[0]


def test_a_step_that_communicates_is_refused_on_all_ranks(pool: Pool) -> None:
    with pytest.raises(Exception, match="training_step communicates with the other replicas"):
        pool.run(check, WORLD, Case(factory=partial(small, Gathering)))

"""What a user does wrong in a step, or with the strategy, is an error on every rank, with what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import lightning_hetero
from lightning_hetero import HeteroError, HeteroStrategy, ModuleLayout
from tests.harness import Pool, WorkerError
from tests.harness.parity import SILENT


class Two(LightningModule):
    """Two encoders and a driver; what a step does is a parameter."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step
        self.a, self.b, self.llm = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.outer: Any = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return getattr(self, self.step)(batch)

    def fine(self, x: torch.Tensor) -> torch.Tensor:
        return self.llm(self.a(x) + self.b(x)).mean()

    def no_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(None)

    def different_counts(self, x: torch.Tensor) -> torch.Tensor:
        bilinear = self.a
        return bilinear(x, x[:1])

    def scalar_result(self, x: torch.Tensor) -> torch.Tensor:
        self.a.forward = lambda y: y.sum()  # type: ignore[method-assign]
        return self.a(x)

    def one_inside_the_other(self, x: torch.Tensor) -> torch.Tensor:
        self.a.forward = self.b.__call__  # type: ignore[method-assign]
        return self.a(x)

    def copies_differ(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x[: 1 + self.global_rank]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EarlyOptimizer(Two):
    """As LightningCLI's ``optimizer:`` section does it: built before the modules are sharded."""

    def __init__(self) -> None:
        super().__init__("fine")
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


LAYOUTS = {"a": ModuleLayout(), "b": ModuleLayout(), "llm": ModuleLayout()}
TENSOR = LAYOUTS | {
    "llm": ModuleLayout(tensor_parallel_size=2, tensor_parallel_plan={"": "replicate"}),
}


def fit(module: LightningModule, layouts: dict[str, ModuleLayout] | None, devices: int) -> str:
    """Trains one step.

    Returns:
        The text of the HeteroError.
    """
    trainer = Trainer(strategy=HeteroStrategy(layouts), devices=devices, max_steps=1, **SILENT)  # type: ignore[arg-type]
    with pytest.raises(HeteroError) as error:
        trainer.fit(module, DataLoader(torch.arange(8.0).view(4, 2), batch_size=2))
    return str(error.value)


@pytest.mark.parametrize(
    ("step", "texts"),
    [
        ("no_tensor", ["'a' was called without a tensor to cut into items"]),
        (
            "different_counts",
            ["'a' was called with tensors of different numbers of items", "argument [0] has 2", "argument [1] has 1"],
        ),
        ("scalar_result", ["'a' returned a tensor that cannot be given back to its items", "shape []"]),
        (
            "one_inside_the_other",
            ["placed module 'b' was called inside placed module 'a', and neither is the driver ('llm')"],
        ),
    ],
)
def test_calls_that_cannot_cross(pool: Pool, step: str, texts: list[str]) -> None:
    for message in pool.run(_fit_step, 2, step):
        for text in texts:
            assert text in message


def _fit_step(step: str) -> str:
    return fit(Two(step), LAYOUTS, 2)


def test_copies_of_a_replica_that_pass_different_items(pool: Pool) -> None:
    for message in pool.run(_fit_tensor, 2):
        assert "'a' was called with [1, 2] items on the ranks of driver replica 0 ([0, 1])" in message
        assert "which must see the same batch" in message


def _fit_tensor() -> str:
    return fit(Two("copies_differ"), TENSOR, 2)


def test_an_optimizer_that_was_built_before_sharding(pool: Pool) -> None:
    for message in pool.run(_fit_early, 2):
        assert (
            "SGD holds parameters that the model no longer has: it was built before the modules were sharded" in message
        )


def _fit_early() -> str:
    return fit(EarlyOptimizer(), LAYOUTS, 2)


def test_layouts_are_refused_before_training(pool: Pool) -> None:
    (outside, missing, nested) = pool.run(_fit_layouts, 1)[0]
    assert "layouts.a.ranks: rank 1 outside the world of 1 processes" in outside
    assert "layouts.c.module: Two has no submodule 'c'" in missing
    assert "driver: cannot be decided" in nested


def _fit_layouts() -> list[str]:
    return [
        fit(Two("fine"), LAYOUTS | {"a": ModuleLayout(ranks="0-1")}, 1),
        fit(Two("fine"), LAYOUTS | {"c": ModuleLayout()}, 1),
        fit(Two("fine"), {"a": ModuleLayout(), "b": ModuleLayout()}, 1),
    ]


def test_an_error_in_user_code_comes_out_as_it_is(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="has no attribute 'missing'"):
        pool.run(_fit_broken, 2)


def _fit_broken() -> None:
    trainer = Trainer(strategy="hetero", devices=2, max_steps=1, **SILENT)  # type: ignore[arg-type]
    trainer.fit(Two("missing"), DataLoader(torch.arange(8.0).view(4, 2), batch_size=2))


def test_the_package_registers_the_strategy() -> None:
    trainer = Trainer(strategy="hetero", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, lightning_hetero.HeteroStrategy)

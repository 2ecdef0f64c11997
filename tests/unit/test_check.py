"""The parts of the gradient check that need no processes."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hetero import HeteroError, HeteroStrategy
from lightning_hetero.check import GradientCheck, checking_trainer
from lightning_hetero.check_report import CheckReport, ModuleReport, ParameterReport, StepReport
from lightning_hetero.reference import LowestPrecision, NoDropout, coarsest
from tests.harness.parity import SILENT

X = torch.ones(4, 3, 8)


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(x, p=0.5, training=True),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        nn.Dropout(0.5),
        nn.Dropout1d(0.5),
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
        nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5),
    ],
)
def test_nothing_is_dropped(drop: Any) -> None:
    with NoDropout() as mode:
        state = torch.get_rng_state()
        assert torch.equal(drop(X), drop(X))
        assert torch.equal(torch.get_rng_state(), state), "nothing was drawn"
    assert mode.found
    assert not torch.equal(drop(X), drop(X)), "it drops again"


@pytest.mark.parametrize(
    "step", [nn.Dropout(0.5).eval(), nn.Dropout(0.0), lambda x: F.scaled_dot_product_attention(x, x, x)]
)
def test_dropout_that_is_off_is_not_reported(step: Any) -> None:
    with NoDropout() as mode:
        step(X)
    assert not mode.found


@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward])
def test_nothing_is_dropped_in_a_recomputation(backward: Any) -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    layer(X).sum().backward()
    gradients = []
    for recompute in (False, True):
        layer.zero_grad()
        with NoDropout():
            out = checkpoint(layer, X, use_reentrant=False) if recompute else layer(X)
            backward(out.sin().sum())
        gradients.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    assert len(gradients[0]) == 4
    assert all(map(torch.equal, *gradients))


def test_backward_keeps_its_arguments() -> None:
    x = torch.ones(3, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    with NoDropout():
        product = x * y
        product.backward(torch.full((3,), 2.0), retain_graph=True, inputs=[x])
        product.backward(gradient=torch.full((3,), 2.0), inputs=x)
    assert x.grad is not None and x.grad.tolist() == [4.0] * 3
    assert y.grad is None


def test_the_least_precise_dtype_that_a_step_computes_in() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with LowestPrecision(torch.float64) as mode:
        (x.float().double() * torch.ones(2, dtype=torch.int64).to(torch.float64)).sum()
    assert mode.dtype == torch.float32
    assert coarsest(torch.float16, torch.float64, torch.bfloat16) == torch.bfloat16


# ---------------------------------------------------------------- the report


def module(*parameters: ParameterReport, floor: float = 1e-4) -> ModuleReport:
    return ModuleReport("vision", "data 2", parameters, floor)


def parameter(norm: float = 1.0, reference: float = 1.0, difference: float = 0.0, **fields: Any) -> ParameterReport:
    return ParameterReport("vision.w", 10, norm, reference, difference, present=True, **fields)


def test_a_gradient_that_is_rounding_alone_is_no_error() -> None:
    noise = ParameterReport("vision.key_bias", 1, 2e-16, 1e-16, 1.5e-16, present=True)
    error, name = module(parameter(), noise).worst
    assert (name, error) == ("vision.key_bias", pytest.approx(1.5e-12))
    small = ParameterReport("vision.small", 1, 2e-6, 1e-6, 1e-6, present=True)
    assert module(parameter(), small).worst == (pytest.approx(1e-2), "vision.small"), "a small one that is wrong is"


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (parameter(difference=0.5), 0.5),
        (parameter(norm=0.0, reference=0.0), 0.0),
        (parameter(reference=0.0, difference=1.0), inf),
        (parameter(difference=inf, norm=inf), inf),
        (parameter(difference=nan), inf),
        (parameter(everywhere=False), inf),
    ],
)
def test_error_of_a_parameter(found: ParameterReport, error: float) -> None:
    assert module(found).worst[0] == error


def test_a_report_without_steps_has_not_passed() -> None:
    report = CheckReport(1e-10)
    assert not report.passed
    with pytest.raises(HeteroError, match="no optimizer step was compared"):
        report.raise_if_failed()


@pytest.mark.parametrize(("loss_error", "norm_error"), [(1e-3, 0.0), (0.0, 1e-3), (inf, 0.0)])
def test_the_loss_and_the_whole_norm_count(loss_error: float, norm_error: float) -> None:
    step = StepReport([module(parameter())], 1.0, loss_error, 1.0, norm_error, 4, 2)
    report = CheckReport(1e-10, [step])
    assert not report.passed
    assert len(report.failures) == 1
    assert CheckReport(1e-2, [step]).passed == (max(loss_error, norm_error) < 1e-2)


# ---------------------------------------------------------------- what it refuses


class Model(LightningModule):
    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.llm = nn.Linear(2, 1)
        self.automatic_optimization = automatic

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.llm(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_refuses_other_strategies() -> None:
    trainer = Trainer(max_steps=1, devices=1, callbacks=[GradientCheck()], **SILENT)  # type: ignore[arg-type]
    with pytest.raises(HeteroError, match="the strategy is SingleDeviceStrategy; use Trainer"):
        trainer.fit(Model(), DataLoader(torch.ones(2, 2)))


def test_refuses_manual_optimization() -> None:
    trainer, check = checking_trainer(accelerator="cpu", devices=1)
    with pytest.raises(HeteroError, match="Model sets automatic_optimization = False"):
        check.setup(trainer, Model(automatic=False), "fit")


def test_precision_of_the_trainer() -> None:
    for flag, expected in (("64-true", "64-true"), (64, "64-true"), ("32-true", "32-true"), (None, "32-true")):
        trainer, _ = checking_trainer(precision=flag, accelerator="cpu", devices=1, strategy=HeteroStrategy())  # type: ignore[arg-type]
        assert trainer.precision == expected
        assert trainer.strategy.precision_plugin.precision == expected

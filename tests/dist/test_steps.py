"""Steps of several backwards, uneven ends, and precision: the gradient stays that of one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ModuleLayout
from lightning_hetero.gradients import local
from tests.dist import vlm
from tests.dist.test_parity import case
from tests.harness import Pool
from tests.harness.parity import SILENT, Case, assert_parity, reference_run

MIXED = ((4, 1), (2, 2))
SHARDS = list(product((1, "full"), repeat=2))


def batches(sizes: list[int]) -> list[list[dict[str, Tensor]]]:
    data = vlm.samples(sum(sizes))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def test_accumulation(pool: Pool) -> None:
    """Three batches a step, and a last step of one: Lightning's meaning, the mean over the batches."""
    data = batches([8, 8, 8, 8])
    reference = reference_run(vlm.build, data, vlm.collate, accumulate_grad_batches=3, gradient_clip_val=0.5)
    trainer = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    cases = [case(*MIXED, shards, trainer=trainer) for shards in SHARDS]
    assert_parity(pool, 4, cases, vlm.build, data, vlm.collate, reference)


@pytest.mark.parametrize(("microbatches", "accumulate"), [(2, 1), (3, 1), (2, 2)])
def test_microbatches(pool: Pool, microbatches: int, accumulate: int) -> None:
    """The step's gradient is that of the whole batch: token_mean divides by the tokens of all its microbatches."""
    data = batches([12, 12])
    reference = reference_run(vlm.build, data, vlm.collate, accumulate_grad_batches=accumulate)
    cases = [
        case(*MIXED, shards, trainer={"accumulate_grad_batches": accumulate}, strategy={"microbatches": microbatches})
        for shards in SHARDS
    ]
    assert_parity(pool, 4, cases, vlm.build, data, vlm.collate, reference)


@pytest.mark.parametrize("last", [1, 3])
def test_a_last_batch_that_not_every_replica_has_samples_of(pool: Pool, last: int) -> None:
    data = batches([16, last])
    reference = reference_run(vlm.build, data, vlm.collate)
    layouts = [((4, 1), (4, 1)), ((4, 1), (2, 2)), ((2, 2), (4, 1))]
    cases = [case(*layout, shards) for layout in layouts for shards in ((1, 1), ("full", "full"))]
    for tested in cases:  # one batch size for all: replicas differ
        assert_parity(pool, 4, [tested], vlm.build, data, vlm.collate, reference)


class Miscounted(vlm.SmallModule):
    def count_tokens(self, batch: dict[str, Tensor]) -> int:
        return super().count_tokens(batch) + 1


def _miscount() -> str:
    module = Miscounted(**vlm.build().hparams)
    strategy = HeteroStrategy({"vision": ModuleLayout(), "llm": ModuleLayout()}, microbatches=2)
    trainer = Trainer(strategy=strategy, devices=2, max_steps=1, **SILENT)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"count_tokens") as error:
        trainer.fit(module.double(), DataLoader(vlm.samples(8), batch_size=4, collate_fn=vlm.collate))
    return str(error.value)


def test_tokens_that_do_not_add_up_to_what_was_declared(pool: Pool) -> None:
    for message in pool.run(_miscount, 2):
        assert "over the step's 2 microbatches, but count_tokens(batch)" in message


class Halves(LightningModule):
    """Plain modules without token_mean: with microbatches the loss is the mean of the microbatches' losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.llm = nn.Linear(3, 4), nn.Linear(4, 2)
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.llm(torch.tanh(self.vision(batch))).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_microbatches_without_tokens(pool: Pool) -> None:
    rows = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    data = [rows[:8], rows[8:]]
    reference = reference_run(Halves, data, torch.stack)
    layouts = {"vision": ModuleLayout(), "llm": ModuleLayout(shard_size=1)}
    cases = [Case(layouts, strategy={"microbatches": m}) for m in (2, 4)]
    assert_parity(pool, 2, cases, Halves, data, torch.stack, reference)


# ---------------------------------------------------------------- precision


class Overflow(Callback):
    """Puts an inf into one gradient of one module on one rank in one step."""

    def __init__(self, module: str, rank: int, step: int) -> None:
        self.module, self.rank, self.step = module, rank, step
        self.found: list[tuple[float, bool]] = []
        self.weights: list[Tensor] = []

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.global_rank == self.rank and trainer.fit_loop.total_batch_idx == self.step:
            for name, parameter in module.named_parameters():
                if name.startswith(self.module) and parameter.grad is not None and local(parameter.grad).numel():
                    local(parameter.grad).view(-1)[0] = float("inf")
                    return

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        weights = torch.cat([local(p.detach()).reshape(-1) for p in module.parameters()])
        moved = not self.weights or not torch.equal(self.weights[-1], weights)
        self.weights.append(weights.clone())
        scaler = trainer.precision_plugin.scaler  # type: ignore[union-attr]
        self.found.append((scaler.get_scale(), moved))


def _overflow(module: str, rank: int) -> list[tuple[float, bool]]:
    class Single(vlm.SmallModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step({**batch, "images": batch["images"].float()}, batch_idx)

    torch.manual_seed(0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    layouts = {"vision": ModuleLayout(), "llm": ModuleLayout(tensor_parallel_size=2, shard_size=1)}
    watch = Overflow(module, rank, step=1)
    trainer = Trainer(
        strategy=HeteroStrategy(layouts), devices=4, max_steps=3, plugins=[plugin], callbacks=[watch], **SILENT
    )  # type: ignore[arg-type]
    trainer.fit(Single(**vlm.build().hparams), DataLoader(vlm.samples(24), batch_size=4, collate_fn=vlm.collate))
    return watch.found


@pytest.mark.parametrize(("module", "rank"), [("vision", 3), ("llm", 0)])
def test_an_overflow_in_one_module_on_one_rank_is_everyones(pool: Pool, module: str, rank: int) -> None:
    for found in pool.run(partial(_overflow, module, rank), 4):
        assert [scale for scale, _ in found] == [8.0, 4.0, 4.0], "one common scale, halved once"
        assert [moved for _, moved in found[1:]] == [False, True], "the step is skipped everywhere"

"""Ragged steps, each a way in which training hangs or goes silently wrong elsewhere: no item here, no call there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_hetero import ModuleLayout, token_mean
from tests.harness import Pool
from tests.harness.parity import Case, assert_parity, reference_run

WIDTH, VOCABULARY = 6, 11


class Tower(nn.Module):
    """An encoder with two blocks, a norm (zeros would make it NaN-prone) and a row for each item."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, items: Tensor) -> Tensor:
        x = self.embed(items)
        for block in self.blocks:
            x = torch.tanh(block(self.norm(x)))
        return x


class Language(nn.Module):
    """A driver whose embedding can be a unit of its own and is called from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


class Ragged(LightningModule):
    """A multimodal step as users write it: what is not in the batch is not called.

    Args:
        order: Where the towers are called: before or after the embedding.
        frozen: Names of submodules without gradients.
        always: Call the first tower also with zero items.
    """

    def __init__(self, order: str = "after", frozen: tuple[str, ...] = (), always: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.audio, self.llm = Tower(), Tower(), Language()
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.order, self.always = order, always
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)
        self.double()

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> Tensor:
        """A batch is a list of samples; the loss is the mean over them."""
        if self.order == "before":
            features = self.encode(batch)
            hidden = self.llm.embed(torch.tensor([sample["id"] for sample in batch]))
        else:
            hidden = self.llm.embed(torch.tensor([sample["id"] for sample in batch]))
            features = self.encode(batch)
        for name, rows in features.items():
            owner = torch.tensor(
                [i for i, sample in enumerate(batch) for _ in range(len(sample[name]))], dtype=torch.long
            )
            hidden = hidden + torch.zeros_like(hidden).index_add(0, owner, self.projector(rows))
        return self.llm(hidden).pow(2).mean()

    def encode(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Images and videos go through the same tower in two calls."""
        features = {}
        for name, tower in (("images", self.vision), ("videos", self.vision), ("audios", self.audio)):
            items = torch.cat([sample[name] for sample in batch])
            if len(items) or (self.always and name == "images"):
                features[name] = tower(items)
        return features

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD if self.always else torch.optim.AdamW
        return optimizer((p for p in self.parameters() if p.requires_grad), lr=1e-3)


def sample(index: int, images: int = 0, videos: int = 0, audios: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    counts = {"images": images, "videos": videos, "audios": audios}
    return {"id": index % VOCABULARY} | {
        name: torch.randn(n, 3, generator=generator, dtype=torch.float64) for name, n in counts.items()
    }


def batch(*counts: tuple[int, ...]) -> list[dict[str, Any]]:
    return [sample(i + 1, *c) for i, c in enumerate(counts)]


def layouts(tower: Any, llm: Any, **fields: Any) -> dict[str, ModuleLayout]:
    def tensor(size: int) -> dict[str, Any]:
        return {"tensor_parallel_size": size, "tensor_parallel_plan": {"blocks.*": "colwise_rep"}}

    return {
        "vision": ModuleLayout(shard_size=tower[1], **tensor(tower[0])),
        "audio": ModuleLayout(**tensor(1)),
        "llm": ModuleLayout(shard_size=llm[1], fsdp_units=["embed", "blocks.*"], **tensor(llm[0]), **fields),
    }


FSDP = (1, "full")
SPLIT = (2, "full")

# world, (tensor, shard) of the tower, of the driver, and for each step the (images, videos, audios) of each sample
NAMED: dict[str, tuple[int, Any, Any, list[list[tuple[int, ...]]]]] = {
    "one rank text only": (2, FSDP, FSDP, [[(1,), (0,)], [(0,), (2,)], [(1,), (1,)]]),
    "all ranks text only": (2, FSDP, FSDP, [[(0,), (0,)], [(1,), (0,)], [(0,), (0,)]]),
    "one text only in fan-in": (4, SPLIT, FSDP, [[(1,), (0,), (0,), (2,)], [(0,), (0,), (0,), (1,)]]),
    "one text only in fan-out": (4, FSDP, SPLIT, [[(2,), (0,)], [(0,), (3,)]]),
    "one encoder replica without items": (4, FSDP, SPLIT, [[(1,), (2,)], [(1,), (1,)]]),
    "seven images beside none": (4, FSDP, FSDP, [[(7,), (0,), (0,), (0,)], [(0,), (0,), (7,), (1,)]]),
    "images here, videos there": (2, FSDP, FSDP, [[(2, 0), (0, 3)], [(0, 1), (1, 0)]]),
    "called twice here, once there": (2, FSDP, FSDP, [[(2, 1), (1, 0)], [(0, 1), (1, 2)]]),
    "two towers, skipped at will": (
        3,
        FSDP,
        FSDP,
        [[(1, 0, 0), (0, 0, 2), (0, 0, 0)], [(0, 1, 1), (1, 0, 0), (0, 0, 1)]],
    ),
    "towers replicated, driver sharded": (2, (1, 1), FSDP, [[(1,), (0,)], [(0,), (0, 0, 1)]]),
    "driver replicated, towers sharded": (2, FSDP, (1, 1), [[(1,), (0,)], [(0,), (0, 0, 1)]]),
    "everything split": (4, SPLIT, SPLIT, [[(1, 0, 1), (0, 2, 0)], [(0,), (0, 0, 1)]]),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("order", ["before", "after"])
def test_named_cases(pool: Pool, name: str, order: str) -> None:
    world, tower, llm, steps = NAMED[name]
    batches = [batch(*counts) for counts in steps]
    factory = partial(Ragged, order)
    reference = reference_run(factory, batches, list, gradient_clip_val=0.1)
    case = Case(layouts(tower, llm), trainer={"gradient_clip_val": 0.1})
    (reports,) = assert_parity(pool, world, [case], factory, batches, list, reference)
    items = sum(len(s["images"]) + len(s["videos"]) for step in batches for s in step)
    assert sum(report.items["vision"] for report in reports) == items * tower[0]


def test_a_call_with_zero_items_everywhere(pool: Pool) -> None:
    """Also before any call has shown what its result looks like.

    The call is skipped: where one process has a gradient of zero there is none, so AdamW would not decay as it does.
    """
    batches = [batch((0,), (0,)), batch((1,), (0,)), batch((0,), (0,))]
    factory = partial(Ragged, always=True)
    reference = reference_run(factory, batches, list)
    assert_parity(pool, 2, [Case(layouts(FSDP, FSDP))], factory, batches, list, reference)


@pytest.mark.parametrize(
    "frozen",
    [
        ("vision", "audio", "llm"),
        ("vision", "audio"),
        ("llm",),
        ("projector", "vision", "audio"),
        ("vision", "audio", "llm.embed"),
    ],
)
def test_frozen_parts_with_a_text_only_replica(pool: Pool, frozen: tuple[str, ...]) -> None:
    """The first is LLaVA's first stage: a frozen tower, a plain trainable projector, a frozen sharded LLM."""
    batches = [batch((1, 0, 1), (0,)), batch((0,), (2,)), batch((1,), (0, 1))]
    factory = partial(Ragged, frozen=frozen)
    reference = reference_run(factory, batches, list)
    cases = [Case(layouts(FSDP, FSDP)), Case(layouts((1, 1), (1, 1)))]
    for reports in assert_parity(pool, 2, cases, factory, batches, list, reference):
        for report in reports:
            if "vision" in frozen:
                assert report.backward_bytes["vision"] == 0


@pytest.mark.parametrize("strategy", [{"microbatches": 1}, {"microbatches": 2}])
def test_an_encoder_that_only_the_first_of_accumulated_batches_uses(pool: Pool, strategy: dict[str, int]) -> None:
    """FSDP2 gathers gradients until a backward that reduces them; here that backward does not run through the tower."""
    batches = [batch((1,), (2,), (0, 1), (1,)), batch((0,), (0,), (0,), (0,))]
    reference = reference_run(Ragged, batches, list, accumulate_grad_batches=2)
    case = Case(layouts(FSDP, FSDP), trainer={"accumulate_grad_batches": 2}, strategy=strategy)
    assert_parity(pool, 2, [case], Ragged, batches, list, reference)


class Features(Ragged):
    """The driver takes the features as an argument, so on one rank its inputs require gradients and on another not."""

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> Tensor:
        features = self.encode(batch).get("images")
        owner = torch.arange(len(batch)).repeat_interleave(torch.tensor([len(sample["images"]) for sample in batch]))
        return self.llm(torch.tensor([sample["id"] for sample in batch]), features, owner).pow(2).mean()


class Merging(Language):
    def forward(self, ids: Tensor, features: Tensor | None, owner: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.embed(ids)
        if features is not None:
            hidden = hidden + torch.zeros_like(hidden).index_add(0, owner, features)
        return super().forward(hidden)


def merging() -> Features:
    module = Features()
    torch.manual_seed(1)
    module.llm = Merging().double()
    return module


def test_features_as_an_argument_of_the_driver(pool: Pool) -> None:
    """FSDP2 would reduce the driver's root before the encoder's backward on one rank and after it on the other."""
    batches = [batch((1,), (0,)), batch((0,), (2,))]
    reference = reference_run(merging, batches, list)
    assert_parity(pool, 2, [Case(layouts(FSDP, FSDP))], merging, batches, list, reference)


class Reducing(Ragged):
    """Reduces over the replicas in the middle of the step, where some have called an encoder and others have not."""

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, batch_size=len(batch))
        assert self.all_gather(loss.detach()).ndim == (1 if self.trainer.world_size > 1 else 0)
        self.trainer.strategy.barrier()
        return token_mean(self, loss * len(batch), len(batch))


@pytest.mark.parametrize("llm", [FSDP, (1, 1)])
def test_reductions_in_a_step_with_a_text_only_replica(pool: Pool, llm: Any) -> None:
    """A driver without collectives of its own goes straight to them."""
    batches = [batch((1,), (0,)), batch((0,), (0, 0, 2)), batch((0,), (0,))]
    reference = reference_run(Reducing, batches, list)
    assert_parity(pool, 2, [Case(layouts(FSDP, llm))], Reducing, batches, list, reference)

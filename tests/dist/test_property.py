"""Random layouts, batches and settings: the gradient of one process, the closed forms of items and memory, no hang."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero import ModuleLayout, token_mean
from lightning_hetero.models import AudioEncoder, Decoder, VisionEncoder
from lightning_hetero.models.audio import valid_rows
from tests.harness import Pool
from tests.harness.parity import Case, assert_parity, reference_run

IMAGE, CLIP, TEXT, WIDTH, MELS = 1, 2, 3, 24, 5
TENSOR_SIZES = (1, 2, 3, 4, 6)


class Omni(LightningModule):
    """The reference encoders and decoder. A step calls what its batch holds, as users write it.

    Args:
        frozen: Submodules without gradients.
        skips: Whether an encoder without items is not called at all, or called with nothing.
    """

    def __init__(self, frozen: tuple[str, ...] = (), skips: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"width": 12, "depth": 1, "heads": 12, "mlp_ratio": 2.0, "output_width": WIDTH}
        self.vision = VisionEncoder(image_size=4, patch_size=2, tokens_per_image=1, **sizes)  # type: ignore[arg-type]
        self.audio = AudioEncoder(mels=MELS, **sizes)  # type: ignore[arg-type]
        self.llm = Decoder(vocab_size=24, width=WIDTH, depth=2, heads=24, kv_heads=12, head_dim=2, mlp_width=24)
        self.skips = skips
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        parts = []
        if len(batch["images"]) or not self.skips:
            parts.append((IMAGE, self.vision(batch["images"]).flatten(0, 1)))
        if len(batch["lengths"]) or not self.skips:
            parts.append((CLIP, valid_rows(*self.audio(batch["clips"], batch["lengths"]))))
        ids = batch["input_ids"]
        rows = torch.zeros(*ids.shape, WIDTH, dtype=torch.float64)
        for kind, values in parts:
            rows = rows.masked_scatter((ids == kind).unsqueeze(-1), values)
        mask = (ids == IMAGE) | (ids == CLIP)
        logits = self.llm(ids, rows[mask], mask)[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return token_mean(self, loss, (labels != -100).sum())

    def split_batch(self, batch: dict[str, Tensor], n: int) -> list[dict[str, Tensor]]:
        samples = batch["samples"]
        size = len(samples)
        ends = [(k + 1) * (size // n) + min(k + 1, size % n) for k in range(n)]
        return [collate(samples[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


def make_sample(index: int, images: int, clips: tuple[int, ...]) -> dict[str, Any]:
    """A sample with its own data: ``images`` images and clips of these numbers of frames."""
    generator = torch.Generator().manual_seed(index)
    rows = sum((frames + 1) // 2 for frames in clips)
    prompt = [IMAGE] * images + [CLIP] * rows + torch.randint(TEXT, 24, (2,), generator=generator).tolist()
    answer = torch.randint(TEXT, 24, (1 + index % 3,), generator=generator).tolist()
    return {
        "ids": prompt + answer,
        "labels": [-100] * len(prompt) + answer,
        "images": torch.randn(images, 1, 4, 4, generator=generator, dtype=torch.float64),
        "clips": [torch.randn(MELS, n, generator=generator, dtype=torch.float64) for n in clips],
    }


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = 20
    clips = [clip for sample in samples for clip in sample["clips"]]
    frames = max((clip.shape[1] for clip in clips), default=1)
    return {
        "input_ids": torch.tensor([s["ids"] + [0] * (longest - len(s["ids"])) for s in samples]),
        "labels": torch.tensor([s["labels"] + [-100] * (longest - len(s["labels"])) for s in samples]),
        "images": torch.cat([s["images"] for s in samples]),
        "clips": torch.stack([F.pad(c, (0, frames - c.shape[1])) for c in clips])
        if clips
        else torch.zeros(0, MELS, 1, dtype=torch.float64),
        "lengths": torch.tensor([clip.shape[1] for clip in clips], dtype=torch.long),
        "samples": samples,
    }


@dataclass(frozen=True)
class Scenario:
    """All that a run is made from: its ``repr`` is a one-line reproduction (``check_scenario(pool, Scenario(...))``).

    Attributes:
        world: Number of ranks.
        tensor: Tensor sizes of vision, audio and llm.
        shard: Shard sizes.
        recompute: Activation checkpointing.
        balance: Of both encoders.
        steps: For every batch, for every sample, the images and the clips' frames.
        frozen: Submodules.
        skips: Whether encoders without items are called.
        microbatches: Of the strategy.
        accumulate: Of the Trainer.
        clip: ``(algorithm, value)``.
    """

    world: int
    tensor: tuple[int, int, int]
    shard: tuple[int | str, int | str, int | str]
    recompute: tuple[str, str, str]
    balance: str
    steps: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    frozen: tuple[str, ...]
    skips: bool
    microbatches: int
    accumulate: int
    clip: tuple[str, float] | None

    @property
    def case(self) -> Case:
        layouts = {
            name: ModuleLayout(
                tensor_parallel_size=t,
                shard_size=s,  # type: ignore[arg-type]
                activation_checkpointing=r,  # type: ignore[arg-type]
                balance=self.balance,  # type: ignore[arg-type]
            )
            for name, t, s, r in zip(("vision", "audio", "llm"), self.tensor, self.shard, self.recompute, strict=True)
        }
        return Case(layouts, trainer=self.trainer, strategy={"microbatches": self.microbatches})

    @property
    def trainer(self) -> dict[str, Any]:
        clip = {"gradient_clip_algorithm": self.clip[0], "gradient_clip_val": self.clip[1]} if self.clip else {}
        return {"accumulate_grad_batches": self.accumulate, **clip}


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    world = draw(st.integers(1, 8))
    sizes = [size for size in TENSOR_SIZES if world % size == 0]
    tensor = tuple(draw(st.sampled_from(sizes)) for _ in range(3))
    shard = tuple(
        draw(st.sampled_from(["full", *(n for n in range(1, world // t + 1) if world // t % n == 0)])) for t in tensor
    )
    replicas = world // tensor[2]
    microbatches = draw(st.sampled_from([1, 1, 2, 3]))
    per_replica = draw(st.integers(microbatches, microbatches + 1))
    item = st.tuples(st.integers(0, 4), st.lists(st.integers(1, 7), max_size=2).map(tuple))
    full = st.lists(item, min_size=per_replica * replicas, max_size=per_replica * replicas).map(tuple)
    steps = draw(st.lists(full, min_size=1, max_size=2))
    if microbatches == 1 and draw(st.booleans()):  # an uneven end: fewer samples than replicas, maybe
        steps.append(draw(st.lists(item, min_size=1, max_size=per_replica * replicas).map(tuple)))
    return Scenario(
        world=world,
        tensor=tensor,  # type: ignore[arg-type]
        shard=shard,  # type: ignore[arg-type]
        recompute=tuple(draw(st.sampled_from(["none", "full"])) for _ in range(3)),  # type: ignore[arg-type]
        balance=draw(st.sampled_from(["none", "replica", "global"])),
        steps=tuple(steps),
        frozen=draw(st.sampled_from([(), (), ("vision",), ("audio",), ("vision", "audio"), ("llm",), ("llm.blocks",)])),
        skips=draw(st.booleans()),
        microbatches=microbatches,
        accumulate=draw(st.sampled_from([1, 1, 2])),
        clip=draw(st.sampled_from([None, ("norm", 0.05), ("value", 1e-3)])),
    )


def check_scenario(pool: Pool, scenario: Scenario) -> None:
    """Runs one scenario against one process."""
    if scenario.frozen == ("llm",):
        # Without an item there is nothing to train on, and one process fails too.
        assume(all(any(images or clips for images, clips in step) for step in scenario.steps))
    number = iter(range(1, 10_000))
    batches = [[make_sample(next(number), *item) for item in step] for step in scenario.steps]
    # A call without items anywhere is skipped, where one process has gradients of zero and AdamW decays on them.
    empty = any(not sum(images for images, _ in s) or not sum(map(len, (c for _, c in s))) for s in scenario.steps)
    factory = partial(Omni, scenario.frozen, scenario.skips or empty or scenario.microbatches > 1)
    reference = reference_run(factory, batches, collate, **scenario.trainer)
    (reports,) = assert_parity(pool, scenario.world, [scenario.case], factory, batches, collate, reference)
    # A replica that a short last batch has no sample for runs the batch's first one again, and its items with it.
    replicas = scenario.world // scenario.tensor[2]
    ran = [item for step in scenario.steps for item in (*step, *step[:1] * (replicas - len(step)))]
    for name, count in (("vision", sum(i for i, _ in ran)), ("audio", sum(len(clips) for _, clips in ran))):
        copies = scenario.case.layouts[name].tensor_parallel_size
        assert sum(report.items[name] for report in reports) == count * copies, f"{name}: every item once, on each copy"
        if name in scenario.frozen:
            assert sum(report.backward_bytes[name] for report in reports) == 0, f"{name} is frozen: nothing comes back"


COVERED: Counter[str] = Counter()


def count(scenario: Scenario) -> None:
    """Notes the values drawn, for the coverage table."""
    COVERED[f"world {scenario.world}"] += 1
    COVERED[f"balance {scenario.balance}"] += 1
    COVERED[f"microbatches {scenario.microbatches}"] += 1
    COVERED[f"accumulate {scenario.accumulate}"] += 1
    COVERED[f"clip {scenario.clip[0] if scenario.clip else None}"] += 1
    COVERED[f"frozen {scenario.frozen}"] += 1
    for kind in {("sharded" if s == "full" else "replicated" if s == 1 else "hybrid") for s in scenario.shard}:
        COVERED[kind] += 1
    for size in set(scenario.tensor):
        COVERED[f"tensor {size}"] += 1
    for recompute in set(scenario.recompute):
        COVERED[f"checkpointing {recompute}"] += 1
    R, E = (scenario.world // scenario.tensor[i] for i in (2, 0))
    COVERED["equal" if R == E else "nested" if R % E == 0 or E % R == 0 else "straddling"] += 1


@pytest.mark.timeout(0)
def test_random_scenarios(pool: Pool) -> None:
    run_scenarios(pool, 15)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_thousand_random_scenarios(pool: Pool) -> None:
    run_scenarios(pool, 1000)
    for value, times in sorted(COVERED.items()):
        print(f"{value:32} {times}")
    assert min(COVERED.values()) >= 10


def run_scenarios(pool: Pool, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(scenarios())
    def property_(scenario: Scenario) -> None:
        count(scenario)
        check_scenario(pool, scenario)

    property_()

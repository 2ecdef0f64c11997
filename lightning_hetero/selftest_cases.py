"""The contracts of the self-test: layouts, a small model with generated data, and what is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import combinations, product
from math import sqrt
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero.check import GradientCheck, checking_trainer, compare_gradients
from lightning_hetero.check_report import FLOORS, TOLERANCES, CheckReport, relative
from lightning_hetero.layout import ModuleLayout, ResolvedLayout
from lightning_hetero.models import VisionLanguageModule
from lightning_hetero.models.decoder import DecoderConfig
from lightning_hetero.models.vit import VisionConfig
from lightning_hetero.strategy import HeteroStrategy

TIMEOUT = timedelta(minutes=3)
"""Of a collective: no case takes as long, so a hang becomes an error."""

Precision = Literal["64-true", "32-true"]
Layouts = dict[str, ModuleLayout]

# ---------------------------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------------------------


def factorizations(devices: int) -> list[tuple[int, int]]:
    """All ``(data, tensor)`` sizes that multiply to the number of devices."""
    return [(devices // tensor, tensor) for tensor in range(1, devices + 1) if devices % tensor == 0]


def layout_pairs(devices: int) -> list[Layouts]:
    """Encoder and LLM in every pair of factorizations, sharded with FSDP2."""
    return [_layouts(vision, "full", llm, "full") for vision, llm in product(factorizations(devices), repeat=2)]


def all_layouts(devices: int) -> list[Layouts]:
    """Every pair of factorizations, both sharded, both replicated, and each hybrid (half way) beside a sharded one."""
    found = []
    for vision, llm in product(factorizations(devices), repeat=2):
        shards: list[tuple[int | str, int | str]] = [("full", "full"), (1, 1)]
        shards += [(size, "full") for size in hybrid_sizes(vision[0])[:1]]
        shards += [("full", size) for size in hybrid_sizes(llm[0])[:1]]
        if vision[0] == llm[0] == 1:
            shards = shards[:1]  # nothing to shard over
        found += [_layouts(vision, a, llm, b) for a, b in shards]
    return found


def hybrid_sizes(data: int) -> list[int]:
    """Shard sizes between replicated and fully sharded, largest first."""
    return [size for size in range(data - 1, 1, -1) if data % size == 0]


def _layouts(vision: tuple[int, int], vision_shards: int | str, llm: tuple[int, int], llm_shards: int | str) -> Layouts:
    return {
        "vision": ModuleLayout(tensor_parallel_size=vision[1], shard_size=vision_shards),  # type: ignore[arg-type]
        "llm": ModuleLayout(tensor_parallel_size=llm[1], shard_size=llm_shards),  # type: ignore[arg-type]
    }


def show_layouts(layouts: Layouts, devices: int) -> str:
    """Layouts in a few words: ``vision 2x2 sharded, llm 4x1 replicated`` (data x tensor)."""
    words = []
    for name, layout in layouts.items():
        data = devices // layout.tensor_parallel_size
        how = {"full": "sharded", 1: "replicated"}.get(layout.shard_size, f"sharded over {layout.shard_size}")
        words.append(f"{name} {data}x{layout.tensor_parallel_size} {how if data > 1 else ''}".rstrip())
    return ", ".join(words)


# ---------------------------------------------------------------------------------------------------------------------
# Model and data
# ---------------------------------------------------------------------------------------------------------------------

PLACEHOLDER, TOKENS_PER_IMAGE, MAX_IMAGES = 3, 4, 7
SEQUENCE = TOKENS_PER_IMAGE * MAX_IMAGES + 8


class SmallModule(VisionLanguageModule):
    """The reference model so small that a step takes no time; every divisor of the number of devices splits it.

    Args:
        devices: Number of devices.
        skips: Do not call the encoder for a batch without images, as many training steps do.
    """

    def __init__(self, devices: int, skips: bool = False) -> None:
        torch.manual_seed(0)
        heads = max(2, devices)
        super().__init__(
            vision=VisionConfig(width=4 * heads, depth=1, heads=heads, tokens_per_image=TOKENS_PER_IMAGE),
            llm=DecoderConfig(
                vocab_size=devices * -(-32 // devices),
                width=4 * heads,
                depth=2,
                heads=2 * heads,
                kv_heads=heads,
                mlp_width=8 * heads,
            ),
        )
        self.skips = skips

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.skips and not len(batch["images"]):
            return self.llm(batch["input_ids"])
        return super().forward(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_samples(images: Sequence[int]) -> list[dict[str, Tensor]]:
    """Samples with so many images each; all differ in images, question and length of the answer."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for count in images:
        answer = int(torch.randint(1, 4, (), generator=generator))
        prompt = [PLACEHOLDER] * (count * TOKENS_PER_IMAGE) + torch.randint(4, 32, (4,), generator=generator).tolist()
        tokens = prompt + torch.randint(4, 32, (answer,), generator=generator).tolist()
        padding = SEQUENCE - len(tokens)
        samples.append(
            {
                "input_ids": torch.tensor(tokens + [0] * padding),
                "labels": torch.tensor([-100] * len(prompt) + tokens[len(prompt) :] + [-100] * padding),
                "images": torch.randn(count, 1, 8, 8, generator=generator),
            }
        )
    return samples


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One batch, the images of all samples behind each other."""
    input_ids = torch.stack([sample["input_ids"] for sample in samples])
    return {
        "input_ids": input_ids,
        "labels": torch.stack([sample["labels"] for sample in samples]),
        "feature_mask": input_ids == PLACEHOLDER,
        "images": torch.cat([sample["images"] for sample in samples]),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Contracts
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Where cases run, and in which precision."""

    devices: int  # of all nodes
    accelerator: str
    num_nodes: int
    precision: Precision

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "64-true" else torch.float32

    def trainer(self, layouts: Layouts, **options: Any) -> Trainer:
        """A Trainer without callbacks."""
        trainer, _ = checking_trainer(
            precision=self.precision,
            accelerator=self.accelerator,
            devices=self.devices // self.num_nodes,
            num_nodes=self.num_nodes,
            strategy=HeteroStrategy(dict(layouts), timeout=TIMEOUT),
            **options,
        )
        trainer.callbacks.clear()  # type: ignore[attr-defined]
        return trainer

    def train(
        self,
        module: LightningModule,
        layouts: Layouts,
        images: Sequence[Sequence[int]],
        *callbacks: Callback,
        **options: Any,
    ) -> CheckReport:
        """Trains under a gradient check for as many steps as ``images`` has entries.

        Args:
            module: The LightningModule.
            layouts: Its layouts.
            images: For each step the numbers of images of the samples of a global batch.
            *callbacks: That run after the check.
            **options: Further arguments of the Trainer.
        """
        check = GradientCheck(len(images), TOLERANCES[self.dtype])
        trainer = self.trainer(layouts, steps=len(images), **options)
        trainer.callbacks += [check, *callbacks]  # type: ignore[attr-defined]
        replicas = self.devices // layouts["llm"].tensor_parallel_size
        samples = make_samples([count for batch in images for count in batch])
        loader: DataLoader = DataLoader(samples, batch_size=len(images[0]) // replicas, collate_fn=collate)  # type: ignore[arg-type]
        trainer.fit(module, loader)
        return check.report


@dataclass(frozen=True)
class Case:
    """A training run that yields its largest error, and what is wrong."""

    text: str
    run: Callable[[], tuple[float, Sequence[str]]]


@dataclass(frozen=True)
class Contract:
    """What holds, and the cases in which it is tried."""

    name: str
    meaning: str
    tolerance: float
    cases: Sequence[Case]


def contracts(setup: Setup) -> list[Contract]:
    """All contracts, with their cases on so many devices."""
    devices, tolerance = setup.devices, TOLERANCES[setup.dtype]

    def cases(run: Callable[..., Any], layouts: Sequence[Layouts], more: str = "", **arguments: Any) -> list[Case]:
        return [Case(show_layouts(each, devices) + more, partial(run, setup, each, **arguments)) for each in layouts]

    pairs = layout_pairs(devices)
    data_parallel = [_replicated(each) for each in pairs if each["vision"].tensor_parallel_size == 1]
    return [
        Contract(
            "gradient",
            "every gradient and loss is that of one process",
            tolerance,
            cases(gradient_case, all_layouts(devices)),
        ),
        Contract(
            "ragged",
            "also where replicas have no images or skip the encoder",
            tolerance,
            cases(ragged_case, pairs, ", skipped calls", skips=True)
            + cases(ragged_case, data_parallel, ", calls without items", skips=False),
        ),
        Contract(
            "clip",
            "gradient norm and clipped gradients are those of one process",
            tolerance,
            cases(clip_case, pairs),
        ),
        Contract(
            "random streams",
            "dropout masks agree, differ and come again where they must",
            0.0,
            cases(random_case, pairs),
        ),
    ]


def _replicated(layouts: Layouts) -> Layouts:
    return {
        name: ModuleLayout(tensor_parallel_size=layout.tensor_parallel_size, shard_size=1)
        for name, layout in layouts.items()
    }


def gradient_case(setup: Setup, layouts: Layouts) -> tuple[float, Sequence[str]]:
    """One step."""
    batch = [1 + i % 3 for i in range(2 * setup.devices)]
    report = setup.train(SmallModule(setup.devices), layouts, [batch])
    return report.worst, report.failures


def ragged_case(setup: Setup, layouts: Layouts, skips: bool) -> tuple[float, Sequence[str]]:
    """Images in the last sample only; nowhere; here and there in the first half of the samples."""
    samples = 2 * setup.devices
    batches = [
        [0] * (samples - 1) + [MAX_IMAGES],
        [0] * samples,
        [(2, 0, 3, 0, 1)[i % 5] if i < samples // 2 else 0 for i in range(samples)],
    ]
    report = setup.train(SmallModule(setup.devices, skips), layouts, batches)
    return report.worst, report.failures


CLIP = 0.1


class _Clipped(Callback):
    """After the optimizer step, compares clipped gradients and their norm with what clipping leaves in one process."""

    def __init__(self, setup: Setup) -> None:
        self.dtype = setup.dtype
        self.errors: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HeteroStrategy)
        check = next(callback for callback in trainer.callbacks if isinstance(callback, GradientCheck))  # type: ignore[attr-defined]
        one = check.one_process.module if check.one_process else None
        if one is not None:
            nn.utils.clip_grad_norm_(one.parameters(), CLIP)
        modules = compare_gradients(strategy, pl_module, one, FLOORS[self.dtype])
        norm = sqrt(sum(module.reference_norm**2 for module in modules))
        self.errors = {f"clipped gradient of {module.worst[1]}": module.worst[0] for module in modules}
        self.errors["norm after clipping"] = relative(abs(float(strategy.gradient_norm()) - norm), norm)


def clip_case(setup: Setup, layouts: Layouts) -> tuple[float, Sequence[str]]:
    """One step with a gradient that is longer than the limit."""
    clipped = _Clipped(setup)
    batch = [i % 3 for i in range(2 * setup.devices)]
    report = setup.train(SmallModule(setup.devices), layouts, [batch], clipped, gradient_clip_val=CLIP)
    wrong = [f"{what}: relative error {e:.1e}" for what, e in clipped.errors.items() if not e <= report.tolerance]
    if report.steps and report.steps[0].norm <= CLIP:
        wrong.append(
            f"the gradient norm {report.steps[0].norm:.3g} is not above the limit {CLIP}, so nothing was clipped"
        )
    return max(report.worst, *clipped.errors.values()), [*report.failures, *wrong]


class _Dropping(nn.Module):
    """A block whose dropout masks can be seen: one on activations that tensor ranks share out, one on whole ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.masks: list[tuple[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self._drop("sharded", self.fc1(x))
        return self._drop("shared", self.fc2(x))

    def _drop(self, kind: str, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append((kind, mask.detach().cpu()))
        return x * mask


class _Tower(nn.Module):
    tensor_parallel_plan = {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}
    fsdp_units = ["blocks.*"]

    def __init__(self, width: int, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Dropping(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Masks(LightningModule):
    def __init__(self, devices: int) -> None:
        super().__init__()
        self.vision, self.llm = (_Tower(16 * devices) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.llm(self.vision(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class _GatherMasks(Callback):
    """Brings the masks of all ranks together, by tower and block."""

    def __init__(self) -> None:
        self.by_rank: list[dict[str, list[list[tuple[str, Tensor]]]]] = []
        self.layouts: dict[str, ResolvedLayout] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HeteroStrategy)
        assert strategy.layouts is not None and strategy._groups is not None
        mine = {name: [block.masks for block in getattr(pl_module, name).blocks] for name in strategy.layouts.by_name}
        self.by_rank = [{} for _ in range(strategy.world_size)]
        dist.all_gather_object(self.by_rank, mine, group=strategy._groups.host)
        self.layouts = dict(strategy.layouts.by_name)


def random_case(setup: Setup, layouts: Layouts) -> tuple[float, Sequence[str]]:
    """One step with dropout and activation checkpointing; its error is the share of claims about masks that fail."""
    masks = _GatherMasks()
    module = _Masks(setup.devices)
    replicas = setup.devices // layouts["llm"].tensor_parallel_size
    fit = setup.trainer({name: replace(layout, activation_checkpointing="full") for name, layout in layouts.items()})
    fit.callbacks += [masks]  # type: ignore[attr-defined]
    samples = 2 * setup.devices
    data = torch.randn(samples, 16 * setup.devices, generator=torch.Generator().manual_seed(0))
    fit.fit(module, DataLoader(data, batch_size=samples // replicas))  # type: ignore[arg-type]
    claims = list(judge_masks(masks.by_rank, masks.layouts))
    failures = [f"it does not hold that {claim}" for claim, holds in claims if not holds]
    return len(failures) / len(claims), failures


def judge_masks(
    by_rank: Sequence[dict[str, list[list[tuple[str, Tensor]]]]], layouts: Mapping[str, ResolvedLayout]
) -> Iterator[tuple[str, bool]]:
    """What must hold for dropout masks, and whether it does.

    Args:
        by_rank: For each rank the masks of each tower's blocks: of the forward, then of the recomputation.
        layouts: Of the towers.
    """
    for rank, towers in enumerate(by_rank):
        drawn = [mask for blocks in towers.values() for masks in blocks for _, mask in masks[: len(masks) // 2]]
        yield f"rank {rank} draws no mask twice", not any(torch.equal(a, b) for a, b in combinations(drawn, 2))
        for name, blocks in towers.items():
            for masks in blocks:
                half = len(masks) // 2
                again = half > 0 and all(
                    torch.equal(a, b) for (_, a), (_, b) in zip(masks[:half], masks[half:], strict=True)
                )
                yield f"the recomputation of {name} on rank {rank} drops what the forward dropped", again
    for name, layout in layouts.items():
        for (rank, towers), (other, others) in combinations(enumerate(by_rank), 2):
            copies = layout.replica_of(rank) == layout.replica_of(other)
            for block, (masks, theirs) in enumerate(zip(towers[name], others[name], strict=True)):
                for (kind, mask), (_, their_mask) in zip(masks, theirs, strict=True):
                    agree = kind == "shared" and copies
                    verb = "are equal" if agree else "differ"
                    what = f"{kind} masks of {name}, block {block}, on ranks {rank} and {other} {verb}"
                    yield what, torch.equal(mask, their_mask) == agree

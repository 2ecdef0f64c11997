"""Dropout under tensor parallelism and activation checkpointing: who draws the same masks, and that they come again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_hetero.layout import Layouts, ModuleLayout, resolve_layouts
from lightning_hetero.mesh import build_mesh, create_groups
from lightning_hetero.models import Decoder, VisionEncoder
from lightning_hetero.parallelize.data import apply_fully_shard, resolve_units, uses_fsdp
from lightning_hetero.parallelize.plans import partial_submodules, resolve_plan
from lightning_hetero.parallelize.recompute import apply_recompute, resolve_recompute
from lightning_hetero.parallelize.streams import switch_streams
from lightning_hetero.parallelize.tensor import apply_tensor_parallel
from lightning_hetero.rng import RandomStreams, merge_states
from tests.harness import Pool
from tests.harness.parity import relative_error, whole

WORLD, TENSOR, DEPTH = 4, 2, 2  # data 2 x tensor 2
SEED = 7
CPU = torch.device("cpu")


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocab_size=24, width=32, depth=DEPTH, heads=4, kv_heads=2, mlp_width=32, dropout=0.1).double()


def vision() -> VisionEncoder:
    torch.manual_seed(0)
    return VisionEncoder(output_width=16, width=32, depth=DEPTH, heads=4, dropout=0.1).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "decoder": (decoder, lambda generator: torch.randint(0, 24, (3, 10), generator=generator)),
    "vision": (vision, lambda generator: torch.randn(3, 1, 8, 8, generator=generator).double()),
}


def inputs(model: str, seed: int = 0) -> Tensor:
    """Equal on all ranks: whatever differs comes from the random streams."""
    return MODELS[model][1](torch.Generator().manual_seed(seed))


def layouts(model: str, **layout: Any) -> Layouts:
    return resolve_layouts({model: ModuleLayout(tensor_parallel_size=TENSOR, **layout)}, model, WORLD)


# ---------------------------------------------------------------- on the ranks


@dataclass
class Placed:
    """A parallelised module and its streams, on one rank."""

    module: nn.Module
    streams: RandomStreams
    name: str
    mesh: DeviceMesh
    partial: list[str] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        with self.streams[self.name].running():
            return self.module(x)

    def gradients(self) -> dict[str, Tensor]:
        """Of this replica, whole."""
        result = {}
        for name, parameter in self.module.named_parameters():
            gradient = whole(parameter.grad)
            if gradient is not None and name.rpartition(".")[0] in self.partial:
                dist.all_reduce(gradient, group=self.mesh["tensor_parallel"].get_group())
            if gradient is not None:
                result[name] = gradient
        return result


def place(model: str, precision: MixedPrecisionPolicy | None = None, seed: int = SEED, **layout: Any) -> Placed:
    """Applies a layout in the strategy's order. Collective."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    resolved = layouts(model, **layout)
    of_module = resolved.driver
    groups = create_groups(resolved)
    mesh = build_mesh(of_module, groups, "cpu")
    streams = RandomStreams(resolved, groups.rank, seed, CPU)
    module = MODELS[model][0]()
    names = list(module.state_dict())
    plan = resolve_plan(module, of_module)
    units = resolve_units(module, of_module)
    recomputed = resolve_recompute(module, of_module, units)
    apply_tensor_parallel(module, mesh["tensor_parallel"], plan)
    switch_streams(module, plan, streams[model])
    apply_recompute(module, recomputed, streams[model])
    if uses_fsdp(of_module):
        policy = precision or MixedPrecisionPolicy()
        apply_fully_shard(module, of_module, mesh, units, ignored=set(), precision=policy)
    assert list(module.state_dict()) == names
    return Placed(module, streams, model, mesh, partial_submodules(plan))


@contextmanager
def recorded_masks() -> Iterator[list[Tensor]]:
    """All dropout masks, drawn in the open: the attention is written out, so that its mask can be seen."""
    masks: list[Tensor] = []
    draw = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        masks.append(draw(torch.ones_like(x), p, training))
        return x * masks[-1]

    def attention(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **unused: Any
    ) -> Tensor:
        assert unused.get("attn_mask") is None
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return dropout(scores.softmax(-1), dropout_p) @ v

    with mock.patch.multiple(F, dropout=dropout, scaled_dot_product_attention=attention):
        yield masks


def draw_masks(model: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Masks of the forward and of the backward, and the result."""
    placed = place(model, shard_size=1, activation_checkpointing="full")
    with recorded_masks() as masks:
        result = placed(inputs(model))
        forward = len(masks)
        result.sin().sum().backward()
    return masks[:forward], masks[forward:], result.detach()


def compare_recomputed(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, list[str]]]:
    """For each case how many gradients there are, and which of them activation checkpointing changes, if by one bit."""

    def run(model: str, case: dict[str, Any], asked: Any) -> dict[str, Tensor]:
        placed = place(model, activation_checkpointing=asked, **case)
        # Two calls before their backward, and a second step.
        for step in range(2):
            results = [placed(inputs(model, 2 * step + call)) for call in range(2)]
            torch.cat(results).float().sin().sum().backward()
        parameters = placed.module.named_parameters()
        return {name: local(p.grad) for name, p in parameters if p.grad is not None}

    found = []
    for model, case in cases:
        plain, recomputed = run(model, case, "none"), run(model, case, "full")
        assert plain.keys() == recomputed.keys()
        found.append((len(plain), [name for name in plain if not torch.equal(plain[name], recomputed[name])]))
    return found


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replica_gradients(model: str) -> dict[str, Tensor]:
    placed = place(model, shard_size=1, activation_checkpointing="full")
    placed(inputs(model)).sin().sum().backward()
    return placed.gradients()


def resume(model: str) -> tuple[Tensor, Tensor, Tensor]:
    """What a run computes after it saved its streams, what a resumed run computes, and a run that forgot them."""
    running = place(model, shard_size=1)
    running(inputs(model))
    states: list[dict] = [{}] * WORLD
    dist.all_gather_object(states, running.streams.state_dict())
    file = BytesIO()
    torch.save(merge_states(states), file)
    file.seek(0)
    resumed, forgot = place(model, seed=SEED + 1, shard_size=1), place(model, shard_size=1)
    resumed.streams.load_state_dict(torch.load(file, weights_only=True))
    continued, again, other = (placed(inputs(model)).detach() for placed in (running, resumed, forgot))
    return continued, again, other


# ---------------------------------------------------------------- the tests


def same(values: list[Tensor]) -> list[int]:
    """Index of the first value that each equals bit for bit."""
    return [next(i for i, other in enumerate(values) if torch.equal(value, other)) for value in values]


@pytest.mark.parametrize("model", MODELS)
def test_who_draws_the_same_masks(pool: Pool, model: str) -> None:
    by_rank = pool.run(draw_masks, WORLD, model)
    for masks, _, _ in by_rank:
        assert [mask.dim() for mask in masks] == [4, 3, 3] * DEPTH
        assert same(masks) == list(range(len(masks))), "no mask is drawn twice"
        assert all(0 < float((mask == 0).double().mean()) < 0.25 for mask in masks)
    for of_ranks in zip(*(forward for forward, _, _ in by_rank), strict=True):
        sharded = of_ranks[0].dim() == 4
        assert same(list(of_ranks)) == ([0, 1, 2, 3] if sharded else [0, 0, 2, 2])
    for forward, backward, _ in by_rank:
        blocks = [forward[3 * i : 3 * i + 3] for i in range(DEPTH)]
        expected = [mask for block in reversed(blocks) for mask in block]
        assert len(backward) == len(expected)
        assert all(map(torch.equal, backward, expected)), "the recomputation draws what the forward drew"
    assert same([result for _, _, result in by_rank]) == [0, 0, 2, 2]


RECOMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("decoder", {"shard_size": 1}),
    ("decoder", {}),
    ("decoder", {"fsdp_units": ["blocks.*", "blocks.*.mlp"]}),
    ("decoder", {"reshard_after_forward": False}),
    ("decoder", {"precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}),
    ("vision", {"shard_size": 1}),
    ("vision", {}),
]


def test_checkpointing_changes_no_bit_of_any_gradient(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(compare_recomputed, WORLD, RECOMPUTED)):
        for case, (gradients, changed) in zip(RECOMPUTED, found, strict=True):
            assert gradients > 10
            assert not changed, f"rank {rank}, {case}: {changed}"


@pytest.mark.parametrize("model", MODELS)
def test_one_process_with_the_same_masks_has_the_same_gradients(pool: Pool, model: str) -> None:
    for rank, gradients in enumerate(pool.run(replica_gradients, WORLD, model)):
        expected = one_process(model, replica=rank // TENSOR)
        errors = {name: relative_error(gradients[name], value) for name, value in expected.items()}
        assert max(errors.values()) <= 1e-10, errors


def one_process(model: str, replica: int) -> dict[str, Tensor]:
    """A whole replica: the shards' attention one after the other, each in its rank's sharded stream."""
    ranks = range(TENSOR * replica, TENSOR * (replica + 1))
    shared, *shards = (RandomStreams(layouts(model), rank, SEED, CPU)[model] for rank in (ranks[0], *ranks))
    attend = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        results = []
        for streams, heads in zip(shards, zip(*(x.chunk(TENSOR, dim=1) for x in (q, k, v)), strict=True), strict=True):
            with streams.running():
                streams.use(sharded=True)
                results.append(attend(*heads, **kwargs))
        return torch.cat(results, dim=1)

    module = MODELS[model][0]()
    with mock.patch.object(F, "scaled_dot_product_attention", attention), shared.running():
        result = module(inputs(model))
    result.sin().sum().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_run_continues_its_streams(pool: Pool, model: str) -> None:
    for continued, again, other in pool.run(resume, WORLD, model):
        assert torch.equal(continued, again)
        assert not torch.equal(continued, other)

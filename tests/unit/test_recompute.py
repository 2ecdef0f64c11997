"""Activation checkpointing: which blocks, and that nothing but memory changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.errors import PlanError
from lightning_hetero.layout import ModuleLayout, resolve_layout
from lightning_hetero.models import Decoder, VisionEncoder
from lightning_hetero.parallelize.recompute import apply_recompute, resolve_recompute
from lightning_hetero.parallelize.streams import switch_streams
from lightning_hetero.rng import ModuleStreams

CPU = torch.device("cpu")


def streams(seed: int = 1) -> ModuleStreams:
    return ModuleStreams(seed, seed + 100, CPU)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocab_size=24, width=16, depth=3, heads=4, mlp_width=16, dropout=0.3).double()


def vision() -> VisionEncoder:
    torch.manual_seed(0)
    return VisionEncoder(output_width=16, width=16, depth=2, dropout=0.3).double()


def resolve(
    module: nn.Module, asked: Any, blocks: Iterable[str] = ("blocks.0", "blocks.1"), nested: tuple = ()
) -> list:
    layout = resolve_layout("llm", ModuleLayout(activation_checkpointing=asked), 1)
    return resolve_recompute(module, layout, blocks, nested)


class TestResolve:
    def test_which(self) -> None:
        module = decoder()
        assert resolve(module, "none") == []
        assert resolve(module, []) == []
        assert resolve(module, "full") == ["blocks.0", "blocks.1"]
        assert resolve(module, ["blocks.*.mlp"]) == [f"blocks.{i}.mlp" for i in range(3)]
        assert resolve(module, ["blocks.1", "blocks.*.attn"]) == ["blocks.1", "blocks.0.attn", "blocks.2.attn"]
        assert resolve(module, "full", ["blocks.0.mlp", "blocks.0", "embed"]) == ["blocks.0", "embed"]

    def test_a_placed_module_is_never_recomputed(self) -> None:
        module = decoder()
        assert resolve(module, "full", ["blocks.0", "blocks.1"], nested=("blocks.0.mlp",)) == ["blocks.1"]
        with pytest.raises(PlanError) as error:
            resolve(module, ["blocks.*"], nested=("blocks.0.mlp",))
        assert "layouts.llm.activation_checkpointing: pattern 'blocks.*' matches 'blocks.0', which contains" in str(
            error.value
        )

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            (["blocks.*", "layers.*"], "pattern 'layers.*' matches no submodule of Decoder ('llm')"),
            (["blocks.2"], "pattern 'blocks.2' matches no submodule"),
            ("blocks.*", "must be 'none', 'full' or a list of patterns of submodules, got 'blocks.*'"),
        ],
    )
    def test_what_does_not_fit_is_named(self, asked: Any, message: str) -> None:
        with pytest.raises(PlanError) as error:
            resolve(decoder(), asked, nested=("blocks.2",))
        assert "layouts.llm.activation_checkpointing" in str(error.value)
        assert message in str(error.value)

    def test_full_without_blocks(self) -> None:
        with pytest.raises(PlanError, match=r"layouts\.llm\.activation_checkpointing: 'full' recomputes every block"):
            resolve(nn.Linear(2, 2), "full", [])


def gradients(
    factory: Callable[[], nn.Module],
    steps: Callable[[nn.Module, ModuleStreams], Tensor],
    recomputed: list[str],
    plan: dict | None = None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Every gradient, what the module's stream would draw next, and what is drawn outside of it."""
    module, of_module = factory(), streams()
    switch_streams(module, plan or {}, of_module)
    apply_recompute(module, recomputed, of_module)
    torch.manual_seed(5)
    steps(module, of_module).backward()
    outside = torch.rand(3)
    with of_module.running():
        drawn = torch.rand(3)
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}, drawn, outside


def assert_same(one: tuple, other: tuple) -> None:
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(gradient, other[0][name]) for name, gradient in one[0].items())
    assert torch.equal(one[1], other[1]), "the recomputation moved the module's stream"
    assert torch.equal(one[2], other[2]), "the recomputation moved the default stream"


def ids(batch: int, seed: int) -> Tensor:
    return torch.randint(0, 24, (batch, 6), generator=torch.Generator().manual_seed(seed))


def once(module: nn.Module, of_module: ModuleStreams) -> Tensor:
    with of_module.running():
        return module(ids(2, 0)).sin().sum()


SHARDED = {"blocks.*.attn.v_proj": "colwise", "blocks.*.attn.o_proj": "rowwise"}
"""Not really split in one process: only the streams are switched."""


@pytest.mark.parametrize("recomputed", [["blocks.0", "blocks.1", "blocks.2"], ["blocks.1"], ["blocks.0.attn", "head"]])
@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_gradients_are_equal(recomputed: list[str], tensor_parallel: bool) -> None:
    """Bit for bit, with dropout, also where two streams take turns inside a block."""
    plan = {p.replace("*", str(i)): s for p, s in SHARDED.items() for i in range(3)} if tensor_parallel else {}
    plain = gradients(decoder, once, [], plan)
    assert_same(plain, gradients(decoder, once, recomputed, plan))
    if tensor_parallel:
        other = gradients(decoder, once, [])
        assert not all(torch.equal(gradient, other[0][name]) for name, gradient in plain[0].items())


def test_two_calls_before_their_backward() -> None:
    """An encoder called twice, with the language model in between, each on streams of its own."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision, self.llm = vision(), decoder()

    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()

    def run(vision_blocks: list[str], llm_blocks: list[str]) -> tuple:
        def steps(module: nn.Module, of_llm: ModuleStreams) -> Tensor:
            of_vision = streams(2)
            apply_recompute(module.vision, vision_blocks, of_vision)
            with of_llm.running():  # the step runs in the driver's streams
                with of_vision.running():
                    first = module.vision(images).flatten(0, 1)[:12]
                logits = module.llm(ids(2, 0), first, torch.ones(2, 6, dtype=torch.bool))
                with of_vision.running():
                    second = module.vision(images * 2)
                return logits.sin().sum() + second.sin().sum()

        return gradients(Both, steps, llm_blocks)

    assert_same(run([], []), run(["blocks.0", "blocks.1"], ["llm.blocks.0", "llm.blocks.1", "llm.blocks.2"]))


def test_accumulated_backwards_in_any_order() -> None:
    def steps(module: nn.Module, of_module: ModuleStreams) -> Tensor:
        losses = [once(module, of_module) for _ in range(3)]
        losses[2].backward()
        losses[0].backward()
        return losses[1]

    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert_same(gradients(decoder, steps, []), gradients(decoder, steps, blocks))


def test_a_graph_may_run_backwards_twice() -> None:
    def steps(module: nn.Module, of_module: ModuleStreams) -> Tensor:
        loss = once(module, of_module)
        loss.backward(retain_graph=True)
        return loss

    assert_same(gradients(decoder, steps, []), gradients(decoder, steps, ["blocks.0", "blocks.1"]))


class Block(nn.Module):
    """Draws before its last saved tensor and after it, counts its forwards, and takes tensors by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forwards = 0

    def forward(self, x: Tensor, *, scale: Tensor, function: str = "sin") -> tuple[Tensor, dict[str, Tensor]]:
        self.forwards += 1
        x = F.dropout(getattr(torch, function)(self.linear(x)) * scale, 0.5)
        return x, {"noise": torch.rand_like(x)}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x, extra = block(x, scale=scale, function="cos")
            x = x + extra["noise"]
        return x


def run_stack(module: nn.Module, of_module: ModuleStreams) -> Tensor:
    with of_module.running():
        return module(torch.ones(3, 4), torch.full((1,), 2.0, requires_grad=True)).square().sum()


def test_keywords_and_structured_results() -> None:
    assert_same(gradients(Stack, run_stack, []), gradients(Stack, run_stack, ["blocks.0", "blocks.1"]))


@pytest.mark.parametrize(("grad", "expected"), [(True, [2, 1]), (False, [1, 1])])
def test_only_what_was_asked_runs_again_and_only_for_a_backward(grad: bool, expected: list[int]) -> None:
    module, of_module = Stack(), streams()
    apply_recompute(module, ["blocks.0"], of_module)
    with nullcontext() if grad else torch.no_grad():
        loss = run_stack(module, of_module)
    if grad:
        loss.backward()
    assert [block.forwards for block in module.blocks] == expected


def test_activations_are_not_kept() -> None:
    """Bytes that autograd holds between forward and backward."""

    def held(recomputed: list[str]) -> int:
        module, of_module = decoder(), streams()
        apply_recompute(module, recomputed, of_module)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            once(module, of_module).backward()
        parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        return sum(size for pointer, size in storages.items() if pointer not in parameters)

    assert held(["blocks.0", "blocks.1", "blocks.2"]) < 0.4 * held([])


def test_names_and_classes_stay() -> None:
    plain, module = decoder(), decoder()
    apply_recompute(module, ["blocks.0", "blocks.1"], streams())
    apply_recompute(module, ["blocks.0"], streams())  # not twice
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in module.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(module.blocks[0], type(plain.blocks[0]))
    assert type(module.blocks[0]) is type(module.blocks[1])
    assert type(module.blocks[0]).__name__ == "RecomputedDecoderBlock"
    module.load_state_dict(plain.state_dict())


def test_without_its_streams_the_default_stream_is_replayed() -> None:
    """A block that is called on its own, outside of its module's streams."""

    def steps(module: nn.Module, of_module: ModuleStreams) -> Tensor:
        return module(ids(2, 0)).sin().sum()

    assert_same(gradients(decoder, steps, []), gradients(decoder, steps, ["blocks.0", "blocks.2"]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    def run(recomputed: list[str]) -> dict[str, Tensor]:
        device = torch.device("cuda", 0)
        module = decoder().to(device, torch.bfloat16)
        of_module = ModuleStreams(1, 2, device)
        plan = {p.replace("*", str(i)): s for p, s in SHARDED.items() for i in range(3)}
        switch_streams(module, plan, of_module)
        apply_recompute(module, recomputed, of_module)
        with of_module.running():
            loss = module(ids(2, 0).to(device)).float().sin().sum()
        loss.backward()
        return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}

    plain, recomputed = run([]), run(["blocks.0", "blocks.1", "blocks.2"])
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in plain.items())

"""Tensor-parallel plans and FSDP2 units: found, checked and refused before any weight is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_hetero.errors import LayoutError, PlanError
from lightning_hetero.layout import Layouts, ModuleLayout, resolve_layout, resolve_layouts
from lightning_hetero.parallelize.apply import materialize, plan_modules
from lightning_hetero.parallelize.data import resolve_units
from lightning_hetero.parallelize.plans import match, resolve_plan, sharded_dims
from lightning_hetero.placement import default_layouts, find_layouts, parameters_by_module
from tests.dist import vlm


def plan(module: nn.Module, size: int, **layout: object) -> dict:
    return resolve_plan(module, resolve_layout("llm", ModuleLayout(tensor_parallel_size=size, **layout), size))  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Stack(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 6)


def test_patterns_stand_for_one_component() -> None:
    paths = ["a.0.q", "a.1.q", "a.0.b.q", "a.q"]
    assert match("a.*.q", paths) == ["a.0.q", "a.1.q"]
    assert match("a.0.q", paths) == ["a.0.q"]


def test_the_decoders_plan() -> None:
    module = vlm.build().llm
    found = plan(module, 4)
    assert found["blocks.1.attn.q_proj"] == "colwise"
    assert found["blocks.0.attn.q_norm"] == "replicated_with_grad_allreduce"
    assert plan(module, 1) == {}, "nothing to plan without a tensor axis"


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(PlanError) as error:
        plan(Stack(), 2, tensor_parallel_plan={"blocks.*.up": "colwise", "layers.*.down": "rowwise"})
    assert "layouts.llm.tensor_parallel_plan: pattern 'layers.*.down' matches no submodule of Stack" in str(error.value)
    assert "blocks.*.down" in str(error.value), "it shows what the submodules are called"


def test_auto_without_a_plan() -> None:
    with pytest.raises(PlanError) as error:
        plan(Stack(), 2)
    assert "'auto' with tensor_parallel_size 2 needs a plan, but Stack ('llm') has neither" in str(error.value)


def test_auto_that_leaves_a_linear_of_a_block_out() -> None:
    module = Stack()
    module.tensor_parallel_plan = {"blocks.*.up": "colwise"}  # type: ignore[assignment]
    with pytest.raises(PlanError) as error:
        plan(module, 2)
    assert "leaves out linears of its blocks: blocks.*.down" in str(error.value)
    # The head is in no block, and a plan of one's own may leave out what it likes.
    module.tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # type: ignore[assignment]
    assert len(plan(module, 2)) == 4
    assert len(plan(Stack(), 2, tensor_parallel_plan={"blocks.*.up": ColwiseParallel()})) == 2


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(PlanError) as error:
        plan(vlm.build().llm, 8)
    assert "'blocks.*.attn.k_proj' has 12 heads, which tensor_parallel_size 8 does not divide" in str(error.value)
    assert "set layouts.llm.tensor_parallel_size to a divisor of 12" in str(error.value)


def test_sizes_that_do_not_divide_and_styles_that_do_not_exist() -> None:
    with pytest.raises(PlanError) as error:
        plan(Stack(), 3, tensor_parallel_plan={"blocks.*.up": "colwise"})
    assert "'blocks.*.up' shards dim 0 of a weight of shape [8, 4], which tensor_parallel_size 3" in str(error.value)
    with pytest.raises(PlanError, match=r"'head' has the unknown style 'diagonal'; choose one of colwise"):
        plan(Stack(), 2, tensor_parallel_plan={"head": "diagonal"})


def test_units() -> None:
    layout = resolve_layout("llm", ModuleLayout(), 2)
    assert resolve_units(Stack(), layout) == ["blocks.0", "blocks.1"], "members of the outermost ModuleList"
    named = resolve_layout("llm", ModuleLayout(fsdp_units=["head", "blocks.*.up"]), 2)
    assert resolve_units(Stack(), named) == ["head", "blocks.0.up", "blocks.1.up"]
    missing = resolve_layout("llm", ModuleLayout(fsdp_units=["layers.*"]), 2)
    with pytest.raises(PlanError, match=r"layouts.llm.fsdp_units: pattern 'layers.\*' matches no submodule of Stack"):
        resolve_units(Stack(), missing)


def test_sharded_dims_are_full_paths() -> None:
    module = vlm.build()
    layouts = find_layouts(module, {"vision": ModuleLayout(), "llm": ModuleLayout(tensor_parallel_size=2)}, None, 2)
    dims = sharded_dims(module, layouts)
    assert dims["llm.blocks.0.attn.o_proj.weight"] == 1
    assert dims["llm.embed.weight"] == 0
    assert not any(path.startswith("vision") for path in dims)


def two(root: nn.Module, **paths: str) -> Layouts:
    return resolve_layouts({name: ModuleLayout(module=path) for name, path in paths.items()}, None, 1)


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(LayoutError) as error:
        find_layouts(vlm.build(), {"vison": ModuleLayout(), "llm": ModuleLayout()}, None, 1)
    assert "layouts.vison.module: SmallModule has no submodule 'vison'; did you mean 'vision'" in str(error.value)


def test_parameters_by_their_innermost_module() -> None:
    root = nn.Module()
    root.model = nn.ModuleDict({"tower": nn.Linear(2, 2), "text": nn.Linear(2, 2)})
    root.head = nn.Linear(2, 2)
    owned = parameters_by_module(root, two(root, llm="model", tower="model.tower"))
    assert set(owned["tower"]) == {"model.tower.weight", "model.tower.bias"}
    assert set(owned["llm"]) == {"model.text.weight", "model.text.bias"}
    assert set(owned[""]) == {"head.weight", "head.bias"}
    root.head.weight = root.model["tower"].weight
    with pytest.raises(LayoutError, match=r"'head.weight' of no placed module is tied to 'model.tower.weight'"):
        parameters_by_module(root, two(root, llm="model", tower="model.tower"))


def test_default_layouts() -> None:
    layouts, driver = default_layouts(vlm.build())
    assert (set(layouts), driver) == ({"vision", "llm"}, "llm"), "metrics have no parameters and no layout"
    small = nn.Module()
    small.net, small.loss = Stack(), nn.MSELoss()
    assert default_layouts(small)[1] == "net"  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="no submodule with parameters to place"):
        default_layouts(nn.Module())  # type: ignore[arg-type]


def test_fields_of_later_versions_are_refused_by_name() -> None:
    layouts = find_layouts(
        vlm.build(), {"vision": ModuleLayout(), "llm": ModuleLayout(context_parallel_size=2)}, None, 2
    )
    with pytest.raises(LayoutError, match=r"layouts.llm.context_parallel_size=2 is not supported by this version"):
        plan_modules(vlm.build(), layouts)


def test_only_what_is_on_the_meta_device_is_materialized() -> None:
    pretrained = nn.Linear(2, 2)
    kept = pretrained.weight.clone()
    with torch.device("meta"):
        fresh = nn.Linear(2, 2)
    module = nn.Sequential(pretrained, fresh)
    materialize(module, torch.device("cpu"))
    assert torch.equal(module[0].weight, kept)
    assert not module[1].weight.is_meta
    assert float(module[1].weight.abs().sum()) > 0
    with torch.device("meta"):
        broken = nn.Module()
        broken.weight = nn.Parameter(torch.empty(2))
    with pytest.raises(LayoutError, match=r"'broken' \(Module\) is on the meta device and has no reset_parameters"):
        materialize(nn.ModuleDict({"broken": broken}), torch.device("cpu"))

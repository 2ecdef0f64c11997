"""Tensor-parallel plans: which submodule gets which style, and what that does to its parameters.

A plan maps patterns of submodule paths to styles. ``*`` stands for one path component, as in transformers' ``tp_plan``
(``layers.*.self_attn.q_proj``). Style names are transformers' too, so that its plans can be read as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_hetero.errors import PlanError
from lightning_hetero.layout import Layouts, ResolvedLayout, is_inside


@dataclass(frozen=True)
class Style:
    """What a style name means.

    Attributes:
        make: Builds the DTensor style; ``None`` where the submodule stays as it is.
        weight_dim: Dim of the weight that is sharded.
        bias_dim: Dim of the bias that is sharded.
        partial_gradient: Each tensor rank sees only a part of the submodule's gradient; the parts are summed once.
    """

    make: Callable[[], ParallelStyle] | None
    weight_dim: int | None = None
    bias_dim: int | None = None
    partial_gradient: bool = False


_COLWISE_GATHERED = Style(lambda: ColwiseParallel(output_layouts=Replicate()), weight_dim=0, bias_dim=0)
_ROWWISE_SPLIT = Style(lambda: RowwiseParallel(input_layouts=Replicate()), weight_dim=1)

STYLES: Mapping[str, Style] = {
    "colwise": Style(ColwiseParallel, weight_dim=0, bias_dim=0),
    "colwise_gather_output": _COLWISE_GATHERED,
    "colwise_rep": _COLWISE_GATHERED,
    "rowwise": Style(RowwiseParallel, weight_dim=1),
    "rowwise_split_input": _ROWWISE_SPLIT,
    "rowwise_rep": _ROWWISE_SPLIT,
    "embedding_rowwise": Style(lambda: RowwiseParallel(input_layouts=Replicate()), weight_dim=0),
    "embedding_colwise": Style(lambda: ColwiseParallel(output_layouts=Replicate()), weight_dim=1),
    "replicate": Style(None),
    # A per-head norm under column-parallel projections: every tensor rank has all of the weight but only its own heads.
    "replicated_with_grad_allreduce": Style(None, partial_gradient=True),
}

Plan = dict[str, "str | ParallelStyle"]
"""Submodule path, relative to the placed module, to style."""


def match(pattern: str, paths: Iterable[str]) -> list[str]:
    """Paths that a pattern names; ``*`` stands for one component."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [path for path in paths if expression.fullmatch(path)]


def resolve_plan(module: nn.Module, layout: ResolvedLayout, nested: Iterable[str] = ()) -> Plan:
    """The style of every submodule that the layout's tensor axis splits.

    Args:
        module: The placed module.
        layout: Its layout. With a tensor size of 1 there is nothing to plan.
        nested: Paths, relative to the module, of placed modules inside it, which are left alone.

    Returns:
        Concrete submodule paths to styles.

    Raises:
        PlanError: If there is no plan, a pattern matches nothing or a style is unknown, a linear of a block is left
            out of an ``"auto"`` plan, or sizes or heads do not divide.
    """
    if layout.tensor_size == 1:
        return {}
    config = layout.config.tensor_parallel_plan
    key = f"layouts.{layout.name}.tensor_parallel_plan"
    patterns = offered_plan(module, layout) if isinstance(config, str) else config
    nested = list(nested)
    submodules = {
        path: child for path, child in module.named_modules() if not any(is_inside(path, root) for root in nested)
    }
    plan: Plan = {}
    origin: dict[str, str] = {}
    for pattern, style in patterns.items():
        matches = match(pattern, submodules)
        if not matches:
            raise PlanError(
                f"{key}: pattern '{pattern}' matches no submodule of {type(module).__name__} ('{layout.path}'); "
                f"its submodules are called like {_examples(submodules)}"
            )
        if isinstance(style, str) and style not in STYLES:
            raise PlanError(f"{key}: '{pattern}' has the unknown style '{style}'; choose one of {', '.join(STYLES)}")
        for path in matches:
            plan[path] = style
            origin[path] = pattern
    for path, style in plan.items():
        _check_divides(submodules[path], style, layout, f"{key}: '{origin[path]}'")
    _check_heads(module, layout, plan, key)
    if isinstance(config, str):
        _check_coverage(submodules, plan, layout, key)
    return plan


def offered_plan(module: nn.Module, layout: ResolvedLayout) -> Mapping[str, str | ParallelStyle]:
    """The plan that a module offers: ``tensor_parallel_plan``, or a Hugging Face ``tp_plan``.

    Raises:
        PlanError: If it offers none.
    """
    plan = getattr(module, "tensor_parallel_plan", None) or getattr(module, "tp_plan", None)
    if not plan:
        raise PlanError(
            f"layouts.{layout.name}.tensor_parallel_plan: 'auto' with tensor_parallel_size {layout.tensor_size} needs "
            f"a plan, but {type(module).__name__} ('{layout.path}') has neither tensor_parallel_plan "
            "nor tp_plan; give a "
            "dict of submodule pattern to style (colwise, rowwise, ...), or set tensor_parallel_size to 1"
        )
    return plan


def shard_dim(module: nn.Module, name: str, style: str | ParallelStyle) -> int | None:
    """Dim of a parameter (``weight`` or ``bias``) that a style shards, or ``None``."""
    if isinstance(style, str):
        spec = STYLES[style]
        return spec.bias_dim if name == "bias" else spec.weight_dim
    embedding = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        return 1 if embedding else 0
    if isinstance(style, RowwiseParallel):
        return None if name == "bias" else (0 if embedding else 1)
    return None


def sharded_dims(module: nn.Module, layouts: Layouts) -> dict[str, int]:
    """Dims that tensor axes shard, for all placed modules.

    Args:
        module: The LightningModule.
        layouts: Its layouts.

    Returns:
        Full parameter path to dim; parameters that are not named are replicated over the tensor axis.
    """
    dims = {}
    for layout in layouts.by_name.values():
        placed = module.get_submodule(layout.path)
        for path, style in resolve_plan(placed, layout, nested_paths(layout, layouts)).items():
            child = placed.get_submodule(path)
            for name, _ in child.named_parameters(recurse=False):
                dim = shard_dim(child, name, style)
                if dim is not None:
                    dims[f"{layout.path}.{path}.{name}"] = dim
    return dims


def nested_paths(layout: ResolvedLayout, layouts: Layouts) -> list[str]:
    """Paths of the placed modules inside a placed module, relative to it."""
    prefix = layout.path + "."
    return [other.path.removeprefix(prefix) for other in layouts.by_name.values() if other.path.startswith(prefix)]


def partial_submodules(plan: Plan) -> list[str]:
    """Submodules of a plan whose gradients are partial over the tensor axis."""
    return [path for path, style in plan.items() if isinstance(style, str) and STYLES[style].partial_gradient]


def _check_divides(module: nn.Module, style: str | ParallelStyle, layout: ResolvedLayout, where: str) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        dim = shard_dim(module, name, style)
        if dim is not None and parameter.shape[dim] % layout.tensor_size:
            raise PlanError(
                f"{where} shards dim {dim} of a {name} of shape {list(parameter.shape)}, which tensor_parallel_size "
                f"{layout.tensor_size} does not divide; change layouts.{layout.name}.tensor_parallel_size or the size"
            )


def _check_heads(module: nn.Module, layout: ResolvedLayout, plan: Plan, key: str) -> None:
    for pattern, heads in attention_heads(module).items():
        if match(pattern, plan) and heads % layout.tensor_size:
            raise PlanError(
                f"{key}: '{pattern}' has {heads} heads, which tensor_parallel_size {layout.tensor_size} does not "
                f"divide; set layouts.{layout.name}.tensor_parallel_size to a divisor of {heads}"
            )


def attention_heads(module: nn.Module) -> Mapping[str, int]:
    """Heads of the projections, by pattern: ``tensor_parallel_heads``, or from a Hugging Face configuration."""
    offered = getattr(module, "tensor_parallel_heads", None)
    if offered is not None:
        return offered
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return {}
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    names = {"q_proj": heads, "k_proj": key_heads, "v_proj": key_heads}
    return {
        path: names[path.rpartition(".")[2]] for path, _ in module.named_modules() if path.rpartition(".")[2] in names
    }


def _check_coverage(submodules: Mapping[str, nn.Module], plan: Plan, layout: ResolvedLayout, key: str) -> None:
    """Every linear of a block must be named, else it would silently stay whole on each tensor rank."""
    left = [
        path
        for path, child in submodules.items()
        if isinstance(child, nn.Linear) and re.search(r"(^|\.)\d+\.", path) and path not in plan
    ]
    if left:
        patterns = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in left)
        raise PlanError(
            f"{key}: the module's own plan leaves out linears of its blocks: {', '.join(patterns)}; give a dict that "
            "names them ('replicate' keeps one whole on each rank)"
        )


def _examples(paths: Iterable[str]) -> str:
    patterns = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in paths if path)
    return ", ".join(list(patterns)[:6])

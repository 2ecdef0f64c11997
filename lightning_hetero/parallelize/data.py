"""Data parallelism: FSDP2 over a module's data axes, summed instead of averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_hetero.errors import PlanError
from lightning_hetero.layout import ResolvedLayout, is_inside
from lightning_hetero.parallelize.plans import match


def uses_fsdp(layout: ResolvedLayout) -> bool:
    """Whether the layout shards parameters. A shard size of 1 replicates them instead."""
    return layout.shard_size > 1


def resolve_units(module: nn.Module, layout: ResolvedLayout, nested: Iterable[str] = ()) -> list[str]:
    """Paths of the blocks that become FSDP2 units of their own.

    ``"auto"`` takes the patterns that the module offers as ``fsdp_units``, the classes of Hugging Face's
    ``_no_split_modules``, or else the members of every outermost ``ModuleList``.

    Args:
        module: The placed module.
        layout: Its layout.
        nested: Paths, relative to the module, of placed modules inside it.

    Raises:
        PlanError: If a pattern matches nothing.
    """
    nested = list(nested)
    submodules = {
        path: child for path, child in module.named_modules() if path and not any(is_inside(path, n) for n in nested)
    }
    configured = layout.config.fsdp_units
    patterns = getattr(module, "fsdp_units", None) if configured == "auto" else configured
    if patterns is None:
        return _find_blocks(module, submodules)
    units: dict[str, None] = {}
    for pattern in patterns:
        matches = match(pattern, submodules)
        if not matches:
            raise PlanError(
                f"layouts.{layout.name}.fsdp_units: pattern '{pattern}' matches no submodule of "
                f"{type(module).__name__} ('{layout.path}')"
            )
        units.update(dict.fromkeys(matches))
    return list(units)


def apply_fully_shard(
    module: nn.Module,
    layout: ResolvedLayout,
    mesh: DeviceMesh,
    units: list[str],
    *,
    ignored: set[nn.Parameter],
    precision: MixedPrecisionPolicy,
) -> None:
    """Shards a module's parameters over its data axis.

    Gradients are summed over the module's replicas, never averaged: the loss carries the one division by the
    driver's replicas, so the result does not depend on this module's own data-parallel size.

    Args:
        module: The placed module.
        layout: Its layout.
        mesh: Its whole mesh.
        units: Paths of the blocks that become units of their own.
        ignored: Parameters of placed modules inside this one.
        precision: FSDP2's mixed-precision policy.
    """
    axes = ("data_parallel_replicate", "data_parallel_shard") if layout.replicate_size > 1 else "data_parallel_shard"
    offload = CPUOffloadPolicy() if layout.config.cpu_offload else OffloadPolicy()
    common: dict[str, Any] = {
        "mesh": mesh[axes],
        "mp_policy": precision,
        "offload_policy": offload,
        "ignored_params": ignored,
    }
    # Innermost first, as FSDP2 asks: a unit takes what its inner units have left.
    for path in sorted(units, key=lambda path: path.count("."), reverse=True):
        fully_shard(module.get_submodule(path), reshard_after_forward=layout.config.reshard_after_forward, **common)
    fully_shard(module, **common)
    for unit in fsdp_units(module):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def finish_initialization(module: nn.Module, nested: Iterable[str]) -> None:
    """Settles now that a module is the root of its FSDP2 units, and that placed modules inside it are roots too.

    FSDP2 decides at the first forward: whatever is called first becomes a root. A child that is called from outside its
    root's forward (an embedding), or a placed module inside a composite, would come first.

    Args:
        module: A module after :func:`apply_fully_shard`.
        nested: Paths, relative to the module, of placed modules inside it.
    """
    hidden = []
    for path in nested:
        parent, _, name = path.rpartition(".")
        children = module.get_submodule(parent)._modules
        hidden.append((children, dict(children)))
        children[name] = None
    try:
        module._get_fsdp_state()._lazy_init()  # type: ignore[operator]
    finally:
        for children, original in reversed(hidden):
            children.update(original)


def reduce_gathered_gradients(root: FSDPModule) -> None:
    """Reduces the gradients that earlier backwards left unreduced, if the last backward did not run through the root.

    FSDP2 reduces a unit's gathered gradients at the end of a backward that used it. An encoder that no rank calls in
    the last of several accumulated batches would lose what the batches before it gave.

    Args:
        root: A root of FSDP2 units, on all of its ranks.
    """
    state = root._get_fsdp_state()
    groups = [group for unit in state._state_ctx.all_states for group in unit._fsdp_param_groups]
    # A parameter that was never gathered has no unsharded form yet.
    used = [p for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    if any(p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None for p in used):
        state._root_post_backward_final_callback()


def fsdp_units(module: nn.Module, nested: Iterable[nn.Module] = ()) -> list[FSDPModule]:
    """FSDP2 units of a module, less those of placed modules inside it."""
    foreign = {child for other in nested for child in other.modules()}
    return [child for child in module.modules() if isinstance(child, FSDPModule) and child not in foreign]


def _find_blocks(module: nn.Module, submodules: Mapping[str, nn.Module]) -> list[str]:
    classes = set(getattr(module, "_no_split_modules", None) or ())
    blocks = [path for path, child in submodules.items() if type(child).__name__ in classes]
    if blocks:
        return blocks
    lists = [path for path, child in submodules.items() if isinstance(child, nn.ModuleList)]
    outermost = [path for path in lists if not any(is_inside(path, other) for other in lists if other != path)]
    return [
        f"{path}.{name}"
        for path in outermost
        for name, child in submodules[path].named_children()
        if any(True for _ in child.parameters())
    ]

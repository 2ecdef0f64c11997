"""The order in which a placed module is parallelised, and what is decided before any weight is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_hetero.errors import LayoutError
from lightning_hetero.layout import Layouts, ResolvedLayout
from lightning_hetero.mesh import ProcessGroups
from lightning_hetero.parallelize.data import apply_fully_shard, finish_initialization, resolve_units, uses_fsdp
from lightning_hetero.parallelize.plans import Plan, nested_paths, partial_submodules, resolve_plan
from lightning_hetero.parallelize.recompute import apply_recompute, resolve_recompute
from lightning_hetero.parallelize.streams import switch_streams
from lightning_hetero.parallelize.tensor import apply_tensor_parallel
from lightning_hetero.placement import check_paths, parameters_by_module
from lightning_hetero.rng import ModuleStreams


@dataclass(frozen=True)
class ModulePlan:
    """What will be done to one placed module.

    Attributes:
        layout: Its layout.
        module: The submodule.
        nested_paths: Paths, relative to the module, of the placed modules inside it.
        tensor_plan: Concrete submodule paths to tensor-parallel styles.
        units: Paths of its FSDP2 units.
        recomputed: Paths of the blocks whose activations are recomputed in the backward.
    """

    layout: ResolvedLayout
    module: nn.Module
    nested_paths: list[str]
    tensor_plan: Plan
    units: list[str]
    recomputed: list[str]


def plan_modules(root: nn.Module, layouts: Layouts) -> dict[str, ModulePlan]:
    """Plans every placed module, and so finds what cannot work, without touching a weight.

    Args:
        root: The LightningModule.
        layouts: Its layouts.

    Raises:
        LayoutError: For a path that does not exist, a shared parameter, or a field that is not supported.
        PlanError: For a plan or unit pattern that does not fit.
    """
    check_paths(root, layouts)
    parameters_by_module(root, layouts)
    plans = {}
    for name, layout in layouts.by_name.items():
        refuse_unsupported(layout)
        module = root.get_submodule(layout.path)
        nested = nested_paths(layout, layouts)
        units = resolve_units(module, layout, nested)
        plans[name] = ModulePlan(
            layout=layout,
            module=module,
            nested_paths=nested,
            tensor_plan=resolve_plan(module, layout, nested),
            units=units,
            recomputed=resolve_recompute(module, layout, units, nested),
        )
    return plans


def refuse_unsupported(layout: ResolvedLayout) -> None:
    """Refuses fields of a layout that are part of the interface but not built yet.

    Raises:
        LayoutError: Naming the field.
    """
    config = layout.config
    asked = {
        "context_parallel_size": config.context_parallel_size > 1,
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "expert_parallel_size": config.expert_parallel_size > 1,
        "sequence_parallel": config.sequence_parallel,
        "compile": config.compile,
        "microbatches_per_encode": config.microbatches_per_encode not in (None, 1),
    }
    for name, refused in asked.items():
        if refused:
            raise LayoutError(
                f"layouts.{layout.name}.{name}={getattr(config, name)!r} is not supported by this version; remove it"
            )


def parallelize(plan: ModulePlan, mesh: DeviceMesh, precision: MixedPrecisionPolicy, streams: ModuleStreams) -> None:
    """Applies one module's plan: tensor parallelism, random streams, activation checkpointing, then FSDP2.

    Modules that others contain must be parallelised first.
    """
    apply_tensor_parallel(plan.module, mesh["tensor_parallel"], plan.tensor_plan)
    switch_streams(plan.module, plan.tensor_plan, streams)
    apply_recompute(plan.module, plan.recomputed, streams)
    if uses_fsdp(plan.layout):
        nested = [plan.module.get_submodule(path) for path in plan.nested_paths]
        ignored = {parameter for module in nested for parameter in module.parameters()}
        apply_fully_shard(plan.module, plan.layout, mesh, plan.units, ignored=ignored, precision=precision)
        finish_initialization(plan.module, plan.nested_paths)


def partial_parameters(plan: ModulePlan) -> list[str]:
    """Paths, relative to the module, of parameters whose gradients are partial over the tensor axis."""
    return [
        f"{path}.{name}"
        for path in partial_submodules(plan.tensor_plan)
        for name, _ in plan.module.get_submodule(path).named_parameters()
    ]


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device) -> None:
    """Gives storage and initial values to submodules that were built on the meta device.

    Only they are touched: a pretrained part beside them keeps its weights.

    Raises:
        LayoutError: If a submodule on the meta device has no ``reset_parameters``.
    """
    for path, child in module.named_modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(child, "reset_parameters", None)
        if not callable(reset):
            raise LayoutError(
                f"submodule '{path}' ({type(child).__name__}) is on the meta device and has no reset_parameters(); "
                "define it, or build the module with real weights"
            )
        child.to_empty(device=device, recurse=False)
        reset()


@torch.no_grad()
def agree_on_weights(root: nn.Module, layouts: Layouts, groups: ProcessGroups) -> None:
    """Makes parameters and buffers equal on all ranks that hold them, as the first of these ranks has them.

    Sharding keeps each rank's own slice, so that differently seeded ranks would end up with a mixture of
    initialisations.
    """
    for path, tensor in [*root.named_parameters(), *root.named_buffers()]:
        layout = layouts.owner_of(path) or layouts.driver
        if len(layout.ranks) > 1 and groups.rank in layout and not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=min(layout.ranks), group=groups[layout.ranks])


def innermost_first(plans: Mapping[str, ModulePlan]) -> list[ModulePlan]:
    """Plans in the order of application: placed modules inside another one before it."""
    return sorted(plans.values(), key=lambda plan: plan.layout.path.count("."), reverse=True)

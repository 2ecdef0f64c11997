"""Tensor parallelism: a plan becomes DTensor parameters and input/output hooks."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_hetero.parallelize.plans import STYLES, Plan


def apply_tensor_parallel(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Splits a module's layers over the tensor axis. Every rank must hold equal weights.

    Args:
        module: The placed module.
        mesh: The one-dimensional tensor-parallel mesh.
        plan: Concrete paths to styles.
    """
    ties = tied_parameters(module)
    styles: dict[str, ParallelStyle] = {}
    for path, style in plan.items():
        if isinstance(style, ParallelStyle):
            styles[path] = style
        elif (make := STYLES[style].make) is not None:
            styles[path] = make()
    if styles:
        # Weights are equal on all ranks already: no scatter from the first one.
        parallelize_module(module, mesh, styles, src_data_rank=None)
    tie_parameters(module, ties)


def tied_parameters(module: nn.Module) -> list[list[str]]:
    """Paths of parameters that are one tensor, in groups of two and more."""
    paths: dict[nn.Parameter, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(parameter, []).append(path)
    return [group for group in paths.values() if len(group) > 1]


def tie_parameters(module: nn.Module, ties: list[list[str]]) -> None:
    """Makes each group one parameter again: ``parallelize_module`` gives every path a parameter of its own."""
    for first, *rest in ties:
        parameter = module.get_parameter(first)
        for path in rest:
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, parameter)

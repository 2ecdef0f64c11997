"""Which submodules of a LightningModule are placed, and which parameters belong to which of them.

No processes: the same functions serve the strategy, the ``layout`` command and tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from torch import nn

from lightning_hetero.errors import LayoutError
from lightning_hetero.layout import DRIVER_NAMES, Layouts, ModuleLayout, resolve_layouts

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def configured_layouts(
    module: LightningModule, layouts: Mapping[str, ModuleLayout] | None
) -> Mapping[str, ModuleLayout] | None:
    """The layouts given to the strategy, else those of ``configure_layouts()``, else ``None``."""
    if layouts is None:
        hook = getattr(module, "configure_layouts", None)
        layouts = hook() if callable(hook) else None
    return layouts or None


def find_layouts(
    module: LightningModule, layouts: Mapping[str, ModuleLayout] | None, driver: str | None, world_size: int
) -> Layouts:
    """Resolves the layouts of a LightningModule whose submodules exist.

    Args:
        module: The LightningModule.
        layouts: The strategy's layouts; ``None`` asks ``configure_layouts()``, then :func:`default_layouts`.
        driver: Name of the driver, or ``None``.
        world_size: Number of processes.

    Raises:
        LayoutError: As :func:`~lightning_hetero.layout.resolve_layouts`, or if a path does not exist.
    """
    configured = configured_layouts(module, layouts)
    if configured is None:
        configured, default_driver = default_layouts(module)
        driver = driver or default_driver
    resolved = resolve_layouts(configured, driver, world_size)
    check_paths(module, resolved)
    return resolved


def default_layouts(module: LightningModule) -> tuple[dict[str, ModuleLayout], str]:
    """The layouts of a LightningModule that names none: each child FSDP2-sharded over all ranks.

    Children without parameters (losses, metrics) are left alone. The driver is the child with a language model's
    name, else the one with the most parameters: with equal layouts the choice moves no data.

    Returns:
        The layouts by name of the child, and the driver's name.

    Raises:
        LayoutError: If no child has parameters.
    """
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()}
    sizes = {name: size for name, size in sizes.items() if size}
    if not sizes:
        raise LayoutError(
            f"{type(module).__name__} has no submodule with parameters to place; build the modules in __init__ or "
            "configure_model(), or name them in HeteroStrategy(layouts=...)"
        )
    driver = next((name for name in DRIVER_NAMES if name in sizes), max(sizes, key=sizes.__getitem__))
    return {name: ModuleLayout() for name in sizes}, driver


def check_paths(module: nn.Module, layouts: Layouts) -> None:
    """Checks that every placed module exists.

    Raises:
        LayoutError: Naming the path and what lies near it.
    """
    paths = [path for path, _ in module.named_modules() if path]
    for layout in layouts.by_name.values():
        if layout.path in paths:
            continue
        near = get_close_matches(layout.path, paths, n=3, cutoff=0.4) or [path for path in paths if "." not in path]
        raise LayoutError(
            f"layouts.{layout.name}.module: {type(module).__name__} has no submodule '{layout.path}'; "
            f"did you mean {' or '.join(repr(path) for path in near)}?"
        )


def parameters_by_module(module: nn.Module, layouts: Layouts) -> dict[str, dict[str, nn.Parameter]]:
    """Groups all parameters by the placed module that owns them.

    Args:
        module: The LightningModule.
        layouts: Its layouts.

    Returns:
        Layout name to parameters by full path; ``""`` holds those outside every placed module. A tied parameter
        appears once, under its first path.

    Raises:
        LayoutError: If one parameter is shared by two placed modules.
    """
    owned: dict[str, dict[str, nn.Parameter]] = {name: {} for name in (*layouts.by_name, "")}
    first: dict[nn.Parameter, tuple[str, str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        owner = layouts.owner_of(path)
        name = owner.name if owner else ""
        if parameter not in first:
            first[parameter] = (path, name)
            owned[name][path] = parameter
        elif first[parameter][1] != name:
            other_path, other = first[parameter]
            raise LayoutError(
                f"parameter '{path}' of {_module(name)} is tied to '{other_path}' of {_module(other)}: a tied "
                "parameter has one layout; place a module that contains both"
            )
    return owned


def _module(name: str) -> str:
    return f"layouts.{name}" if name else "no placed module"

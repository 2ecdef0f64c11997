"""Layouts: what each placed module's parallel sizes are and which ranks hold it.

Pure integer arithmetic: nothing here imports ``torch``, so layouts can be validated, printed and planned on a laptop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from lightning_hetero.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

# Slowest to fastest varying. Tensor-parallel ranks are neighbours, so they share a node where one is large enough.
MESH_AXES = (
    "pipeline_parallel",
    "data_parallel_replicate",
    "data_parallel_shard",
    "context_parallel",
    "tensor_parallel",
)
DRIVER_NAMES = ("llm", "language_model", "text_model")

_SIZE_FIELDS = (
    "tensor_parallel_size",
    "context_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
)


@dataclass(frozen=True, kw_only=True)
class ModuleLayout:
    """One module's parallel sizes and the ranks that hold it.

    The sizes multiply to the number of ranks:
    ``pipeline * data * context * tensor == len(ranks)``. Ranks fill the axes in the order of :data:`MESH_AXES`,
    tensor parallelism fastest.

    Args:
        module: Dotted path of the submodule in the LightningModule. Default: the name that the layout has in
            ``HeteroStrategy(layouts=...)``.
        ranks: ``"0-3"`` (inclusive), ``"0-3,8-11"``, ``5``, ``[0, 1]``, or ``None`` for every rank.
        data_parallel_size: Number of replicas, or ``"auto"`` for what the ranks leave after the other axes.
        shard_size: Ranks over which FSDP2 shards the parameters: ``"full"`` for the whole data axis, 1 for
            replicated parameters, another divisor of the data-parallel size for hybrid sharding.
        tensor_parallel_size: Ranks over which single layers are split.
        tensor_parallel_plan: Pattern of submodules, relative to the module, to the name of a style (``colwise``,
            ``rowwise``, ...) or a ``ParallelStyle``; ``"auto"`` takes the plan that the module offers.
        sequence_parallel: Shard activations between tensor-parallel layers over the sequence.
        context_parallel_size: Ranks over which sequences are split.
        pipeline_parallel_size: Number of pipeline stages.
        expert_parallel_size: Ranks over which experts are split.
        reshard_after_forward: As in ``fully_shard``.
        fsdp_units: Patterns of blocks that become FSDP2 units of their own, or ``"auto"``.
        cpu_offload: Keep sharded parameters in host memory.
        activation_checkpointing: ``"none"``, ``"full"`` (every block) or patterns of blocks to recompute.
        compile: Compile each block.
        microbatches_per_encode: This module's own value; ``None`` takes the strategy's.
        balance: This module's own value; ``None`` takes the strategy's.

    Raises:
        LayoutError: If a value is of the wrong type or below one.
    """

    module: str | None = None
    ranks: str | int | list[int] | None = None
    data_parallel_size: int | Literal["auto"] = "auto"
    shard_size: int | Literal["full"] = "full"
    tensor_parallel_size: int = 1
    tensor_parallel_plan: Literal["auto"] | dict[str, str | ParallelStyle] = "auto"
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    reshard_after_forward: bool | int = True
    fsdp_units: Literal["auto"] | list[str] = "auto"
    cpu_offload: bool = False
    activation_checkpointing: Literal["none", "full"] | list[str] = "none"
    compile: bool = False
    microbatches_per_encode: int | Literal["all"] | None = None
    balance: Literal["none", "replica", "global"] | None = None

    def __post_init__(self) -> None:
        for name in _SIZE_FIELDS:
            _check_size(name, getattr(self, name))
        if self.data_parallel_size != "auto":
            _check_size("data_parallel_size", self.data_parallel_size)
        if self.shard_size != "full":
            _check_size("shard_size", self.shard_size)
        if isinstance(self.tensor_parallel_plan, str) and self.tensor_parallel_plan != "auto":
            raise LayoutError(f"tensor_parallel_plan must be 'auto' or a dict, got {self.tensor_parallel_plan!r}")
        parse_ranks(self.ranks)


@dataclass(frozen=True)
class ResolvedLayout:
    """A :class:`ModuleLayout` with every size and rank known.

    Attributes:
        name: The layout's short name.
        path: Dotted path of the module.
        ranks: Global ranks in mesh order.
        sizes: One size per axis of :data:`MESH_AXES`.
        config: The layout it was resolved from.
    """

    name: str
    path: str
    ranks: tuple[int, ...]
    sizes: tuple[int, int, int, int, int]
    config: ModuleLayout = field(default_factory=ModuleLayout, compare=False, repr=False)

    @property
    def pipeline_size(self) -> int:
        return self.sizes[0]

    @property
    def replicate_size(self) -> int:
        return self.sizes[1]

    @property
    def shard_size(self) -> int:
        return self.sizes[2]

    @property
    def context_size(self) -> int:
        return self.sizes[3]

    @property
    def tensor_size(self) -> int:
        return self.sizes[4]

    @property
    def data_size(self) -> int:
        """Number of replicas."""
        return self.replicate_size * self.shard_size

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.ranks, product(*map(range, self.sizes)), strict=True))

    def __contains__(self, rank: int) -> bool:
        return rank in self._coordinates

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Coordinate of a global rank on :data:`MESH_AXES`.

        Raises:
            LayoutError: If the rank does not hold the module.
        """
        if rank not in self._coordinates:
            raise LayoutError(f"rank {rank} does not hold module '{self.name}', which is on ranks {show(self.ranks)}")
        return self._coordinates[rank]

    def replica_of(self, rank: int) -> int:
        """Index of the replica that a rank belongs to."""
        _, replicate, shard, _, _ = self.coordinate(rank)
        return replicate * self.shard_size + shard

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each replica, in mesh order."""
        members: list[list[int]] = [[] for _ in range(self.data_size)]
        for rank in self.ranks:
            members[self.replica_of(rank)].append(rank)
        return tuple(map(tuple, members))

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """Sets of ranks that differ only in the given axes, in mesh order."""
        varying = {MESH_AXES.index(axis) for axis in axes}
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in self._coordinates.items():
            key = tuple(c for axis, c in enumerate(coordinate) if axis not in varying)
            sets.setdefault(key, []).append(rank)
        return [tuple(ranks) for ranks in sets.values()]


def parse_ranks(ranks: str | int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Turns the ``ranks`` field into global ranks; ``None`` stays ``None`` (every rank).

    Raises:
        LayoutError: If the text cannot be read, or a rank is given twice.
    """
    if ranks is None:
        return None
    if isinstance(ranks, bool) or not isinstance(ranks, (str, int, Sequence)):
        raise LayoutError(f"ranks must be like '0-3', '0-3,8-11', 5 or [0, 1], got {ranks!r}")
    if isinstance(ranks, int):
        parsed = [ranks]
    elif isinstance(ranks, str):
        parsed = []
        for part in ranks.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            if match is None:
                raise LayoutError(f"ranks must be like '0-3', '0-3,8-11', 5 or [0, 1], got {ranks!r}")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise LayoutError(f"ranks {ranks!r}: the range {part.strip()!r} runs backwards")
            parsed.extend(range(first, last + 1))
    else:
        parsed = list(ranks)
    if not parsed or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in parsed):
        raise LayoutError(f"ranks must be one or more numbers from 0 up, got {ranks!r}")
    if len(set(parsed)) != len(parsed):
        raise LayoutError(f"ranks {ranks!r} name a rank twice")
    return tuple(parsed)


def resolve_layout(name: str, layout: ModuleLayout, world_size: int) -> ResolvedLayout:
    """Validates one layout against the world and fills in what was left open.

    Raises:
        LayoutError: If ranks lie outside the world or the sizes do not multiply to the number of ranks.
    """
    key = f"layouts.{name}"
    ranks = parse_ranks(layout.ranks)
    if ranks is None:
        ranks = tuple(range(world_size))
    outside = [rank for rank in ranks if rank >= world_size]
    if outside:
        raise LayoutError(
            f"{key}.ranks: rank{'s' if len(outside) > 1 else ''} {show(outside)} outside the world of {world_size} "
            f"processes (ranks 0-{world_size - 1}); change {key}.ranks or trainer.devices x trainer.num_nodes"
        )
    others = layout.pipeline_parallel_size * layout.context_parallel_size * layout.tensor_parallel_size
    data = layout.data_parallel_size
    if data == "auto":
        if len(ranks) % others:
            raise LayoutError(
                f"{key}: pipeline {layout.pipeline_parallel_size} x context {layout.context_parallel_size} x tensor "
                f"{layout.tensor_parallel_size} = {others} does not divide the module's {len(ranks)} ranks; change "
                f"{key}.tensor_parallel_size (or the other sizes), or {key}.ranks"
            )
        data = len(ranks) // others
    if others * data != len(ranks):
        raise LayoutError(
            f"{key}: pipeline {layout.pipeline_parallel_size} x data {data} x context {layout.context_parallel_size} x "
            f"tensor {layout.tensor_parallel_size} = {others * data}, but the module has {len(ranks)} ranks; change "
            f"{key}.data_parallel_size (or leave it at 'auto'), the other sizes, or {key}.ranks"
        )
    shard = data if layout.shard_size == "full" else layout.shard_size
    if data % shard:
        raise LayoutError(
            f"{key}.shard_size: {shard} does not divide the data-parallel size {data}; "
            f"choose 'full', 1 or a divisor of {data}"
        )
    sizes = (
        layout.pipeline_parallel_size,
        data // shard,
        shard,
        layout.context_parallel_size,
        layout.tensor_parallel_size,
    )
    return ResolvedLayout(name=name, path=layout.module or name, ranks=ranks, sizes=sizes, config=layout)


@dataclass(frozen=True)
class Layouts:
    """The resolved layouts of all placed modules, and which of them is the driver."""

    by_name: Mapping[str, ResolvedLayout]
    driver_name: str
    world_size: int

    @property
    def driver(self) -> ResolvedLayout:
        return self.by_name[self.driver_name]

    @property
    def others(self) -> list[ResolvedLayout]:
        """Every placed module but the driver, in the order of the configuration."""
        return [layout for name, layout in self.by_name.items() if name != self.driver_name]

    def owner_of(self, path: str) -> ResolvedLayout | None:
        """The placed module that a parameter or submodule path belongs to: the innermost one, else ``None``."""
        owners = [layout for layout in self.by_name.values() if is_inside(path, layout.path)]
        return max(owners, key=lambda layout: len(layout.path), default=None)


def resolve_layouts(layouts: Mapping[str, ModuleLayout], driver: str | None, world_size: int) -> Layouts:
    """Validates all layouts together.

    Raises:
        LayoutError: If one layout is impossible, the driver cannot be decided, rank 0 is not among the driver's
            ranks, or two placed modules are nested and the outer one is not the driver.
    """
    if not layouts:
        raise LayoutError("no module has a layout; give HeteroStrategy(layouts=...) or configure_layouts()")
    by_name = {name: resolve_layout(name, layout, world_size) for name, layout in layouts.items()}
    driver_name = choose_driver(by_name, driver)
    _check_nesting(by_name, driver_name)
    driver_ranks = by_name[driver_name].ranks
    if 0 not in driver_ranks:
        moved = [rank - min(driver_ranks) for rank in driver_ranks]
        raise LayoutError(
            f"layouts.{driver_name}.ranks: rank 0 must be one of the driver's ranks, got {show(driver_ranks)}; give "
            f"the driver the first ranks (layouts.{driver_name}.ranks='{show(moved)}') and move the "
            "other modules behind them"
        )
    return Layouts(by_name=by_name, driver_name=driver_name, world_size=world_size)


def choose_driver(names: Iterable[str], driver: str | None) -> str:
    """The name of the driver: the one given, the only one, or the one with a language model's name.

    Raises:
        LayoutError: If the name given has no layout, or none or several names fit.
    """
    choices = list(names)
    if driver is not None:
        if driver not in choices:
            raise LayoutError(f"driver: '{driver}' has no layout; choose one of {_names(choices)}")
        return driver
    if len(choices) == 1:
        return choices[0]
    matches = [name for name in choices if name in DRIVER_NAMES]
    if len(matches) == 1:
        return matches[0]
    found = (
        f"several layouts are called like a language model ({_names(matches)})"
        if matches
        else (f"none of the layouts is called {_names(DRIVER_NAMES, 'or')}")
    )
    raise LayoutError(
        f"driver: cannot be decided, {found}; set HeteroStrategy(driver=...) to one of {_names(choices)}: "
        "the module in whose layout training_step runs"
    )


def process_groups(layouts: Layouts) -> list[tuple[int, ...]]:
    """Rank sets that need a process group, in the one order in which every rank creates them.

    Sets with one member need none, equal sets share one, and the world (which comes first) always exists.

    Returns:
        Sorted rank sets without repetition.
    """
    world = tuple(range(layouts.world_size))
    sets: dict[tuple[int, ...], None] = {world: None} if len(world) > 1 else {}
    for layout in layouts.by_name.values():
        for axes in (*((axis,) for axis in MESH_AXES), *FLATTENED_AXES.values(), MESH_AXES):
            for ranks in layout.groups(axes):
                if len(ranks) > 1:
                    sets.setdefault(tuple(sorted(ranks)), None)
    return list(sets)


FLATTENED_AXES = {"data_parallel": ("data_parallel_replicate", "data_parallel_shard")}
"""Names of axes that are several mesh axes together."""


def is_inside(path: str, root: str) -> bool:
    """Whether a dotted path is ``root`` or lies below it; the empty root holds everything."""
    return not root or path == root or path.startswith(root + ".")


def show(ranks: Sequence[int]) -> str:
    """Ranks as text: ``0-3,8``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] + 1 == rank:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def axes_text(layout: ResolvedLayout) -> str:
    """The sizes above one, as in ``data 4 (shard 4) x tensor 2``."""
    parts = []
    if layout.pipeline_size > 1:
        parts.append(f"pipeline {layout.pipeline_size}")
    parts.append(f"data {layout.data_size}" + (f" (shard {layout.shard_size})" if layout.data_size > 1 else ""))
    if layout.context_size > 1:
        parts.append(f"context {layout.context_size}")
    parts.append(f"tensor {layout.tensor_size}")
    assert prod(layout.sizes) == len(layout.ranks)
    return " x ".join(parts)


def _check_nesting(by_name: Mapping[str, ResolvedLayout], driver_name: str) -> None:
    for outer, inner in product(by_name.values(), repeat=2):
        if outer is inner or not is_inside(inner.path, outer.path):
            continue
        if inner.path == outer.path:
            raise LayoutError(f"layouts.{outer.name} and layouts.{inner.name} place the same module '{inner.path}'")
        if outer.name != driver_name:
            raise LayoutError(
                f"layouts.{inner.name}: module '{inner.path}' lies inside '{outer.path}' (layouts.{outer.name}), "
                f"which is not the driver; only the driver may contain placed modules. Remove one of the two "
                "layouts, or set "
                f"driver='{outer.name}'"
            )


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"{name} must be a whole number from 1 up, got {value!r}")


def _names(names: Iterable[str], last: str = "and") -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"

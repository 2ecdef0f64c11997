"""Who holds what: the layout table, parameters and memory per rank, and the picture.

Everything here is arithmetic on shapes and layouts, so it also works for a model on the meta device and for a world
that this machine does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_hetero.errors import HeteroError
from lightning_hetero.layout import Layouts, ResolvedLayout, axes_text, is_inside, process_groups, show
from lightning_hetero.parallelize.data import resolve_units, uses_fsdp
from lightning_hetero.parallelize.plans import nested_paths, sharded_dims
from lightning_hetero.placement import parameters_by_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUTSIDE = ""
"""Key of the parameters outside every placed module; each driver rank holds them whole."""

# Bytes of a stored weight, of the low-precision copy that autocast keeps of it, and of an activation.
_PRECISION_BYTES = {"64-true": (8, 0, 8), "32-true": (4, 0, 4), "16-true": (2, 0, 2), "bf16-true": (2, 0, 2)} | {
    "16-mixed": (4, 2, 2),
    "bf16-mixed": (4, 2, 2),
}
_PRECISION_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}

_MAX_LABELLED_RANKS = 32
_REPLICA_COLORS = ("#a6cee3", "#b2df8a", "#fdbf6f", "#cab2d6", "#fb9a99", "#ffff99", "#9fd8c5", "#dcc3a1")


# ---------------------------------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------------------------------


def local_numel(
    shape: Sequence[int], *, tensor_dim: int | None, layout: ResolvedLayout, rank: int, sharded: bool = True
) -> int:
    """Number of a parameter's elements that a rank holds.

    The tensor axis splits ``tensor_dim``, then FSDP2 splits dim 0 of what is left over the shard axis, both like
    ``torch.chunk``; the other axes replicate.

    Args:
        shape: The whole parameter's shape.
        tensor_dim: Dim that the tensor axis splits, or ``None`` where it replicates.
        layout: Layout of the module that owns the parameter.
        rank: Global rank; one that does not hold the module holds 0 elements.
        sharded: Whether FSDP2 shards the parameter.
    """
    if rank not in layout:
        return 0
    _, _, shard, _, tensor = layout.coordinate(rank)
    local = list(shape)
    if tensor_dim is not None:
        local[tensor_dim] = _chunk(local[tensor_dim], layout.tensor_size, tensor)
    if sharded and local:
        local[0] = _chunk(local[0], layout.shard_size, shard)
    return prod(local)


def parameters_per_rank(
    module: nn.Module,
    layouts: Layouts,
    *,
    trainable_only: bool = False,
    dims: Mapping[str, int] | None = None,
) -> dict[str, list[int]]:
    """Number of parameter elements on each rank, by placed module.

    Args:
        module: The LightningModule, before it is sharded.
        layouts: Its layouts.
        trainable_only: Count only parameters that require gradient.
        dims: What :func:`~lightning_hetero.parallelize.plans.sharded_dims` returns, if it is known already.

    Returns:
        Layout name to one number for each rank of the world. ``""`` holds the parameters outside every placed module.
    """
    dims = sharded_dims(module, layouts) if dims is None else dims
    counts = {}
    for name, parameters in parameters_by_module(module, layouts).items():
        layout = layouts.by_name.get(name, layouts.driver)
        shapes = [
            (parameter.shape, dims.get(path))
            for path, parameter in parameters.items()
            if parameter.requires_grad or not trainable_only
        ]

        def count(
            rank: int, shapes: list = shapes, layout: ResolvedLayout = layout, sharded: bool = name != OUTSIDE
        ) -> int:
            return sum(
                local_numel(shape, tensor_dim=dim, layout=layout, rank=rank, sharded=sharded) for shape, dim in shapes
            )

        counts[name] = _per_rank(layout, layouts.world_size, count)
    return counts


def _per_rank(layout: ResolvedLayout, world_size: int, count: Callable[[int], int]) -> list[int]:
    """Evaluates ``count`` once for each (shard, tensor) coordinate, and is 0 on ranks outside the layout."""
    known: dict[tuple[int, int], int] = {}
    counts = []
    for rank in range(world_size):
        if rank not in layout:
            counts.append(0)
            continue
        _, _, shard, _, tensor = layout.coordinate(rank)
        if (shard, tensor) not in known:
            known[shard, tensor] = count(rank)
        counts.append(known[shard, tensor])
    return counts


def _chunk(size: int, parts: int, index: int) -> int:
    """Length of one of the parts that ``torch.chunk`` cuts, 0 for those that it leaves out."""
    step = -(-size // parts)
    return max(0, min(step, size - index * step))


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training needs on one rank.

    Attributes:
        rank: Global rank.
        weights: The rank's part of all parameters, with autocast's low-precision copies.
        gradients: Gradients of the trainable ones.
        optimizer: The optimizer's states for the trainable ones.
        gathered: Parameters that FSDP2 holds whole at one time: those outside its units of blocks, and two units (the
            one that runs and the next one, whose all-gather overlaps with it).
        activations: What transformer blocks keep for the backward.
        logits: The head's output, its log-probabilities and its gradient.
        unknown: What could not be estimated and is missing in the numbers, as in ``"activations of vision"``.
    """

    rank: int
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0
    logits: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Sum of all that is known."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.logits


def estimate_memory(
    module: nn.Module,
    layouts: Layouts,
    *,
    precision: str | int | None = "32-true",
    optimizer_states: int = 2,
    tokens: Mapping[str, int] | None = None,
) -> list[MemoryEstimate]:
    """Estimates the memory of a training step on every rank.

    Activations are those of equation 2 of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models": ``tokens * width * (10 + 24 / tensor)`` bytes a block in 16 bit (``34 / tensor`` with sequence
    parallelism), without its term for the attention scores, which fused attention does not keep. It assumes an MLP four
    times as wide as the block; embeddings, final norms and temporary buffers are not in it. With full recomputation a
    block keeps its input, and one block is whole. A module without trainable parameters keeps none, unless it is the
    driver. Logits count three times: logits, log-probabilities, gradient.

    Args:
        module: The LightningModule, before it is sharded; its parameters may be on the meta device.
        layouts: Its layouts.
        precision: The trainer's precision.
        optimizer_states: Values that the optimizer keeps for a parameter: 2 for Adam and AdamW, 1 for SGD with
            momentum, 0 for plain SGD.
        tokens: Layout name to the tokens that one driver replica passes to that module in a step.

    Raises:
        HeteroError: If the precision is not one of Lightning's plain ones.
    """
    weight_bytes, copy_bytes, compute_bytes = _bytes_of(precision)
    tokens = tokens or {}
    ranks = range(layouts.world_size)
    dims = sharded_dims(module, layouts)
    total = parameters_per_rank(module, layouts, dims=dims)
    trainable = parameters_per_rank(module, layouts, dims=dims, trainable_only=True)
    held = [sum(counts[rank] for counts in total.values()) for rank in ranks]
    trained = [sum(counts[rank] for counts in trainable.values()) for rank in ranks]

    gathered, activations, logits = ([0] * len(ranks) for _ in range(3))
    unknown: list[list[str]] = [[] for _ in ranks]
    for name, layout in layouts.by_name.items():
        whole = _gathered_numel(module, layout, layouts, dims) * weight_bytes
        kept: float | None = 0
        if name == layouts.driver_name or any(trainable[name]):
            kept = _activation_bytes(module, layout, layouts, tokens.get(name), compute_bytes)
        scores: float | None = 0
        if name == layouts.driver_name:
            scores = _logit_bytes(module, layout, layouts, tokens.get(name), compute_bytes)
        for rank in layout.ranks:
            gathered[rank] += whole
            activations[rank] += round(kept or 0)
            logits[rank] += round(scores or 0)
            unknown[rank] += [f"activations of {name}"] * (kept is None) + [f"logits of {name}"] * (scores is None)
    return [
        MemoryEstimate(
            rank=rank,
            weights=held[rank] * (weight_bytes + copy_bytes),
            gradients=trained[rank] * weight_bytes,
            optimizer=trained[rank] * weight_bytes * optimizer_states,
            gathered=gathered[rank],
            activations=activations[rank],
            logits=logits[rank],
            unknown=tuple(unknown[rank]),
        )
        for rank in ranks
    ]


def _bytes_of(precision: str | int | None) -> tuple[int, int, int]:
    name = "32-true" if precision is None else str(precision)
    name = _PRECISION_ALIASES.get(name, name)
    if name not in _PRECISION_BYTES:
        raise HeteroError(
            f"trainer.precision: no memory estimate for '{precision}'; choose one of {', '.join(_PRECISION_BYTES)}"
        )
    return _PRECISION_BYTES[name]


def _own_modules(module: nn.Module, layout: ResolvedLayout, layouts: Layouts) -> Iterator[tuple[str, nn.Module]]:
    """Full path and submodule of all that a placed module holds, without placed modules inside it."""
    for path, child in module.get_submodule(layout.path).named_modules(prefix=layout.path):
        if layouts.owner_of(path) is layout:
            yield path, child


def _block_widths(module: nn.Module, layout: ResolvedLayout, layouts: Layouts) -> list[int]:
    """Width of each block's residual stream: what the first linear in an element of an outermost module list reads."""
    widths: list[int] = []
    lists: list[str] = []
    for path, child in _own_modules(module, layout, layouts):
        if isinstance(child, nn.ModuleList) and not any(is_inside(path, outer) for outer in lists):
            lists.append(path)
            for block in child:
                linears = (part for part in block.modules() if isinstance(part, nn.Linear))
                widths += [linear.in_features for linear in linears][:1]
    return widths


def _gathered_numel(module: nn.Module, layout: ResolvedLayout, layouts: Layouts, dims: Mapping[str, int]) -> int:
    if not uses_fsdp(layout):
        return 0
    placed = module.get_submodule(layout.path)
    units = {f"{layout.path}.{path}": 0 for path in resolve_units(placed, layout, nested_paths(layout, layouts))}
    outside = 0
    for path, parameter in parameters_by_module(module, layouts)[layout.name].items():
        numel = parameter.numel() // (layout.tensor_size if path in dims else 1)
        unit = max((root for root in units if is_inside(path, root)), key=len, default=None)
        if unit is None:
            outside += numel
        else:
            units[unit] += numel
    at_once = None if layout.config.reshard_after_forward is False else 2
    return outside + sum(sorted(units.values(), reverse=True)[:at_once])


def _activation_bytes(
    module: nn.Module, layout: ResolvedLayout, layouts: Layouts, tokens: int | None, compute_bytes: int
) -> float | None:
    recompute = layout.config.activation_checkpointing
    widths = _block_widths(module, layout, layouts)
    if tokens is None or not widths or recompute not in ("none", "full"):
        return None
    # All driver replicas' tokens, spread over this module's replicas and their context ranks.
    local_tokens = tokens * layouts.driver.data_size / layout.data_size / layout.context_size
    tensor = layout.tensor_size
    per_width = (34 / tensor if layout.config.sequence_parallel else 10 + 24 / tensor) * compute_bytes / 2
    if recompute == "full":
        return local_tokens * (sum(widths) * compute_bytes + max(widths) * per_width)
    return local_tokens * sum(widths) * per_width


def _logit_bytes(
    module: nn.Module, layout: ResolvedLayout, layouts: Layouts, tokens: int | None, compute_bytes: int
) -> float | None:
    children = [child for _, child in _own_modules(module, layout, layouts)]
    vocabularies = {child.num_embeddings for child in children if isinstance(child, nn.Embedding)}
    heads = [child.out_features for child in children if isinstance(child, nn.Linear)]
    vocabulary = next((size for size in reversed(heads) if size in vocabularies), None)
    if tokens is None or vocabulary is None:
        return None
    return 3 * tokens / layout.context_size * vocabulary * compute_bytes


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def layout_table(module: nn.Module, layouts: Layouts) -> Table:
    """The table of all placed modules: where they are, how they are split, and what that costs.

    The driver is marked with ``*``. Numbers that differ between the ranks of a module are shown as a range.
    """
    per_rank = parameters_per_rank(module, layouts)
    owned = parameters_by_module(module, layouts)
    groups = groups_per_rank(layouts)
    table = Table(title=f"Layout on {layouts.world_size} rank{'s' * (layouts.world_size > 1)} (* driver)")
    for column in ("module", "path", "axes", "ranks"):
        table.add_column(column)
    for column in ("parameters", "parameters per rank", "process groups per rank"):
        table.add_column(column, justify="right")
    for name in (*layouts.by_name, OUTSIDE):
        if name == OUTSIDE and not owned[OUTSIDE]:
            continue
        layout = layouts.by_name.get(name, layouts.driver)
        table.add_row(
            f"{name} *" if name == layouts.driver_name else name or "(outside)",
            layout.path if name else "",
            axes_text(layout) if name else "replicated",
            show(layout.ranks),
            f"{sum(parameter.numel() for parameter in owned[name].values()):,}",
            _range([per_rank[name][rank] for rank in layout.ranks]),
            _range([groups[rank] for rank in layout.ranks]),
        )
    return table


def memory_table(estimates: Sequence[MemoryEstimate]) -> Table:
    """The memory of each rank in megabytes (10^6 bytes); neighbours with equal numbers share a row."""
    unknown = dict.fromkeys(name for estimate in estimates for name in estimate.unknown)
    table = Table(
        title="Memory estimate per rank, in MB",
        caption=f"not known and not counted: {', '.join(unknown)}" if unknown else None,
    )
    columns = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "total")
    table.add_column("ranks")
    for column in columns:
        table.add_column(column, justify="right")
    for values, same in groupby(estimates, key=lambda e: tuple(getattr(e, column) for column in columns)):
        table.add_row(show([estimate.rank for estimate in same]), *(f"{value / 1e6:,.2f}" for value in values))
    return table


def groups_per_rank(layouts: Layouts) -> list[int]:
    """Number of process groups that each rank belongs to."""
    counts = [0] * layouts.world_size
    for ranks in process_groups(layouts):
        for rank in ranks:
            counts[rank] += 1
    return counts


def print_layout(module: nn.Module, layouts: Layouts, console: Console | None = None) -> None:
    """Prints the layout table."""
    (console or make_console()).print(layout_table(module, layouts))


def make_console() -> Console:
    """A console for tables: as wide as the terminal, or wide enough not to fold where the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


# ---------------------------------------------------------------------------------------------------------------------
# Picture
# ---------------------------------------------------------------------------------------------------------------------


def draw_layout(layouts: Layouts, path: str | Path) -> None:
    """Draws ranks (columns) by modules (rows) and saves the picture.

    A cell's colour is the replica that the rank belongs to; its text says which of the replica's parameter shards and
    tensor parts it holds.

    Args:
        layouts: The layouts.
        path: File to write; the suffix (``.svg``, ``.png``, ``.pdf``) chooses the format.

    Raises:
        HeteroError: If matplotlib is not installed or does not know the suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise HeteroError("the picture of a layout needs matplotlib: pip install matplotlib") from None
    path = Path(path)
    world, names = layouts.world_size, list(layouts.by_name)
    left = 0.5 + 0.09 * max(len(_label(layouts, name)) for name in names)
    cell = min(1.1, 24 / world)
    # A Figure without pyplot picks its backend from the suffix and leaves no global state behind.
    figure = Figure(figsize=(left + cell * world + 0.2, 1.0 + 0.8 * len(names)))
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise HeteroError(f"picture: cannot write '{path.name}'; use one of the suffixes {', '.join(formats)}")
    width, height = figure.get_size_inches()
    axes = figure.add_axes((left / width, 0.35 / height, cell * world / width, 1 - 1.0 / height))
    for row, name in enumerate(names):
        _draw_row(axes, row, layouts.by_name[name], world)
    axes.set_xlim(-0.5, world - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    every = -(-world // _MAX_LABELLED_RANKS)
    axes.set_xticks(range(0, world, every), [str(rank) for rank in range(0, world, every)])
    axes.set_yticks(range(len(names)), [_label(layouts, name) for name in names])
    axes.set_xlabel("rank", labelpad=6)
    axes.xaxis.set_label_position("top")
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    legend = "equal colours in a row: one replica; grey: the rank does not hold the module"
    figure.text(left / width, 0.1 / height, legend, fontsize=7, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _label(layouts: Layouts, name: str) -> str:
    return f"{name} (driver)" if name == layouts.driver_name else name


def _draw_row(axes: Axes, row: int, layout: ResolvedLayout, world: int) -> None:
    from matplotlib.patches import Rectangle

    for rank in range(world):
        held = rank in layout
        color = _REPLICA_COLORS[layout.replica_of(rank) % len(_REPLICA_COLORS)] if held else "#f2f2f2"
        axes.add_patch(Rectangle((rank - 0.47, row - 0.45), 0.94, 0.9, facecolor=color, edgecolor="none"))
        if held and world <= _MAX_LABELLED_RANKS:
            axes.text(rank, row, _cell_text(layout, rank), ha="center", va="center", fontsize=8 if world <= 16 else 6)


def _cell_text(layout: ResolvedLayout, rank: int) -> str:
    pipeline, _, shard, context, tensor = layout.coordinate(rank)
    lines = [f"replica {layout.replica_of(rank)}"]
    for name, size, index in (
        ("stage", layout.pipeline_size, pipeline),
        ("shard", layout.shard_size, shard),
        ("context", layout.context_size, context),
        ("tensor", layout.tensor_size, tensor),
    ):
        if size > 1:
            lines.append(f"{name} {index}/{size}")
    return "\n".join(lines)

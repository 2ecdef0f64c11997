"""Draws ``architecture.svg``: one training step of ``recipes/digits_vlm.yaml`` through the package.

python docs/draw_architecture.py docs/architecture.svg
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, FAINT, LINE = "#1f2933", "#616e7c", "#9aa5b1"
LLM, VISION, PLAIN, BAND = "#b5d3ee", "#f8d5a3", "#e4e7eb", "#f5f7fa"
RANKS, LEFT, STEP = 4, 3.3, 1.3
RIGHT = LEFT + RANKS * STEP


@dataclass(frozen=True)
class Box:
    """A part of the step that one or several neighbouring ranks do: their first and last rank, and its text."""

    first: int
    last: int
    text: str
    color: str


@dataclass(frozen=True)
class Row:
    """One stage: its name and files at the left, what ranks do, and its way back at the right."""

    name: str
    files: str
    boxes: list[Box]
    back: str
    height: float = 0.62
    boundary: bool = False


def each(texts: list[str], color: str) -> list[Box]:
    width = RANKS // len(texts)
    return [Box(k * width, (k + 1) * width - 1, text, color) for k, text in enumerate(texts)]


ROWS = [
    Row("load", "data.py", each(["samples of replica 0", "samples of replica 1"], PLAIN), ""),
    Row(
        "training_step begins",
        "strategy.py",
        each(["replica 0 of llm, the driver", "replica 1 of llm"], LLM),
        "",
    ),
    Row(
        "agree on the call, cut it into items",
        "boundary/rendezvous.py, items.py",
        each(["counts, forms, gradient wanted: from every rank to every rank"], PLAIN),
        "",
        boundary=True,
    ),
    Row(
        "enter",
        "boundary/route.py, exchange.py",
        each(["images 0-26", "images 27-53", "images 0-24", "images 25-50"], PLAIN),
        "to the inputs, if any of them\nrequires a gradient",
        boundary=True,
    ),
    Row(
        "run the module",
        "boundary/call.py",
        each([f"vision\nreplica {k}" for k in range(4)], VISION),
        "FSDP2 sums over the 4 replicas",
        boundary=True,
    ),
    Row(
        "leave",
        "boundary/route.py, exchange.py",
        each(["rows of images 0-53", "rows of images 0-50"], PLAIN),
        "the route of the reversed pieces: a rank\nkeeps its own rows, nothing is summed",
        boundary=True,
    ),
    Row(
        "the driver runs, loss",
        "the user's code",
        each(["llm\ntensor 0", "llm\ntensor 1", "llm\ntensor 0", "llm\ntensor 1"], LLM),
        "FSDP2 sums over the 2 replicas",
    ),
    Row(
        "loss / R",
        "strategy.py",
        each(["loss of replica 0, / 2", "loss of replica 1, / 2"], PLAIN),
        "the only division",
    ),
    Row(
        "after the backward",
        "gradients.py, precision.py",
        each(["sum what FSDP2 does not: replicated and partial gradients\none norm of the whole model, clip"], PLAIN),
        "",
    ),
    Row("optimizer step", "Lightning, as ever", each(["each rank steps its own shards"], PLAIN), ""),
]
FIRST_OF_BACKWARD, LAST_OF_FORWARD = 3, 7  # where the arrows end


def draw_box(axes: Axes, box: Box, top: float, height: float) -> None:
    x, width = LEFT + box.first * STEP + 0.05, (box.last - box.first + 1) * STEP - 0.1
    axes.add_patch(
        FancyBboxPatch(
            (x, top - height + 0.05),
            width,
            height - 0.1,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=box.color,
            edgecolor="none",
        )
    )
    axes.text(x + width / 2, top - height / 2, box.text, ha="center", va="center", fontsize=8, color=INK)


def draw_arrow(axes: Axes, x: float, start: float, end: float) -> None:
    axes.add_patch(
        FancyArrowPatch((x, start), (x, end), arrowstyle="-|>", mutation_scale=12, color=LINE, linewidth=1.4)
    )


def draw() -> Figure:
    gap, head = 0.16, 0.75
    total = head + sum(row.height + gap for row in ROWS) + 0.1
    width = RIGHT + 3.1
    figure = Figure(figsize=(width, total))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(-total, 0)
    axes.axis("off")
    axes.text(0.25, -0.28, "One training step", fontsize=12, weight="bold", color=INK, va="center")
    axes.text(RIGHT + 0.55, -0.52, "on the way back", fontsize=9, weight="bold", color=INK, va="center")
    for rank in range(RANKS):
        axes.text(LEFT + (rank + 0.5) * STEP, -0.52, f"rank {rank}", ha="center", va="center", fontsize=9, color=INK)

    top, tops = -head, []
    for row in ROWS:
        tops.append(top)
        top -= row.height + gap
    boundary = [number for number, row in enumerate(ROWS) if row.boundary]
    first, last = tops[boundary[0]] + gap / 2, tops[boundary[-1]] - ROWS[boundary[-1]].height - gap / 2
    axes.add_patch(Rectangle((0.1, last), width - 0.2, first - last, facecolor=BAND, edgecolor="none"))
    axes.text(0.2, (first + last) / 2, "the boundary", rotation=90, fontsize=9, color=FAINT, va="center", ha="center")

    for row, row_top in zip(ROWS, tops, strict=True):
        middle = row_top - row.height / 2
        axes.text(0.45, middle + 0.11, row.name, fontsize=9, weight="bold", color=INK, va="center")
        axes.text(0.45, middle - 0.13, row.files, fontsize=7.5, color=FAINT, va="center", family="monospace")
        axes.text(RIGHT + 0.55, middle, row.back, fontsize=8, color=INK, va="center", linespacing=1.4)
        for box in row.boxes:
            draw_box(axes, box, row_top, row.height)
    end = tops[LAST_OF_FORWARD] - ROWS[LAST_OF_FORWARD].height
    draw_arrow(axes, LEFT - 0.08, tops[0], end)
    draw_arrow(axes, RIGHT + 0.28, end, tops[FIRST_OF_BACKWARD])
    return figure


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "architecture"  # the same file every time
    draw().savefig(sys.argv[1], dpi=120, metadata={"Date": None} if sys.argv[1].endswith(".svg") else None)

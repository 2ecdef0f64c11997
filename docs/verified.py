"""Prints a Markdown table of the files that ``lightning-hetero selftest`` wrote: ``python docs/verified.py *.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADER = ("devices", "precision", "torch", "CUDA, NCCL", "contracts: cases, largest relative error", "outcome", "date")


def row(report: dict[str, Any]) -> list[str]:
    """One self-test: what it ran on, and how it went."""
    nodes = f"{report['num_nodes']} nodes of " if report["num_nodes"] > 1 else ""
    contracts = (f"{c['name']}: {len(c['cases'])}, {error(c['worst_error'])}" for c in report["contracts"])
    return [
        nodes + ", ".join(f"{count} x {name}" for name, count in report["devices"].items()),
        report["precision"],
        report["torch"],
        f"{report['cuda']}, {report['nccl']}" if report["cuda"] else "",
        "; ".join(contracts),
        "passed" if report["passed"] else "failed",
        report["date"][:10],
    ]


def error(value: float | None) -> str:
    """A file has no number where a gradient was not finite or no case ran."""
    return "none" if value is None else f"{value:.1e}"


def table(files: Sequence[Path]) -> str:
    """All self-tests, one a row."""
    rows = [HEADER, ("---",) * len(HEADER), *(row(json.loads(file.read_text())) for file in files)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]]))

"""``lightning-hetero selftest``: the contracts on this machine's devices, and a file that says how they were met.

The reference models at small size, on generated data, under every way to divide the devices. Each case runs through
``Trainer.fit`` like a user's training, on one set of processes for all of them.
"""

from __future__ import annotations

import io
import json
import logging
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

import lightning_hetero
from lightning_hetero.errors import HeteroError
from lightning_hetero.report import make_console
from lightning_hetero.selftest_cases import Precision, Setup, contracts

FORMAT = 1
"""Version of the file."""

# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseReport:
    """One training run; ``failures`` says what is wrong with it."""

    case: str
    error: float
    seconds: float
    failures: Sequence[str] = ()


@dataclass
class ContractReport:
    """All cases of one contract.

    Attributes:
        name: Of the contract.
        meaning: In one sentence.
        tolerance: Largest relative error that passes.
        cases: Those that have run.
    """

    name: str
    meaning: str
    tolerance: float
    cases: list[CaseReport] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.cases) and not any(case.failures for case in self.cases)

    @property
    def worst(self) -> CaseReport | None:
        return max(self.cases, key=lambda case: case.error, default=None)

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "meaning": self.meaning,
            "passed": self.passed,
            "tolerance": self.tolerance,
            "worst_error": _number(self.worst.error) if self.worst else None,
            "worst_case": self.worst.case if self.worst else None,
            "seconds": round(self.seconds, 1),
            "cases": [asdict(case) | {"error": _number(case.error)} for case in self.cases],
        }


@dataclass
class SelftestReport:
    """What a self-test found.

    Attributes:
        machine: Versions and devices.
        contracts: In the order in which they run.
        running: The case that runs, or was running when the test ended early.
        error: What ended it early.
    """

    machine: dict[str, Any]
    contracts: list[ContractReport] = field(default_factory=list)
    running: str | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether all contracts were run to the end and met."""
        finished = self.running is None and self.error is None and bool(self.contracts)
        return finished and all(contract.passed for contract in self.contracts)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "passed": self.passed,
            "running": self.running,
            "error": self.error,
            "seconds": round(sum(contract.seconds for contract in self.contracts), 1),
            **self.machine,
            "contracts": [contract.to_dict() for contract in self.contracts],
        }

    def print(self, console: Console | None = None) -> None:
        """Prints a table of the contracts, and what failed."""
        console = console or make_console()
        machine = self.machine
        devices = ", ".join(f"{count} x {name}" for name, count in machine["devices"].items())
        table = Table(title=f"Self-test on {devices}, {machine['precision']}, torch {machine['torch']}")
        table.add_column("contract")
        table.add_column("meaning")
        for column in ("cases", "largest error", "tolerance", "seconds"):
            table.add_column(column, justify="right")
        table.add_column("outcome")
        for contract in self.contracts:
            table.add_row(
                contract.name,
                contract.meaning,
                str(len(contract.cases)),
                f"{contract.worst.error:.1e}" if contract.worst else "",
                f"{contract.tolerance:g}",
                f"{contract.seconds:.0f}",
                "passed" if contract.passed else "FAILED",
            )
        console.print(table)
        for contract in self.contracts:
            for case in contract.cases:
                for failure in case.failures:
                    console.print(f"FAILED {contract.name}, {case.case}: {failure}", highlight=False, markup=False)
        if self.error is not None:
            console.print(f"ENDED in {self.running}: {self.error}", highlight=False, markup=False)


def machine_facts(devices: int, num_nodes: int, accelerator: str, precision: str) -> dict[str, Any]:
    """Versions and device names, nothing that identifies the machine."""
    cuda = accelerator == "cuda"
    names = [torch.cuda.get_device_name(i) for i in range(devices)] if cuda else [_cpu_name()] * devices
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "accelerator": accelerator,
        "devices": dict(Counter(names)),
        "num_nodes": num_nodes,
        "precision": precision,
        "lightning_hetero": lightning_hetero.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def _number(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if value < inf else None


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def selftest(
    devices: int,
    accelerator: Literal["auto", "cpu", "gpu"] = "auto",
    precision: Precision = "64-true",
    output: Path | None = Path("selftest.json"),
    num_nodes: int = 1,
) -> SelftestReport:
    """Holds this machine's devices to the gradient, ragged, clip and random-stream contracts.

    Starts the processes as ``fit`` does, or joins those that torchrun has started.

    Args:
        devices: Number of devices on each node.
        accelerator: What the devices are; "auto" takes GPUs where there are any.
        precision: 64-true with a tolerance of 1e-10, or 32-true with 1e-5.
        output: File for the report, as JSON; null for none. It is kept up to date, so that it also says where a run
            ended that did not come to its end.
        num_nodes: Number of nodes, for a run that torchrun has started on several.

    Returns:
        What was found; complete on rank 0.

    Raises:
        HeteroError: If there are not as many devices.
    """
    kind = "cuda" if accelerator == "gpu" or (accelerator == "auto" and torch.cuda.is_available()) else "cpu"
    if kind == "cuda" and torch.cuda.device_count() < devices:
        raise HeteroError(
            f"selftest --devices {devices}: this machine has {torch.cuda.device_count()} GPUs; choose fewer, or add "
            "--accelerator cpu"
        )
    if devices < 1 or num_nodes < 1:
        raise HeteroError(f"selftest: devices and num_nodes must be at least 1, got {devices} and {num_nodes}")
    setup = Setup(devices * num_nodes, kind, num_nodes, precision)
    report = SelftestReport(machine_facts(devices, num_nodes, kind, precision))
    for contract in contracts(setup):
        results = ContractReport(contract.name, contract.meaning, contract.tolerance)
        report.contracts.append(results)
        if _is_rank_zero():
            print(f"{contract.name}: {len(contract.cases)} cases", flush=True)
        for case in contract.cases:
            report.running = f"{contract.name}, {case.text}"
            _save(report, output)
            start = time.perf_counter()
            try:
                with _quiet():
                    error, failures = case.run()
            except Exception as exception:
                if not _is_rank_zero():
                    raise
                report.error = f"{type(exception).__name__}: {exception}"
                _save(report, output)
                return report
            results.cases.append(CaseReport(case.text, error, round(time.perf_counter() - start, 2), failures))
    report.running = None
    _save(report, output)
    return report


def _is_rank_zero() -> bool:
    return not getattr(rank_zero_only, "rank", 0)


def _save(report: SelftestReport, output: Path | None) -> None:
    if output is not None and _is_rank_zero():
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report.to_dict(), indent=1) + "\n")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what a training run prints, once for each case."""
    loggers = [
        logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "torch.distributed.tensor")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

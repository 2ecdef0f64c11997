"""What a gradient check found: errors by parameter, module and step, and how they are judged and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isnan, sqrt

import torch
from rich.console import Console
from rich.table import Table

from lightning_hetero.errors import HeteroError
from lightning_hetero.report import make_console

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error that may pass, by the least precise dtype that a step computes in."""

FLOORS = {torch.float64: 1e-4, torch.float32: 0.1, torch.float16: 0.2, torch.bfloat16: 0.4}
"""A gradient smaller than this share of its module's is compared relative to the share: some are zero in exact
arithmetic (the bias of an attention's keys), and what is left of them is rounding alone."""


@dataclass(frozen=True)
class ParameterReport:
    """One parameter's gradient.

    Attributes:
        name: Path in the LightningModule.
        numel: Number of elements.
        norm: Of the gradient under the layout; 0 if there is none.
        reference_norm: The same in one process.
        difference: Norm of the difference, on the rank where it is largest.
        present: Whether the parameter has a gradient, in one process or under the layout.
        everywhere: Whether all ranks agree on whether it has one.
    """

    name: str
    numel: int
    norm: float
    reference_norm: float
    difference: float
    present: bool
    everywhere: bool = True


@dataclass(frozen=True)
class ModuleReport:
    """The gradients of one placed module, or of what is outside all of them.

    Attributes:
        name: The layout's name; ``"(outside)"`` for parameters of no placed module.
        axes: The layout in words.
        parameters: Its parameters.
        floor: Share of the module's gradient below which a parameter's counts as rounding.
    """

    name: str
    axes: str
    parameters: Sequence[ParameterReport]
    floor: float

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def without_gradient(self) -> list[str]:
        """Parameters that got no gradient, neither under the layout nor in one process."""
        return [p.name for p in self.parameters if not p.present]

    @property
    def norm(self) -> float:
        return sqrt(sum(p.norm**2 for p in self.parameters))

    @property
    def reference_norm(self) -> float:
        return sqrt(sum(p.reference_norm**2 for p in self.parameters))

    @property
    def norm_error(self) -> float:
        return relative(abs(self.norm - self.reference_norm), self.reference_norm)

    @property
    def worst(self) -> tuple[float, str]:
        """The largest relative error and the parameter that has it."""
        return max(((self._error(p), p.name) for p in self.parameters), default=(0.0, ""))

    def _error(self, parameter: ParameterReport) -> float:
        if not parameter.everywhere:
            return inf
        scale = max(parameter.reference_norm, self.floor * self.reference_norm)
        return relative(parameter.difference, scale)


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    Attributes:
        modules: The placed modules, and what is outside them.
        loss: The mean of the replicas' losses in one process.
        loss_error: Largest difference of a replica's loss, relative to that mean.
        norm: Of the whole gradient, as clipping sees it.
        norm_error: Its relative difference from one process.
        samples: Of all replicas.
        batches: Of all replicas.
    """

    modules: Sequence[ModuleReport]
    loss: float
    loss_error: float
    norm: float
    norm_error: float
    samples: int
    batches: int

    @property
    def worst(self) -> float:
        """The largest of all errors."""
        errors = [error for m in self.modules for error in (m.worst[0], m.norm_error)]
        return max(*errors, self.loss_error, self.norm_error)


@dataclass
class CheckReport:
    """What a gradient check found, equal on all ranks.

    Attributes:
        tolerance: Largest relative error that passes.
        steps: The steps that were compared.
        notes: What the check changed about the run, and what it could not cover.
    """

    tolerance: float = 0.0
    steps: list[StepReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        return max((step.worst for step in self.steps), default=inf)

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance

    @property
    def failures(self) -> list[str]:
        """One line for each thing that is wrong, modules first."""
        if not self.steps:
            return ["no optimizer step was compared: the run ended before the first one"]
        lines = []
        for number, step in enumerate(self.steps):
            where = f" in step {number}" if len(self.steps) > 1 else ""
            for module in step.modules:
                error, name = module.worst
                if max(error, module.norm_error) > self.tolerance:
                    ratio = relative(module.norm, module.reference_norm)
                    agreed = all(p.everywhere for p in module.parameters if p.name == name)
                    why = f"relative error {error:.1e}" if agreed else "only some ranks have one"
                    lines.append(
                        f"{module.name}: gradient of {name}{where}: {why}; the module's gradient norm is {ratio:.6g} "
                        "times that of one process"
                    )
            for what, error in (("loss of a replica", step.loss_error), ("gradient norm", step.norm_error)):
                if error > self.tolerance:
                    lines.append(f"{what}{where}: relative error {error:.1e}")
        return lines

    def raise_if_failed(self) -> None:
        """Raises unless the check passed.

        Raises:
            HeteroError: With what is wrong.
        """
        if not self.passed:
            raise HeteroError(f"gradient check failed, tolerance {self.tolerance:g}: {'; '.join(self.failures)}")

    def print(self, console: Console | None = None) -> None:
        """Prints a table for each step, what was covered, and the outcome."""
        console = console or make_console()
        for number, step in enumerate(self.steps):
            console.print(_table(step, f"Gradients of step {number} under the layout and in one process"))
            console.print(
                f"Loss {step.loss:.6g}, largest relative difference of a replica's loss {step.loss_error:.1e}. "
                f"Gradient norm {step.norm:.6g}, relative difference {step.norm_error:.1e}."
            )
        samples, batches = (sum(getattr(step, what) for step in self.steps) for what in ("samples", "batches"))
        console.print(f"Covered: {_count(len(self.steps), 'step')}, {batches} batches, {_count(samples, 'sample')}.")
        missing = [name for module in self.steps[0].modules for name in module.without_gradient] if self.steps else []
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            console.print(f"Not covered, without gradient: {_count(len(missing), 'parameter')} ({shown}).")
        for note in self.notes:
            console.print(f"Note: {note}.")
        for failure in self.failures:
            console.print(f"FAILED {failure}", highlight=False)
        if self.passed:
            console.print(f"PASSED with tolerance {self.tolerance:g}: largest relative error {self.worst:.1e}")


def relative(difference: float, scale: float) -> float:
    """``difference / scale``, infinite where that is no number."""
    if difference == 0:
        return 0.0
    ratio = difference / scale if scale else inf
    return inf if isnan(ratio) else ratio


def _table(step: StepReport, title: str) -> Table:
    table = Table(title=title)
    for column in ("module", "layout"):
        table.add_column(column)
    for column in ("parameters", "gradient norm", "norm difference", "largest gradient error"):
        table.add_column(column, justify="right")
    table.add_column("in")
    for module in step.modules:
        error, name = module.worst
        table.add_row(
            module.name,
            module.axes,
            f"{module.numel:,}",
            f"{module.norm:.6g}",
            f"{module.norm_error:.1e}",
            f"{error:.1e}",
            name,
        )
    return table


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"

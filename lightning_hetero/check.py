"""The gradient check: a LightningModule's own steps under its layouts against one process.

:class:`GradientCheck` is a callback for any Trainer, :func:`check_gradients` a whole run, and
``lightning-hetero check`` the same on a recipe.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hetero.check_report import (
    FLOORS,
    TOLERANCES,
    CheckReport,
    ModuleReport,
    ParameterReport,
    StepReport,
    relative,
)
from lightning_hetero.errors import HeteroError
from lightning_hetero.layout import Layouts, axes_text
from lightning_hetero.monitor import count_samples
from lightning_hetero.precision import fsdp_policy
from lightning_hetero.reference import NoDropout, OneProcess, coarsest, state_of
from lightning_hetero.report import OUTSIDE
from lightning_hetero.schedule import split_batch
from lightning_hetero.standin import loss_of
from lightning_hetero.strategy import HeteroStrategy

LARGE = 500_000_000
"""Parameters from which on the check cuts batches into single samples, unless it is told otherwise."""


class GradientCheck(Callback):
    """Compares the gradients of the first optimizer steps with those of one process.

    Rank 0 keeps a copy of the LightningModule as it was before it was parallelised. Before each of the steps the copy
    takes over the weights, runs the batches of all driver replicas one after the other, and every rank compares its
    gradients with the copy's, parameter by parameter. The contract is ``(1/R) * sum_r d loss_r / d parameter`` with
    ``R`` driver replicas; ``token_mean`` counts the tokens of all replicas, as it does under the layout.

    Dropout is off in the compared steps, and gradients are compared before clipping. Afterwards training goes on as
    usual, with :attr:`report` filled. The other ranks wait for the one process, at most for the strategy's ``timeout``.

    Args:
        steps: Number of optimizer steps.
        tolerance: Largest relative error ``||g - g_ref|| / ||g_ref||`` that passes. Default: by the least precise dtype
            that a step computes in, 1e-10 in float64 and 1e-5 in float32 (:data:`TOLERANCES`).
        microbatches: Into how many each batch is cut in the compared steps, since the one process has to hold the
            activations of a microbatch of the whole model. ``"auto"``: as the strategy says, but single samples for a
            model of more than :data:`LARGE` parameters.
        reference_device: Where the one process computes. Default: rank 0's device, or the CPU if that is too small.

    Example:
        >>> check = GradientCheck()
        >>> Trainer(strategy=HeteroStrategy(layouts), callbacks=[check], plugins=DoublePrecision()).fit(module)
        >>> check.report.raise_if_failed()
    """

    def __init__(
        self,
        steps: int = 1,
        tolerance: float | None = None,
        microbatches: int | Literal["auto"] = "auto",
        reference_device: str | None = None,
    ) -> None:
        self.steps = steps
        self.tolerance = tolerance
        self.microbatches = microbatches
        self.reference_device = reference_device
        self.report = CheckReport()
        self.one_process: OneProcess | None = None
        self._no_dropout: NoDropout | None = None
        self._usual_microbatches = 1
        self._begin_step()

    def _begin_step(self) -> None:
        self._batches: dict[int, list[Any]] = {}
        self._losses: list[float] = []
        self._facts: _Facts | None = None
        self._modules: list[ModuleReport] = []
        self._norm = 0.0

    @property
    def done(self) -> bool:
        """Whether all steps have been compared."""
        return len(self.report.steps) >= self.steps

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Copies the module before it is parallelised."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, HeteroStrategy):
            raise HeteroError(
                "the gradient check compares HeteroStrategy with one process, but the strategy is "
                f"{type(strategy).__name__}; use Trainer(strategy='hetero') or HeteroStrategy"
            )
        if not pl_module.automatic_optimization:
            raise HeteroError(
                "the gradient check takes the gradient of what training_step returns, but "
                f"{type(pl_module).__name__} sets automatic_optimization = False"
            )
        if strategy._parallelized is pl_module:
            raise HeteroError("the gradient check needs a module that has not been trained yet; build a new one")
        self.report = CheckReport()
        self._begin_step()
        self.one_process = OneProcess(pl_module) if trainer.is_global_zero else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes the copy."""
        one, device = self.one_process, torch.device("cpu")
        if one is not None:
            device = torch.device(self.reference_device or _roomy_device(pl_module, pl_module.device))
            if device.type == "cpu" and pl_module.device.type != "cpu":
                self.report.notes.append("the one process computed on the CPU")
        strategy = _strategy(trainer)
        self._usual_microbatches = strategy.microbatches
        _on_rank_zero(strategy, lambda: one.build(trainer, pl_module, device) if one else None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Collects the batches of all replicas."""
        if self.done:
            return
        strategy = _strategy(trainer)
        if not self.report.steps and not self._batches:
            self._settle_microbatches(strategy, pl_module, batch)
        self._batches[batch_idx] = _gather_batches(strategy, batch)
        self._no_dropout = NoDropout()
        self._no_dropout.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Runs the one process and compares gradients."""
        if self.done:
            return
        strategy, one, batches = _strategy(trainer), self.one_process, self._batches
        values = (_whole(tensor, pl_module.device) for _, tensor in state_of(pl_module))
        if one is not None:
            one.load(pl_module, values)
        else:
            collections.deque(values, maxlen=0)
        self._facts = _on_rank_zero(strategy, lambda: _run(one, batches, strategy.microbatches) if one else None)
        dtype = coarsest(
            self._facts.dtype,
            fsdp_policy(trainer.precision_plugin).param_dtype or torch.float64,
            *{p.dtype for p in pl_module.parameters() if p.is_floating_point()},
        )
        self.report.tolerance = TOLERANCES[dtype] if self.tolerance is None else self.tolerance
        self._note(pl_module, dtype)
        self._modules = compare_gradients(strategy, pl_module, one.module if one else None, FLOORS[dtype])
        self._norm = float(strategy.gradient_norm())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compares losses, and completes the step's report."""
        self._close()
        if batch_idx not in self._batches:
            return
        loss = loss_of(outputs)
        self._losses.append(0.0 if loss is None else float(loss) * trainer.accumulate_grad_batches)
        facts, strategy = self._facts, _strategy(trainer)
        if facts is None:  # gradients are still being accumulated
            return
        mine = [of_replicas[strategy.loader_rank] for of_replicas in facts.losses]
        off = torch.tensor([abs(a - b) for a, b in zip(self._losses, mine, strict=True)], dtype=torch.float64).max()
        dist.all_reduce(off, op=dist.ReduceOp.MAX, group=_host(strategy))
        mean = sum(map(sum, facts.losses)) / sum(map(len, facts.losses))
        reference_norm = sqrt(sum(module.reference_norm**2 for module in self._modules))
        self.report.steps.append(
            StepReport(
                modules=self._modules,
                loss=mean,
                loss_error=relative(float(off), abs(mean)),
                norm=self._norm,
                norm_error=relative(abs(self._norm - reference_norm), reference_norm),
                samples=facts.samples,
                batches=facts.batches,
            )
        )
        self._begin_step()
        if self.done:
            strategy.microbatches = self._usual_microbatches

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        self.one_process = None

    # ------------------------------------------------------------------ helpers

    def _close(self) -> None:
        if self._no_dropout is not None:
            self._no_dropout.__exit__(None, None, None)
            self._no_dropout = None

    def _settle_microbatches(self, strategy: HeteroStrategy, module: LightningModule, batch: Any) -> None:
        """Cuts batches as asked, or into samples where the model is large and batches can be cut."""
        if self.microbatches != "auto":
            strategy.microbatches = self.microbatches
            return
        parameters = sum(parameter.numel() for parameter in module.parameters())
        if strategy.microbatches > 1 or parameters < LARGE:
            return
        samples = count_samples(batch)
        try:
            split_batch(module, batch, samples)
        except Exception:  # the user's split_batch may raise anything
            samples = 1
        fewest = torch.tensor(samples)
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=_host(strategy))
        strategy.microbatches = max(1, int(fewest))
        self.report.notes.append(
            f"batches were cut into {strategy.microbatches} microbatches, since the model has {parameters:,} parameters"
        )

    def _note(self, module: LightningModule, dtype: torch.dtype) -> None:
        assert self._facts is not None
        stored = coarsest(*{p.dtype for p in module.parameters() if p.is_floating_point()})
        for applies, note in (
            (self._facts.dropout, "dropout was switched off"),
            (
                self._facts.draws,
                "a step draws random numbers, and other ones in one process: differences may come from that",
            ),
            (
                dtype != stored and self.tolerance is None,
                f"parts of a step compute in {str(dtype).removeprefix('torch.')}, which sets the tolerance",
            ),
        ):
            if applies and note not in self.report.notes:
                self.report.notes.append(note)


_BUCKET = 2**24
"""Elements that are broadcast at a time."""


@dataclass(frozen=True)
class _Facts:
    """What rank 0 tells the others about the step in one process; ``losses`` by batch and replica."""

    losses: list[list[float]]
    samples: int
    batches: int
    dtype: torch.dtype
    dropout: bool
    draws: bool


def _run(one: OneProcess, batches: dict[int, list[Any]], microbatches: int) -> _Facts:
    losses = one.run(batches, microbatches=microbatches)
    real = [batch for of_replicas in batches.values() for batch in of_replicas if batch is not None]
    return _Facts(losses, sum(map(count_samples, real)), len(real), one.dtype, one.dropout, one.draws)


def compare_gradients(
    strategy: HeteroStrategy, module: LightningModule, reference: nn.Module | None, floor: float
) -> list[ModuleReport]:
    """Compares every rank's gradients with those of an un-parallelised copy on rank 0. Collective over the world.

    Args:
        strategy: The strategy that parallelised the module.
        module: The parallelised module.
        reference: The copy, on rank 0; ``None`` elsewhere.
        floor: See :class:`ModuleReport`.

    Returns:
        One entry for each placed module, and one for the parameters outside them if there are any; equal on all ranks.
    """
    host, device, layouts = _host(strategy), strategy.root_device, strategy.layouts
    assert layouts is not None
    parameters = dict(module.named_parameters())
    expected = {} if reference is None else dict(reference.named_parameters(remove_duplicate=False))
    in_reference = _on_rank_zero(strategy, lambda: [expected[name].grad is not None for name in parameters])
    anywhere = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.uint8)
    everywhere = anywhere.clone()
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=host)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=host)
    measured = torch.zeros(len(parameters), 3, dtype=torch.float64, device=device)  # difference, norm, reference norm
    agreed = (anywhere == everywhere).tolist()
    known = [name for name, has in zip(parameters, in_reference, strict=True) if has]
    gradients = _from_rank_zero(
        [(parameters[name], expected[name].grad if reference is not None else None) for name in known], device
    )
    for row, parameter, has, agree in zip(measured, parameters.values(), in_reference, agreed, strict=True):
        wanted = next(gradients) if has else torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        given = torch.zeros_like(wanted)
        if parameter.grad is not None and agree:  # else gathering its parts would wait forever
            given = _whole(parameter.grad, device)
        row.copy_(torch.stack([(given - wanted).double().norm(), given.double().norm(), wanted.double().norm()]))
    found = measured.cpu().nan_to_num(nan=inf, posinf=inf)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=host)
    reports: dict[str, list[ParameterReport]] = {name: [] for name in (*layouts.by_name, OUTSIDE)}
    for number, (name, parameter) in enumerate(parameters.items()):
        difference, norm, wanted_norm = found[number].tolist()
        owner = layouts.owner_of(name)
        reports[owner.name if owner else OUTSIDE].append(
            ParameterReport(
                name,
                parameter.numel(),
                norm,
                wanted_norm,
                difference,
                present=in_reference[number] or bool(anywhere[number]),
                everywhere=agreed[number],
            )
        )
    return [
        ModuleReport(name or "(outside)", _axes(layouts, name), of_module, floor)
        for name, of_module in reports.items()
        if of_module
    ]


def check_gradients(
    model: LightningModule,
    train_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> CheckReport:
    """Trains a LightningModule for a few steps, with :class:`GradientCheck` and nothing else.

    Args:
        model: The LightningModule.
        train_dataloaders: As in ``Trainer.fit``.
        datamodule: As in ``Trainer.fit``.
        ckpt_path: As in ``Trainer.fit``: the weights to begin with.
        **options: Arguments of :func:`checking_trainer`: ``steps``, ``tolerance`` and others, and those of the Trainer.

    Returns:
        What was found, on all ranks.

    Example:
        >>> layouts = {"vision": ModuleLayout(), "llm": ModuleLayout(tensor_parallel_size=2)}
        >>> check_gradients(module, loader, devices=4, strategy=HeteroStrategy(layouts)).raise_if_failed()
    """
    trainer, check = checking_trainer(**options)
    trainer.fit(model, train_dataloaders, datamodule=datamodule, ckpt_path=ckpt_path)
    return check.report


def checking_trainer(
    steps: int = 1,
    precision: str | int | None = "64-true",
    tolerance: float | None = None,
    microbatches: int | Literal["auto"] = "auto",
    reference_device: str | None = None,
    **trainer: Any,
) -> tuple[Trainer, GradientCheck]:
    """A Trainer that fits for a gradient check: without logger, checkpoints, validation and other callbacks.

    Args:
        steps: Number of optimizer steps to compare.
        precision: Of both sides; in float64 nothing but the rounding of last digits is between them. "null", that
            is None: the trainer's.
        tolerance: Largest relative error that passes; default: what the precision allows, 1e-10 in float64 and 1e-5 in
            float32.
        microbatches: Into how many each batch is cut; "auto": as the strategy says, but single samples for a large
            model.
        reference_device: Where the one process computes; default: rank 0's device, or the CPU if that is too small.
        **trainer: Arguments of the Trainer: devices, strategy and others.
    """
    check = GradientCheck(steps, tolerance, microbatches, reference_device)
    fixed: dict[str, Any] = {
        "logger": DummyLogger(),
        "callbacks": [check],
        "max_steps": steps,
        "max_epochs": -1,
        "min_epochs": None,
        "min_steps": None,
        "max_time": None,
        "fast_dev_run": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "profiler": None,
        "barebones": False,
    }
    if precision is not None:
        plugins = trainer.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        plugins = [plugin for plugin in plugins if not isinstance(plugin, Precision)]
        # Lightning refuses the flag "64-true" for an instance of a ModelParallelStrategy, but not the plugin.
        double = str(precision) in ("64", "64-true")
        fixed["precision"] = None if double else precision
        fixed["plugins"] = [*plugins, DoublePrecision()] if double else plugins
    return Trainer(**{"strategy": "hetero"} | trainer | fixed), check


# ---------------------------------------------------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------------------------------------------------


def _strategy(trainer: Trainer) -> HeteroStrategy:
    assert isinstance(trainer.strategy, HeteroStrategy)
    return trainer.strategy


def _host(strategy: HeteroStrategy) -> dist.ProcessGroup:
    """All ranks, on the CPU side, where nobody minds how long the one process takes."""
    assert strategy._groups is not None
    return strategy._groups.host


def _on_rank_zero(strategy: HeteroStrategy, compute: Callable[[], Any]) -> Any:
    """What rank 0 computes, on all ranks; what it raises is raised on all of them. Collective over the world."""
    outcome: list[Any] = [None, None]
    cause: Exception | None = None
    if strategy.global_rank == 0:
        try:
            outcome[0] = compute()
        except Exception as error:
            cause, outcome[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0, group=_host(strategy))
    result, reason = outcome
    if reason is not None:
        raise HeteroError(f"the gradient check could not run the step in one process: {reason}") from cause
    return result


def _gather_batches(strategy: HeteroStrategy, batch: Any) -> list[Any]:
    """On rank 0 the batch of each driver replica, ``None`` for one that does not count. Collective over the world."""
    assert strategy.layouts is not None
    rank, driver = strategy.global_rank, strategy.layouts.driver
    mine = None
    if rank == driver.replicas[strategy.loader_rank][0] and not strategy.runs_standin:
        mine = move_data_to_device(batch, torch.device("cpu"))
    gathered: list[Any] | None = [None] * strategy.world_size if rank == 0 else None
    dist.gather_object(mine, gathered, dst=0, group=_host(strategy))
    return [gathered[ranks[0]] for ranks in driver.replicas] if gathered else []


def _from_rank_zero(tensors: Sequence[tuple[Tensor, Tensor | None]], device: torch.device) -> Iterator[Tensor]:
    """Broadcasts tensors to all ranks, many at a time.

    Args:
        tensors: One of the same shape and dtype, and on rank 0 the value.
        device: Where they are wanted.
    """
    start = 0
    while start < len(tensors):
        stop, numel = start, 0
        while stop < len(tensors) and (stop == start or numel + tensors[stop][0].numel() <= _BUCKET):
            if tensors[stop][0].dtype != tensors[start][0].dtype:
                break
            numel += tensors[stop][0].numel()
            stop += 1
        flat = torch.empty(numel, dtype=tensors[start][0].dtype, device=device)
        sizes = [like.numel() for like, _ in tensors[start:stop]]
        for part, (_, value) in zip(flat.split(sizes), tensors[start:stop], strict=True):
            if value is not None:
                part.copy_(value.reshape(-1))
        dist.broadcast(flat, src=0, group=dist.group.WORLD)
        for part, (like, _) in zip(flat.split(sizes), tensors[start:stop], strict=True):
            yield part.view(like.shape)
        start = stop


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    """The global value of a parameter or gradient."""
    tensor = tensor.detach().to(device)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _roomy_device(module: nn.Module, device: torch.device) -> torch.device:
    """The device if the whole weights and gradients fit beside what is there, else the CPU."""
    if device.type != "cuda":
        return device
    needed = sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in module.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return device if 1.5 * needed < free else torch.device("cpu")


def _axes(layouts: Layouts, name: str) -> str:
    return axes_text(layouts.by_name[name]) if name else "replicated"

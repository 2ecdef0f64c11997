"""The command line: ``lightning-hetero fit | validate | test | predict | layout | check | selftest``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hetero.check import checking_trainer
from lightning_hetero.check_report import CheckReport
from lightning_hetero.errors import HeteroError, LayoutError
from lightning_hetero.layout import Layouts, ModuleLayout, process_groups, show
from lightning_hetero.monitor import FinalMetrics, StepMonitor
from lightning_hetero.parallelize.apply import plan_modules
from lightning_hetero.placement import find_layouts
from lightning_hetero.report import draw_layout, estimate_memory, make_console, memory_table, print_layout
from lightning_hetero.selftest import SelftestReport, selftest
from lightning_hetero.strategy import HeteroStrategy


def main(args: ArgsType = None) -> None:
    """Runs the command line; a :class:`~lightning_hetero.HeteroError` becomes one message and exit code 2.

    Args:
        args: Arguments instead of those of the process.
    """
    try:
        HeteroCLI(
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"callbacks": [StepMonitor(), FinalMetrics()]},
            parser_kwargs={"prog": "lightning-hetero"},
            args=args,
        )
    except HeteroError as error:
        rank = getattr(rank_zero_only, "rank", 0)
        where = f" (rank {rank})" if rank else ""
        print(f"lightning-hetero: error{where}: {error}", file=sys.stderr)
        sys.exit(2)


class HeteroCLI(LightningCLI):
    """LightningCLI with three additional subcommands.

    ``layout`` and ``check`` read the same files as ``fit``; ``selftest`` reads none.
    """

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        # The parser of fit, so that a recipe for fit is a recipe for them, plus the arguments of their functions.
        description = "Shows which rank holds what and an estimate of the memory, without starting a process."
        layout = self._prepare_subcommand_parser(Trainer, "fit", description=description)
        layout.add_function_arguments(show_layout, skip={"model", "layouts", "precision", "datamodule"})
        self._add_subcommand(parser, "layout", layout, description)
        description = "Compares the gradients of a recipe's first steps under its layouts with those of one process."
        check = self._prepare_subcommand_parser(Trainer, "fit", description=description)
        check.add_function_arguments(checking_trainer, skip={"trainer"})
        self._add_subcommand(parser, "check", check, description)
        description = "Holds this machine's devices to the contracts of the package, on generated data."
        own = self.parser_class(description=description)
        own.add_function_arguments(selftest)
        self._add_subcommand(parser, "selftest", own, description)

    def _add_subcommand(
        self, parser: LightningArgumentParser, name: str, subparser: LightningArgumentParser, description: str
    ) -> None:
        self._subcommand_parsers[name] = subparser
        assert parser._subcommands_action is not None
        parser._subcommands_action.add_subcommand(name, subparser, help=description)

    def _set_seed(self) -> None:
        if self.subcommand != "selftest":
            super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Reports what is wrong with the strategy before the parser buries the reason in the errors of a union."""
        if self.subcommand != "selftest":
            _check_strategy(self._get(self.config, "trainer").get("strategy"))

    def instantiate_classes(self) -> None:
        """Instantiates the classes; for ``layout`` no trainer, and the model without memory where that works."""
        if self.subcommand == "selftest":
            return
        if self.subcommand not in ("layout", "check"):
            super().instantiate_classes()
            return
        # Nothing of a run is wanted: no logger, no callbacks, which may touch the disk when they are made.
        trainer = self.config[self.subcommand]["trainer"]
        trainer["logger"], trainer["callbacks"] = None, None
        try:
            with torch.device("meta") if self.subcommand == "layout" else nullcontext():
                self.config_init = self.parser.instantiate_classes(self.config)
        except Exception:
            if self.subcommand == "check":
                raise
            # Some models compute with their weights while they are built.
            self.config_init = self.parser.instantiate_classes(self.config)
        self.model = self._get(self.config_init, "model")
        self.datamodule = self._get(self.config_init, "data")
        self._add_configure_optimizers_method_to_model(self.subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        own = {"layout": self.layout, "check": self.check, "selftest": self.selftest}
        if subcommand in own:
            own[subcommand]()
            return
        self._plan(self.trainer)
        super()._run_subcommand(subcommand)

    def _plan(self, trainer: Trainer) -> None:
        """Finds mistakes in layouts here, where they are reported once and before any process is started."""
        if isinstance(trainer.strategy, HeteroStrategy) and not is_overridden("configure_model", self.model):
            _plan_layouts(self.model, trainer.strategy, trainer.world_size)

    def layout(self) -> None:
        """Runs ``layout``."""
        config = self.config_init["layout"]
        strategy = self._hetero_strategy()
        if is_overridden("configure_model", self.model):
            with torch.device("meta"):
                self.model.configure_model()
        show_layout(
            self.model,
            _plan_layouts(self.model, strategy, _world_size(config["trainer"])),
            precision=config["trainer"]["precision"],
            datamodule=self.datamodule,
            picture=config["picture"],
            optimizer_states=config["optimizer_states"],
            tokens=config["tokens"],
        )

    def check(self) -> None:
        """Runs ``check``; the exit code of rank 0 says how it ended."""
        config = self.config_init["check"]
        self._hetero_strategy()
        options = {name: config[name] for name in ("steps", "tolerance", "microbatches", "reference_device")}
        options |= config["trainer"]
        options["precision"] = config["precision"] or options["precision"]
        trainer, check = checking_trainer(**options)
        self._plan(trainer)
        trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=config["ckpt_path"])
        _end(check.report)

    def selftest(self) -> None:
        """Runs ``selftest``; the exit code of rank 0 says how it ended."""
        _end(selftest(**self.config["selftest"]))

    def _hetero_strategy(self) -> HeteroStrategy:
        """The strategy of a recipe for ``layout`` or ``check``.

        Raises:
            HeteroError: If it is another one.
        """
        strategy = self._get(self.config_init, "trainer")["strategy"]
        if strategy == "hetero":
            strategy = HeteroStrategy()
        if not isinstance(strategy, HeteroStrategy):
            given = strategy if isinstance(strategy, str) else type(strategy).__name__
            raise HeteroError(
                f"trainer.strategy: expected 'hetero' or lightning_hetero.HeteroStrategy, got '{given}', which has no "
                "layouts; add --trainer.strategy hetero"
            )
        return strategy


def show_layout(
    model: LightningModule,
    layouts: Layouts,
    *,
    precision: str | int | None = None,
    datamodule: LightningDataModule | None = None,
    picture: Path | None = None,
    optimizer_states: int = 2,
    tokens: dict[str, int] | None = None,
) -> None:
    """Prints the layout table, the process groups and the memory estimate, and draws the picture.

    Args:
        model: The LightningModule, which may be on the meta device.
        layouts: Its layouts.
        precision: The trainer's precision.
        datamodule: Its ``batch_size * sequence_length``, where it has both, are the driver's tokens.
        picture: File for a picture of ranks by modules: .svg, .png or .pdf.
        optimizer_states: Values that the optimizer keeps for a parameter: 2 for AdamW, 0 for plain SGD.
        tokens: Tokens that one driver replica passes to a module in a step, by the layout's name, for the estimate
            of activations: --tokens.vision 4096.
    """
    for name in tokens or {}:
        if name not in layouts.by_name:
            choices = ", ".join(map(repr, layouts.by_name))
            raise HeteroError(f"tokens: no layout is called '{name}'; choose from {choices}")
    console = make_console()
    print_layout(model, layouts, console)
    groups = process_groups(layouts)
    console.print(f"Process groups in order of creation: {' | '.join(map(show, groups)) or 'none'}")
    batch_size, length = (getattr(datamodule, name, None) for name in ("batch_size", "sequence_length"))
    if isinstance(batch_size, int) and isinstance(length, int):
        tokens = {layouts.driver_name: batch_size * length} | (tokens or {})
    estimates = estimate_memory(model, layouts, precision=precision, optimizer_states=optimizer_states, tokens=tokens)
    console.print(memory_table(estimates))
    if picture is not None:
        draw_layout(layouts, picture)
        console.print(f"Picture saved to {picture}")


def _end(report: CheckReport | SelftestReport) -> None:
    """Shows a report, once, and ends the process with 1 if something is wrong."""
    if getattr(rank_zero_only, "rank", 0):
        return  # also after a failure: whoever started the processes would end all of them at the first code but 0
    report.print()
    if not report.passed:
        sys.exit(1)


def _plan_layouts(model: LightningModule, strategy: HeteroStrategy, world_size: int) -> Layouts:
    """The layouts that a strategy will use, after all that can be checked without processes."""
    layouts = find_layouts(model, strategy.layout_config, strategy.driver_config, world_size)
    plan_modules(model, layouts)
    return layouts


def _check_strategy(config: Any) -> None:
    """Builds a HeteroStrategy from its parsed configuration, for the errors.

    Raises:
        HeteroError: As the constructors of the layouts, with their names, and of the strategy.
    """
    class_path = config.get("class_path") if isinstance(config, Namespace) else None
    if class_path is None:
        return
    module, _, name = class_path.rpartition(".")
    cls = getattr(import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, HeteroStrategy)):
        return
    arguments = dict(config.get("init_args", {}))
    layouts = {}
    for name, layout in (arguments.get("layouts") or {}).items():
        try:
            layouts[name] = ModuleLayout(**vars(layout))
        except LayoutError as error:
            raise LayoutError(f"layouts.{name}.{error}") from None
    cls(**(arguments | {"layouts": layouts or None}))


def _world_size(trainer: Mapping[str, Any]) -> int:
    """Number of processes that a trainer's configuration asks for.

    Raises:
        HeteroError: If it leaves the number to the machine, which need not be the one that will train.
    """
    devices = trainer["devices"]
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    elif isinstance(devices, str) and "," in devices:
        devices = [device for device in devices.split(",") if device.strip()]
    if isinstance(devices, (list, tuple)):
        devices = len(devices)
    if not isinstance(devices, int) or devices < 1:
        raise HeteroError(
            f"trainer.devices: layout needs the number of devices per node, got '{devices}'; add --trainer.devices N"
        )
    return devices * trainer["num_nodes"]


if __name__ == "__main__":
    main()

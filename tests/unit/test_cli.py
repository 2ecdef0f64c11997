"""The command line in this process: parsing, ``layout``, and errors as messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroError, HeteroStrategy, ModuleLayout
from lightning_hetero.cli import main
from lightning_hetero.models import Decoder
from lightning_hetero.monitor import FinalMetrics, StepMonitor

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_vlm.yaml"


class Model(LightningModule):
    """Says on which device it was built."""

    built_on: list[str] = []

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.vision = nn.Linear(2, width)
        self.llm = Decoder(vocab_size=16, width=width, heads=2, kv_heads=2, mlp_width=16)
        self.built_on.append(self.vision.weight.device.type)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.vision(batch).mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4, 2), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ComputesWithWeights(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.vision.weight.sum())


class ConfiguresModel(LightningModule):
    """Builds its modules late, and brings its layouts."""

    def configure_model(self) -> None:
        self.llm = nn.Linear(4, 4)

    def configure_layouts(self) -> dict[str, ModuleLayout]:
        return {"llm": ModuleLayout(shard_size=1)}


class Broken(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        raise RuntimeError("a bug of the user's")


class Refusing(HeteroStrategy):
    def __init__(self, layouts: dict[str, ModuleLayout] | None = None, level: int = 11) -> None:
        super().__init__(layouts)
        raise HeteroError(f"strategy.level={level} is too high")


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-hetero"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what the command sets is undone
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    Model.built_on = []


def write_recipe(path: Path, model: type = Model, **trainer: Any) -> str:
    strategy = {
        "class_path": "lightning_hetero.HeteroStrategy",
        "init_args": {"driver": "llm", "layouts": {"vision": {}, "llm": {"tensor_parallel_size": 2}}},
    }
    trainer = {"accelerator": "cpu", "devices": 4, "strategy": strategy, "logger": False} | trainer
    recipe = {"seed_everything": 1, "trainer": trainer, "model": {"class_path": f"{__name__}.{model.__name__}"}}
    file = path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return str(file)


def rows(text: str) -> dict[str, list[str]]:
    """Cells of all printed tables by the first cell of the row."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]
    return {row[0]: row[1:] for row in cells}


def failure(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Runs a command that must fail with one message, and returns the message."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(list(args))
    assert exit_info.value.code == 2
    messages = [line for line in capsys.readouterr().err.splitlines() if "error" in line or "Traceback" in line]
    assert len(messages) == 1
    return messages[0]


def test_layout_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["layout", "--config", str(RECIPE), "--picture", "layout.svg", "--tokens.vision", "1000"])
    text = capsys.readouterr().out
    table = rows(text)
    assert table["vision"][:3] == ["vision", "data 4 (shard 4) x tensor 1", "0-3"]
    assert table["llm *"][:3] == ["llm", "data 2 (shard 2) x tensor 2", "0-3"]
    assert "Process groups in order of creation: 0-3 | 0,2 | 1,3 | 0-1 | 2-3" in text
    assert len(table["0-3"]) == 7
    assert "not known" not in text  # the driver's tokens come from the data module
    assert (tmp_path / "layout.svg").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layout.svg"]  # no logs, no runs
    assert not torch.distributed.is_initialized()


def test_layout_of_the_recipe_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    one_rank = ["--trainer.devices", "1", "--trainer.strategy.layouts.llm.tensor_parallel_size", "1"]
    main(["layout", "--config", str(RECIPE), *one_rank])
    text = capsys.readouterr().out
    table = rows(text)
    assert [table[name][1] for name in ("vision", "llm *")] == ["data 1 x tensor 1"] * 2
    assert table["vision"][3] == table["vision"][4]
    assert "Process groups in order of creation: none" in text
    assert "activations of vision" in text  # nothing says how many tokens an image has


def test_layout_does_not_allocate_the_model(tmp_path: Path) -> None:
    main(["layout", "--config", write_recipe(tmp_path)])
    assert Model.built_on == ["meta"]


def test_layout_allocates_a_model_that_needs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["layout", "--config", write_recipe(tmp_path, ComputesWithWeights)])
    assert Model.built_on == ["meta", "cpu"]
    assert "vision" in rows(capsys.readouterr().out)


def test_layout_by_name_of_the_strategy_and_layouts_of_the_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["layout", "--config", write_recipe(tmp_path, ConfiguresModel, strategy="hetero")])
    assert rows(capsys.readouterr().out)["llm *"][1] == "data 4 (shard 1) x tensor 1"


@pytest.mark.parametrize("prefix", ["trainer.strategy.layouts", "trainer.strategy.init_args.layouts"])
def test_one_field_of_one_layout_is_overridden(tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str) -> None:
    main(["layout", "--config", write_recipe(tmp_path), f"--{prefix}.vision.shard_size=2"])
    table = rows(capsys.readouterr().out)
    assert table["vision"][1] == "data 4 (shard 2) x tensor 1"
    assert table["llm *"][1] == "data 2 (shard 2) x tensor 2"


@pytest.mark.parametrize(
    ("devices", "nodes", "ranks"), [(2, 1, "0-1"), ("2", 3, "0-5"), ([0, 1], 1, "0-1"), ("4,5", 2, "0-3")]
)
def test_world_size(tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: Any, nodes: int, ranks: str) -> None:
    main(["layout", "--config", write_recipe(tmp_path, devices=devices, num_nodes=nodes)])
    assert rows(capsys.readouterr().out)["vision"][2] == ranks


def test_precision_and_optimizer_reach_the_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, devices=2)
    memory = {}
    for name, options in (("32", []), ("64", ["--trainer.precision=64-true"]), ("sgd", ["--optimizer_states=0"])):
        main(["layout", "--config", recipe, "--trainer.strategy.layouts.llm.shard_size=1", *options])
        memory[name] = [float(cell) for cell in rows(capsys.readouterr().out)["0-1"]]
    weights, _, optimizer = memory["32"][:3]
    assert memory["64"][0] > 1.5 * weights
    assert optimizer > 0
    assert memory["sgd"][2] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["llm.tensor_parallel_size=0"], "layouts.llm.tensor_parallel_size must be a whole number from 1 up, got 0"),
        (["vision.ranks=3-1"], "layouts.vision.ranks '3-1': the range '3-1' runs backwards"),
        (["llm.tensor_parallel_size=3"], "layouts.llm: pipeline 1 x context 1 x tensor 3 = 3 does not divide"),
        (["llm.tensor_parallel_size=4"], "heads, which tensor_parallel_size 4 does not divide"),
        (["vision.module=vison"], "layouts.vision.module: Model has no submodule 'vison'; did you mean 'vision'"),
        (["vision.tensor_parallel_size=2"], "'auto' with tensor_parallel_size 2 needs a plan"),
    ],
)
@pytest.mark.parametrize("command", ["layout", "check", "fit"])
def test_an_impossible_layout_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, options: list[str], message: str
) -> None:
    overrides = [f"--trainer.strategy.layouts.{option}" for option in options]
    assert message in failure(capsys, command, "--config", write_recipe(tmp_path), *overrides)
    assert not torch.distributed.is_initialized()  # fit finds it before it starts a process


@pytest.mark.parametrize("command", ["layout", "check", "fit"])
def test_an_impossible_strategy_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    recipe = write_recipe(tmp_path, strategy={"class_path": f"{__name__}.Refusing"})
    assert failure(capsys, command, "--config", recipe).endswith("error: strategy.level=11 is too high")


def test_layout_without_a_number_of_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "layout", "--config", write_recipe(tmp_path), "--trainer.devices=auto")
    assert "trainer.devices: layout needs the number of devices per node, got 'auto'" in message


@pytest.mark.parametrize("command", ["layout", "check"])
def test_another_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    message = failure(capsys, command, "--config", write_recipe(tmp_path, strategy="ddp"))
    assert "expected 'hetero' or lightning_hetero.HeteroStrategy, got 'ddp'" in message


def test_layout_with_tokens_of_no_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "layout", "--config", write_recipe(tmp_path), "--tokens.audio=3")
    assert "no layout is called 'audio'; choose from 'vision', 'llm'" in message


@pytest.mark.parametrize("command", ["layout", "check", "fit"])
def test_other_errors_keep_their_traceback(tmp_path: Path, command: str) -> None:
    with pytest.raises(ValueError, match="a bug of the user's") as error_info:
        main([command, "--config", write_recipe(tmp_path, Broken)])
    assert isinstance(error_info.value.__cause__, RuntimeError)


def test_fit_twice_in_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = []
    fit = Trainer.fit
    monkeypatch.setattr(
        Trainer, "fit", lambda trainer, *args, **kw: (trainers.append(trainer), fit(trainer, *args, **kw))
    )
    recipe = write_recipe(
        tmp_path,
        devices=1,
        strategy="auto",
        max_epochs=1,
        default_root_dir=str(tmp_path / "run"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for rate in ("0.1", "0.2"):
        main(["fit", "--config", recipe, "--trainer.gradient_clip_val", rate])
    # The second run wrote its own configuration over that of the first.
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["gradient_clip_val"] == 0.2
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["samples_per_second"] > 0
    for trainer in trainers:
        kinds = [type(callback) for callback in trainer.callbacks]
        assert kinds.count(StepMonitor) == kinds.count(FinalMetrics) == 1


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert all(
        f"\n    {name} " in text for name in ("fit", "validate", "test", "predict", "layout", "check", "selftest")
    )

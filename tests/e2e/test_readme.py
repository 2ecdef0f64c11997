"""What the README shows and says is true: its example trains, and what it calls unsupported is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import LightningModule
from torch import nn

from lightning_hetero import HeteroStrategy, LayoutError, ModuleLayout
from lightning_hetero.parallelize.apply import plan_modules
from lightning_hetero.placement import find_layouts
from tests.e2e.process import ROOT, run

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def train(directory: Path, **changes: str) -> float:
    """Runs the example and returns its last loss.

    Args:
        directory: Where it runs.
        changes: Arguments to replace: each has to be in the example once.
    """
    script = blocks("python")[0]
    for name, value in changes.items():
        script, count = re.subn(rf"\b{name}=[^,)]+", f"{name}={value}", script)
        assert count == 1
    file = directory / "example.py"
    file.parent.mkdir(parents=True)
    file.write_text(script)
    text = run(sys.executable, file.name, cwd=directory)
    return float(re.findall(r"^train_loss=(.+)$", text, flags=re.MULTILINE)[-1])


def test_the_example_trains_alike_on_four_processes_on_one_and_under_ddp(tmp_path: Path) -> None:
    assert len(blocks("python")[0].splitlines()) <= 40
    four = train(tmp_path / "four")
    one = train(tmp_path / "one", devices="1", tensor_parallel_size="1", batch_size="64")
    ddp = train(tmp_path / "ddp", devices="2", strategy='"ddp"')
    print(f"train_loss: {four} on four processes, {one} on one, {ddp} under DDP on two")
    assert four < 0.5  # ln(16) = 2.8 before training
    # Over 56 steps of 64 samples each; the six decimals that are printed.
    assert one == pytest.approx(four, rel=1e-4)
    assert ddp == pytest.approx(four, rel=1e-4)


def test_the_quick_start_is_two_commands() -> None:
    quick_start = README.split("## Quick start")[1].split("\n## ")[0]
    fit, tests = re.findall(r"^```bash\n(.*?)^```$", quick_start, flags=re.DOTALL | re.MULTILINE)
    assert fit.endswith(".venv/bin/lightning-hetero fit --config recipes/digits_vlm.yaml\n")
    assert tests.endswith(".venv/bin/python -m pytest\n")
    assert (ROOT / "recipes" / "digits_vlm.yaml").exists()


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.llm = nn.Linear(4, 4), nn.Linear(4, 4)


def configure(setting: str) -> None:
    """Does with a setting what can be done without processes."""
    path, _, value = setting.partition("=")
    owner, _, field = path.rpartition(".")
    config = {field: yaml.safe_load(value)}
    if owner == "strategy":
        HeteroStrategy(**config)
        return
    layouts = {"vision": ModuleLayout(), "llm": ModuleLayout()}
    layouts[owner.removeprefix("layouts.")] = ModuleLayout(**config)
    plan_modules(Model(), find_layouts(Model(), layouts, None, 2))


@pytest.mark.parametrize("setting", re.findall(r"^\| `((?:layouts\.\w+|strategy)\.\w+=\w+)` \|", README, re.MULTILINE))
def test_what_is_not_supported_yet_is_refused_by_name(setting: str) -> None:
    """If this fails because it has become supported: move the row of the README to what is."""
    name = re.escape(setting.partition("=")[0])
    with pytest.raises(LayoutError, match=rf"^{name}=.+ is not supported by this version"):
        configure(setting)

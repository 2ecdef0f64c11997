"""The recipe ``digits_vlm.yaml`` as a user runs it."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.e2e.process import CLI, ROOT, run
from tests.e2e.wandb_file import read_history

RECIPE = str(ROOT / "recipes" / "digits_vlm.yaml")
RUN = Path("runs/digits_vlm")
STEPS = 100
ONE_PROCESS = (
    "--trainer.devices=1",
    "--trainer.strategy.layouts.llm.tensor_parallel_size=1",
    "--data.batch_size=64",
)


def metric(text: str, name: str) -> float:
    """The last ``name=value`` line of a command's output."""
    return [float(line.partition("=")[2]) for line in text.splitlines() if line.startswith(f"{name}=")][-1]


# ---------------------------------------------------------------------------------------------------------------------
# The same training under the recipe's layouts and on one process
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of two runs of 100 steps with the same global batches."""
    directory = tmp_path_factory.mktemp("digits")
    options = (
        f"--trainer.max_steps={STEPS}",
        "--trainer.limit_val_batches=0",
        "--trainer.log_every_n_steps=1",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        "--trainer.logger.save_dir=csv",
    )
    runs = {"four": (), "one": ONE_PROCESS}
    for name, layout in runs.items():
        # One thread in the one process too: its threads would wait for each other on a machine that has other work.
        run(*CLI, "fit", "--config", RECIPE, *layout, *options, cwd=directory / name, env={"OMP_NUM_THREADS": "1"})
    return {name: directory / name for name in runs}


def losses(directory: Path) -> dict[int, float]:
    (file,) = directory.glob("csv/*/*/metrics.csv")
    with file.open() as lines:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(lines) if row["train_loss"]}


def weights(directory: Path) -> dict[str, Tensor]:
    """The whole weights of a checkpoint that every rank wrote its part of."""
    file = directory / "whole.pt"
    dcp_to_torch_save(directory / RUN / "checkpoints" / "last.ckpt", file)
    return torch.load(file)["state_dict"]


def test_loss_is_that_of_one_process_at_every_step(trained: dict[str, Path]) -> None:
    four, one = losses(trained["four"]), losses(trained["one"])
    assert list(four) == list(one) == list(range(STEPS))
    errors = {step: abs(four[step] - one[step]) / one[step] for step in one}
    print(f"largest relative difference of the loss: {max(errors.values()):.1e}")
    assert max(errors.values()) < 1e-4, {step: error for step, error in errors.items() if error >= 1e-4}
    assert one[STEPS - 1] < 0.8 * one[0]


def test_weights_are_those_of_one_process(trained: dict[str, Path]) -> None:
    four, one = weights(trained["four"]), weights(trained["one"])
    assert four.keys() == one.keys()
    errors = {name: float((four[name] - w).norm() / w.norm()) for name, w in one.items()}
    print(f"largest relative difference of a weight: {max(errors.values()):.1e}")
    assert max(errors.values()) < 1e-3, {name: error for name, error in errors.items() if error >= 1e-3}


# ---------------------------------------------------------------------------------------------------------------------
# What a run shows and leaves
# ---------------------------------------------------------------------------------------------------------------------


def test_a_short_run_leaves_what_a_user_needs(tmp_path: Path) -> None:
    options = ("--trainer.max_steps=20", "--trainer.val_check_interval=10", "--data.val_samples=100")
    text = run(*CLI, "fit", "--config", RECIPE, *options, cwd=tmp_path)

    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "data 4 (shard 4) x tensor 1" in rows["vision"]
    assert "data 2 (shard 2) x tensor 2" in rows["llm *"]
    assert text.count("Layout on 4 ranks") == 1  # by one rank
    assert "Epoch 0:" in text and "tokens_per_second=" in text  # the progress bar

    saved = json.loads((tmp_path / RUN / "metrics.json").read_text())
    assert 0.0 <= saved["val_exact_match"] <= 1.0
    for name, value in saved.items():
        assert metric(text, name) == pytest.approx(value, rel=1e-5)

    checkpoints = tmp_path / RUN / "checkpoints"
    for checkpoint in (checkpoints / "last.ckpt", *checkpoints.glob("step=*-val_exact_match=*.ckpt")):
        assert len(list(checkpoint.glob("*.distcp"))) == 4

    (file,) = (tmp_path / RUN / "wandb").glob("offline-run-*/run-*.wandb")
    history = read_history(file)
    assert [entry["trainer/global_step"] for entry in history if "val_exact_match" in entry] == [9, 19]
    assert [entry["trainer/global_step"] for entry in history if "train_loss" in entry] == [9, 19]
    rates = {entry["trainer/global_step"]: entry["lr-AdamW"] for entry in history if "lr-AdamW" in entry}
    assert rates.keys() == {9, 19} and rates[19] == pytest.approx(2 * rates[9])  # the warm-up is linear
    assert history[-1]["val_exact_match"] == pytest.approx(saved["val_exact_match"])


def test_layout_prints_the_table_and_draws_a_picture(tmp_path: Path) -> None:
    text = run(*CLI, "layout", "--config", RECIPE, "--picture", "picture.svg", cwd=tmp_path, timeout=60.0)
    assert "Layout on 4 ranks (* driver)" in text
    assert "Memory estimate per rank" in text
    assert "Process groups in order of creation: 0-3 | 0,2 | 1,3 | 0-1 | 2-3" in text
    assert (tmp_path / "picture.svg").read_text().count("replica 1") >= 2
    assert {path.name for path in tmp_path.iterdir()} == {"picture.svg", "stdout.txt", "stderr.txt"}


# ---------------------------------------------------------------------------------------------------------------------
# The whole training
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_learns_to_read_digits_from_the_images(tmp_path: Path) -> None:
    start = time.monotonic()
    text = run(*CLI, "fit", "--config", RECIPE, cwd=tmp_path, timeout=600.0)
    seconds = time.monotonic() - start
    accuracy = metric(text, "val_exact_match")
    print(f"val_exact_match {accuracy} after {seconds:.0f} s")
    assert accuracy >= 0.95

    (checkpoint,) = (tmp_path / RUN / "checkpoints").glob("step=*-val_exact_match=*.ckpt")
    best = float(checkpoint.stem.rpartition("=")[2])
    validate = (*CLI, "validate", "--config", RECIPE, "--ckpt_path", str(checkpoint))
    again = run(*validate, cwd=tmp_path)
    assert metric(again, "val_exact_match") == pytest.approx(best, abs=5e-4)  # a name has three decimals

    # Every digit is asked about about equally often, so a model that is shown somebody else's images is right once in
    # ten times, plus the few times where the permutation of a batch leaves the image in its place.
    shuffled = run(*validate, "--model.shuffle_images_in_validation=true", cwd=tmp_path)
    chance = 1 / 10
    print(f"image questions with shuffled images: {metric(shuffled, 'val_exact_match_image')}")
    assert metric(shuffled, "val_exact_match_image") <= chance + 0.05
    assert metric(shuffled, "val_exact_match_text") == metric(again, "val_exact_match_text")
    assert seconds < 360.0  # on two cores that have nothing else to do

"""StepMonitor and FinalMetrics in one process."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import monitor
from lightning_hetero.monitor import (
    FinalMetrics,
    StepMonitor,
    count_samples,
    count_tokens,
    data_parallel_replicas,
    peak_memory_bytes,
)


class Clock:
    """A clock that stands still unless it is moved."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = Clock()
KEYS = {"tokens_per_second", "samples_per_second", "data_wait_seconds", "peak_memory_mb"}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "perf_counter", CLOCK)


class Samples(Dataset):
    """Samples of three tokens, one of which is not to be predicted."""

    def __init__(self, size: int = 24, delay: float = 0.0, labels: bool = True) -> None:
        self.size = size
        self.delay = delay
        self.labels = labels

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        CLOCK.seconds += self.delay
        sample = {"x": torch.ones(2)}
        return sample | {"labels": torch.tensor([1, -100, 2])} if self.labels else sample


class Model(LightningModule):
    def __init__(self, train_delay: float = 0.0, val_delay: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.train_delay = train_delay
        self.val_delay = val_delay

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        CLOCK.seconds += self.train_delay
        loss = self.layer(batch["x"]).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        CLOCK.seconds += self.val_delay
        self.log("val_loss", self.layer(batch["x"]).mean())

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch["x"]).mean())

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch["x"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(root: Path, callbacks: list[Callback], **kwargs: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": root,
        "logger": CSVLogger(root),
        "max_epochs": 1,
        "log_every_n_steps": 2,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(callbacks=callbacks, **(defaults | kwargs))


def loader(batch_size: int = 4, **kwargs: Any) -> DataLoader:
    return DataLoader(Samples(**kwargs), batch_size=batch_size)


def logged_rows(trainer: Trainer) -> list[dict[str, float]]:
    """Rows of the CSV log that StepMonitor wrote."""
    trainer.logger.save()
    with open(Path(trainer.log_dir) / "metrics.csv") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "samples_per_second" in row]


def test_logs_the_first_step_and_every_nth(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [StepMonitor()])
    trainer.fit(Model(), loader())
    rows = logged_rows(trainer)
    assert [row["step"] for row in rows] == [0, 1, 3, 5]
    assert all(set(row) >= KEYS for row in rows)
    assert set(trainer.callback_metrics) >= KEYS
    assert "tokens_per_second" in trainer.progress_bar_metrics
    assert not (KEYS - {"tokens_per_second"}) & set(trainer.progress_bar_metrics)


def test_rates_follow_from_the_time_of_the_steps(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [StepMonitor()])
    trainer.fit(Model(train_delay=0.1), loader())
    # Four samples a step, with two tokens that count.
    assert [row["samples_per_second"] for row in logged_rows(trainer)] == pytest.approx([40.0] * 4)
    assert [row["tokens_per_second"] for row in logged_rows(trainer)] == pytest.approx([80.0] * 4)


def test_data_wait_is_the_time_of_the_training_loader(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [StepMonitor()], val_check_interval=2)
    trainer.fit(Model(train_delay=0.05), loader(delay=0.01), loader(size=8, delay=0.05))
    # Batches of four samples, 0.01 s each, since the last row; not the steps, not the validation loader.
    waits = [row["data_wait_seconds"] for row in logged_rows(trainer)]
    assert waits == pytest.approx([0.04, 0.04, 0.08, 0.08])
    assert logged_rows(trainer)[-1]["samples_per_second"] == pytest.approx(8 / (0.08 + 0.1))


def test_rates_leave_out_validation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [StepMonitor()], val_check_interval=1)
    trainer.fit(Model(train_delay=0.1, val_delay=5.0), loader(), loader(size=8))
    assert [row["samples_per_second"] for row in logged_rows(trainer)] == pytest.approx([40.0] * 4)


class SlowSave(Callback):
    """Saves a checkpoint after each batch, slowly."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "last.ckpt")

    def on_save_checkpoint(self, *args: Any) -> None:
        CLOCK.seconds += 5.0


def test_rates_leave_out_the_writing_of_checkpoints(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [SlowSave(), StepMonitor()])
    trainer.fit(Model(train_delay=0.1), loader())
    assert [row["samples_per_second"] for row in logged_rows(trainer)] == pytest.approx([40.0] * 4)


def test_all_batches_of_an_accumulated_step_count(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [StepMonitor()], accumulate_grad_batches=3, log_every_n_steps=1)
    trainer.fit(Model(train_delay=0.1), loader())
    rows = logged_rows(trainer)
    assert [row["step"] for row in rows] == [0, 1]
    assert [row["samples_per_second"] for row in rows] == pytest.approx([40.0] * 2)


def test_a_standin_batch_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "is_standin", lambda trainer: True)
    trainer = make_trainer(tmp_path, [StepMonitor()])
    trainer.fit(Model(), loader())
    assert all(row["samples_per_second"] == 0 for row in logged_rows(trainer))


def test_rates_count_all_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "data_parallel_replicas", lambda trainer: 10)
    trainer = make_trainer(tmp_path, [StepMonitor()])
    trainer.fit(Model(train_delay=0.1), loader())
    assert logged_rows(trainer)[-1]["samples_per_second"] == pytest.approx(400.0)


def test_replicas_are_those_of_the_sampler() -> None:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 3, "rank": 1})
    assert data_parallel_replicas(SimpleNamespace(strategy=strategy)) == 3
    assert data_parallel_replicas(SimpleNamespace(strategy=object())) == 1


def test_without_tokens_there_is_no_token_rate(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [StepMonitor()])
    trainer.fit(Model(), loader(labels=False))
    rows = logged_rows(trainer)
    assert rows
    assert not any("tokens_per_second" in row for row in rows)
    assert "samples_per_second" in trainer.progress_bar_metrics


def test_the_users_profiler_goes_on_and_comes_back(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    trainer = make_trainer(tmp_path, [StepMonitor()], profiler=profiler)
    trainer.fit(Model(), loader())
    assert trainer.profiler is profiler
    assert len(profiler.recorded_durations["run_training_batch"]) == 6


def test_the_profiler_comes_back_after_an_error(tmp_path: Path) -> None:
    class Failing(Model):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            raise RuntimeError("no")

    profiler = SimpleProfiler()
    trainer = make_trainer(tmp_path, [StepMonitor()], profiler=profiler)
    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(Failing(), loader())
    assert trainer.profiler is profiler


def test_count_tokens() -> None:
    labels, input_ids = torch.tensor([[1, -100], [-100, 2]]), torch.zeros(2, 5)
    plain = SimpleNamespace()
    counting = SimpleNamespace(count_tokens=lambda batch: 7)
    assert count_tokens(counting, {"labels": labels}) == 7
    assert count_tokens(plain, {"labels": labels, "input_ids": input_ids}) == 2
    assert count_tokens(plain, {"input_ids": input_ids}) == 10
    assert count_tokens(plain, {"labels": torch.tensor([0, 1]), "image": torch.zeros(2, 3)}) is None  # classes
    assert count_tokens(plain, [input_ids]) is None


def test_count_samples() -> None:
    images, input_ids = torch.zeros(5, 3), torch.zeros(2, 4)
    assert count_samples({"images": images, "input_ids": input_ids}) == 2
    assert count_samples({"images": images, "labels": input_ids}) == 2
    assert count_samples({"nested": [{"name": "a"}, images]}) == 5
    assert count_samples((images, input_ids)) == 5
    assert count_samples(torch.tensor(1.0)) == 1
    assert count_samples({"text": ["a", "b"]}) == 0


def test_peak_memory_of_the_process_is_in_bytes() -> None:
    assert 50e6 < peak_memory_bytes(torch.device("cpu")) < 100e9


def test_final_metrics_of_fit_are_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, [StepMonitor(), FinalMetrics()])
    trainer.fit(Model(), loader(), loader(size=8))
    path = Path(trainer.log_dir) / "metrics.json"
    saved = json.loads(path.read_text())
    assert saved == {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {"train_loss", "val_loss", *KEYS} <= set(saved)
    lines = capsys.readouterr().out.splitlines()
    assert f"val_loss={saved['val_loss']:.6g}" in lines
    assert lines[-1] == f"metrics saved to {path}"
    assert sum("=" in line for line in lines) == len(saved)


@pytest.mark.parametrize(("verb", "metric"), [("validate", "val_loss"), ("test", "test_loss")])
def test_final_metrics_of_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, metric: str
) -> None:
    trainer = make_trainer(tmp_path, [FinalMetrics()], logger=False)
    getattr(trainer, verb)(Model(), loader(), verbose=False)
    saved = json.loads((tmp_path / "metrics.json").read_text())
    assert list(saved) == [metric]
    assert capsys.readouterr().out.splitlines()[0] == f"{metric}={saved[metric]:.6g}"


def test_final_metrics_leaves_predict_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [FinalMetrics()], logger=False)
    trainer.predict(Model(), loader())
    assert not (tmp_path / "metrics.json").exists()


def test_final_metrics_only_on_rank_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, [], logger=False)
    monkeypatch.setattr(type(trainer.strategy), "is_global_zero", property(lambda strategy: False))
    FinalMetrics().teardown(trainer, Model(), "fit")
    assert not capsys.readouterr().out
    assert not (tmp_path / "metrics.json").exists()

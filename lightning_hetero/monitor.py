"""Callbacks that say how fast training goes and how it ended."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from torch import Tensor

from lightning_hetero.standin import is_standin

IGNORE_INDEX = -100
"""Label of a token that is not to be predicted."""

_FETCH = "[_TrainingEpochLoop].train_dataloader_next"
_SAVE = "save_checkpoint"


class StepMonitor(Callback):
    """Logs throughput, the wait for data and peak memory, after the first step and every ``log_every_n_steps``.

    - ``tokens_per_second``: of the LightningModule's ``count_tokens(batch)``; without it, labels that are not -100;
      without labels, all of ``input_ids``. Not logged if the first batch has none of these.
    - ``samples_per_second``.
    - ``data_wait_seconds``: time that the training loop waited for its loader since this was last logged.
    - ``peak_memory_mb``: the most memory so far, in 10^6 bytes: allocated on the CUDA device, else resident in the
      process.

    Rates are those since they were last logged, without validation and the writing of checkpoints. A rank counts what
    its own replica's batches hold and multiplies by the number of replicas, so no rank waits for another, and ranks may
    log slightly different values (never different names) where batches are ragged. Loggers take rank 0's.
    """

    def __init__(self) -> None:
        self._stopwatch: _Stopwatch | None = None
        self._step = 0
        self._logged_once = False
        self._counts_tokens: bool | None = None
        self._validation_start = 0.0
        self._open_window()

    def _open_window(self) -> None:
        self._start = perf_counter()
        self._paused = 0.0
        self._samples = 0
        self._tokens: int | Tensor = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The profiler is the one public place that sees when the loop waits for its loader.
        self._stopwatch = _Stopwatch(trainer.profiler)  # type: ignore[attr-defined]
        trainer.profiler = self._stopwatch  # type: ignore[attr-defined]
        self._step = trainer.global_step
        self._logged_once = False
        self._counts_tokens = None
        self._open_window()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_stopwatch(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_stopwatch(trainer)

    def _remove_stopwatch(self, trainer: Trainer) -> None:
        if self._stopwatch is not None:
            trainer.profiler = self._stopwatch.inner  # type: ignore[attr-defined]
        self._stopwatch = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_start = perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused += perf_counter() - self._validation_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_standin(trainer):
            self._count(pl_module, batch)
        step: int = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step == self._step:  # gradients are still being accumulated
            return
        due = not self._logged_once or (every > 0 and step // every > self._step // every)
        self._step = step
        if not due:
            return
        main = "tokens_per_second" if self._counts_tokens else "samples_per_second"
        metrics = self._measure(trainer, pl_module)
        for name, value in metrics.items():
            pl_module.log(name, value, prog_bar=name == main, on_step=True, on_epoch=False, batch_size=1)
        if not self._logged_once and every > 0 and step % every:
            # Lightning would pass these on to the progress bar, but not to loggers, before log_every_n_steps.
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step - 1)
        self._logged_once = True
        self._open_window()

    def _count(self, pl_module: LightningModule, batch: Any) -> None:
        tokens = count_tokens(pl_module, batch)
        if self._counts_tokens is None:
            self._counts_tokens = tokens is not None
        # A tensor stays one until it is logged: no device synchronisation in each step.
        self._tokens = self._tokens + (0 if tokens is None else tokens)
        self._samples += count_samples(batch)

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        assert self._stopwatch is not None
        waited, saving = self._stopwatch.lap(_FETCH), self._stopwatch.lap(_SAVE)
        seconds = max(perf_counter() - self._start - self._paused - saving, 1e-9)
        replicas = data_parallel_replicas(trainer)
        metrics = {"tokens_per_second": float(self._tokens) * replicas / seconds} if self._counts_tokens else {}
        return metrics | {
            "samples_per_second": self._samples * replicas / seconds,
            "data_wait_seconds": waited,
            "peak_memory_mb": peak_memory_bytes(pl_module.device) / 1e6,
        }


class FinalMetrics(Callback):
    """At the end of fit, validate and test, prints the metrics as ``name=value`` lines and saves them.

    The metrics are ``trainer.callback_metrics``; after fit they include those of the last validation. They go to
    ``metrics.json`` in ``trainer.log_dir``: a TensorBoard or CSV logger's version directory, another logger's
    ``save_dir``, without a logger the trainer's ``default_root_dir``.
    """

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "predict":
            return
        directory = trainer.log_dir or trainer.default_root_dir  # all ranks take part in finding it
        if not trainer.is_global_zero:
            return
        metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        filesystem = get_filesystem(directory)
        filesystem.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "metrics.json")
        with filesystem.open(path, "w") as file:
            json.dump(metrics, file, indent=2)
        for name, value in metrics.items():
            print(f"{name}={value:.6g}")
        print(f"metrics saved to {path}", flush=True)


class _Stopwatch(Profiler):
    """Passes everything on to another profiler, and adds up how long some actions took.

    Args:
        inner: The profiler that it stands in for.
    """

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self._began: dict[str, float] = {}
        self._seconds = {_FETCH: 0.0, _SAVE: 0.0}

    def lap(self, action_name: str) -> float:
        """Seconds that an action took since the last time this was asked."""
        seconds, self._seconds[action_name] = self._seconds[action_name], 0.0
        return seconds

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        if action_name in self._seconds:
            self._began[action_name] = perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name in self._began:
            self._seconds[action_name] += perf_counter() - self._began.pop(action_name)
        self.inner.stop(action_name)

    def summary(self) -> str:
        return self.inner.summary()

    def describe(self) -> None:
        self.inner.describe()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        self.inner.teardown(stage)


def count_tokens(module: LightningModule, batch: Any) -> int | Tensor | None:
    """Number of tokens in a batch, possibly on the device, or ``None`` if it cannot be told.

    Args:
        module: Its ``count_tokens(batch)`` decides, where it has one.
        batch: Otherwise labels of at least two dims that are not -100 count, or else all of ``input_ids``.
    """
    hook = getattr(module, "count_tokens", None)
    if callable(hook):
        return hook(batch)
    if isinstance(batch, Mapping):
        labels, input_ids = batch.get("labels"), batch.get("input_ids")
        if isinstance(labels, Tensor) and labels.dim() > 1:
            return (labels.detach() != IGNORE_INDEX).sum()
        if isinstance(input_ids, Tensor):
            return input_ids.numel()
    return None


def count_samples(batch: Any) -> int:
    """Number of samples in a batch: dim 0 of ``labels`` or ``input_ids``, else of the first tensor; 0 without any."""
    if isinstance(batch, Mapping):
        for name in ("labels", "input_ids"):
            if isinstance(batch.get(name), Tensor):
                return _length(batch[name])
    tensor = _first_tensor(batch)
    return 0 if tensor is None else _length(tensor)


def _length(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _first_tensor(data: Any) -> Tensor | None:
    if isinstance(data, Tensor):
        return data
    children = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return next((tensor for child in children if (tensor := _first_tensor(child)) is not None), None)


def data_parallel_replicas(trainer: Trainer) -> int:
    """Number of replicas that get different data, under any strategy."""
    return getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory so far: allocated by PyTorch on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

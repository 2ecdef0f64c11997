"""Stand-in batches: what a replica runs when the last global batch holds no sample for it.

It has to run something, since the others' collectives wait for it; the result must not count.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetero.data import replica_batch_sampler
from lightning_hetero.uneven import AgreedLoader

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def is_standin(trainer: Trainer) -> bool:
    """Whether the batch that the trainer's loop is at holds no sample of this replica's own."""
    if trainer.training:
        loop: Any = trainer.fit_loop
        combined, batch = loop._combined_loader, loop.epoch_loop.batch_progress.current.ready - 1
    else:
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        combined, batch = loop._combined_loader, loop.batch_progress.current.ready - 1
    loaders = combined.flattened if combined is not None else []
    if len(loaders) > 1:
        if combined._mode != "sequential":
            return False
        for loader, batches in zip(loaders, loop.max_batches, strict=True):
            if batch < batches:
                loaders = [loader]
                break
            batch -= int(batches)
    if not loaders:
        return False
    source = loaders[0] if isinstance(loaders[0], AgreedLoader) else replica_batch_sampler(loaders[0])
    return source is not None and source.num_real(batch) == 0


@contextmanager
def leave_no_trace(module: nn.Module, results: Any) -> Generator[None, None, None]:
    """Undoes what a step does to metric states and logged values.

    Keys that were logged for the first time stay, with weight zero: all ranks must log the same keys.

    Args:
        module: The LightningModule with its metrics.
        results: The loop's result collection, or ``None``.
    """
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    states = [(metric._copy_state_dict(), metric._update_count, metric._computed) for metric in metrics]
    logged = {key: dict(result.__dict__) for key, result in (results or {}).items()}
    try:
        yield
    finally:
        for metric, (state, count, computed) in zip(metrics, states, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed
        for key, result in (results or {}).items():
            if not result.is_tensor:
                continue
            for name in ("value", "cumulated_batch_size"):
                if hasattr(result, name):
                    default = result._defaults[name].to(result.value.device)
                    setattr(result, name, logged[key][name] if key in logged else default.clone())


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned: a tensor, or a mapping with one."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def with_loss(output: Any, loss: Tensor | None) -> Any:
    """The step's output with another loss."""
    if loss is None:
        return output
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


def weightless(output: Any) -> Any:
    """A step's output with a loss of zero that still has its graph, so that the backward's collectives run."""
    loss = loss_of(output)
    return with_loss(output, None if loss is None else torch.nan_to_num(loss) * 0.0)

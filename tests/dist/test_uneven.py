"""Replicas with different numbers of batches, and ranks of one replica with different data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import HeteroError, HeteroStrategy
from tests.dist.test_strategy import Probe, mixed
from tests.harness import Pool
from tests.harness.parity import SILENT


class Stream(IterableDataset):
    """As many samples as this rank's replica has: replica ``r`` counts from ``100 * r``."""

    def __init__(self, lengths: list[int], tensor: int) -> None:
        self.replica = int(os.environ["RANK"]) // tensor
        self.length = lengths[self.replica]

    def __iter__(self) -> Iterator[Tensor]:
        for k in range(self.length):
            yield torch.tensor([100.0 * self.replica + k])


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


def _run(lengths: list[int], tensor: int, sized: bool) -> dict[str, Any]:
    world = int(os.environ["WORLD_SIZE"])
    module = Probe()
    dataset = (SizedStream if sized else Stream)(lengths, tensor)
    trainer = Trainer(strategy=HeteroStrategy(mixed(world, tensor)), devices=world, max_epochs=2, **SILENT)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(dataset, batch_size=2))
    trainer.validate(module, DataLoader(dataset, batch_size=2), verbose=False)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(module, DataLoader(dataset, batch_size=2))
    return {"seen": module.seen, "logged": logged, "predictions": predictions}


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(("lengths", "tensor"), [([5, 2], 2), ([2, 7], 1), ([0, 3], 1), ([4, 4], 1)])
def test_fit_stops_together_and_evaluation_drains(pool: Pool, lengths: list[int], tensor: int, sized: bool) -> None:
    if sized and 0 in lengths:
        return  # Lightning itself refuses a loader of length zero on some ranks
    ranks = pool.run(_run, len(lengths) * tensor, lengths, tensor, sized)
    batches = [-(-n // 2) for n in lengths]
    everything = [100.0 * r + k for r, n in enumerate(lengths) for k in range(n)]
    for rank, result in enumerate(ranks):
        r = rank // tensor
        own = [[100.0 * r + k for k in range(i, min(i + 2, lengths[r]))] for i in range(0, lengths[r], 2)]
        assert result["seen"]["train"] == own[: min(batches)] * 2, "with the shortest, in each epoch"
        assert result["seen"]["val"][: len(own)] == own
        assert len(result["seen"]["val"]) == max(batches), "until the longest has ended"
        logged = result["logged"]
        assert logged["metric_sum"] == pytest.approx(sum(everything)), "every sample once"
        assert logged["metric_mean"] == pytest.approx(sum(everything) / len(everything))
        assert logged["logged_mean"] == pytest.approx(sum(everything) / len(everything))
        assert logged["logged_sum"] == pytest.approx(sum(everything))
    predicted = [x for result in ranks[::tensor] for batch in result["predictions"] if batch is not None for x in batch]
    assert sorted(predicted) == everything


def _different(copy: bool) -> str | None:
    rank = int(os.environ["RANK"])
    data = torch.arange(8.0).view(8, 1) + (rank if copy else rank // 2)
    trainer = Trainer(
        strategy=HeteroStrategy(mixed(4, 2)), devices=4, max_steps=1, use_distributed_sampler=False, **SILENT
    )  # type: ignore[arg-type]
    try:
        trainer.fit(Probe(), DataLoader(data, batch_size=2))
    except HeteroError as error:
        return str(error)
    return None


def test_copies_of_a_replica_must_see_the_same_batch(pool: Pool) -> None:
    for message in pool.run(_different, 4, True):
        assert message is not None
        assert "driver replica 0 (0, 1) got different batches" in message
        assert "trainer.strategy.loader_rank of trainer.strategy.loader_world_size" in message
    assert pool.run(_different, 4, False) == [None] * 4, "replicas may differ"

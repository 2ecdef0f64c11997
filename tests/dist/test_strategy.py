"""What the strategy gives a user: meshes, groups, shares of the data, logged values, whatever the layouts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_hetero import HeteroStrategy, ModuleLayout, token_mean
from lightning_hetero.layout import MESH_AXES, process_groups, resolve_layouts
from tests.dist import vlm
from tests.harness import Pool
from tests.harness.parity import SILENT, relative_error, whole

MIXED = {"vision": ModuleLayout(), "llm": ModuleLayout(tensor_parallel_size=2)}


class Probe(LightningModule):
    """A linear encoder and driver that keep what their steps saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.llm = nn.Linear(1, 4), nn.Linear(4, 1)
        self.seen: dict[str, list[list[float]]] = {"train": [], "val": []}
        self.mean, self.total = MeanMetric(), SumMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen["train"].append(batch.flatten().tolist())
        return token_mean(self, self.llm(self.vision(batch)).sum(), len(batch))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen["val"].append(batch.flatten().tolist())
        self.vision(batch)
        self.mean.update(batch)
        self.total.update(batch)
        self.log("metric_mean", self.mean)
        self.log("metric_sum", self.total)
        self.log("logged_mean", batch.mean(), sync_dist=True, batch_size=len(batch))
        self.log("logged_sum", batch.sum(), reduce_fx="sum", sync_dist=True)
        self.log("logged_max", batch.max(), reduce_fx="max", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("hook_sum", torch.ones(()), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[float]:
        self.vision(batch)
        return batch.flatten().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def mixed(world: int, tensor: int) -> dict[str, ModuleLayout]:
    return {
        "vision": ModuleLayout(),
        "llm": ModuleLayout(tensor_parallel_size=tensor, tensor_parallel_plan={"": "replicate"}),
    }


def _loop(samples: int, tensor: int, shuffle: bool) -> dict[str, Any]:
    world = dist_world()
    module = Probe()
    data = torch.arange(1.0, samples + 1).view(-1, 1)
    strategy = HeteroStrategy(mixed(world, tensor))
    trainer = Trainer(strategy=strategy, devices=world, max_epochs=1, **SILENT)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=2, shuffle=shuffle)
    trainer.fit(module, loader, DataLoader(data, batch_size=2))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(module, DataLoader(data, batch_size=2))
    return {
        "replica": strategy.loader_rank,
        "seen": module.seen,
        "predictions": predictions,
        "logged": logged,
    }


def dist_world() -> int:
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize(("world", "tensor", "samples"), [(4, 2, 9), (4, 2, 10), (4, 1, 9), (4, 1, 3), (4, 4, 5)])
def test_every_sample_counts_once(pool: Pool, world: int, tensor: int, samples: int) -> None:
    ranks = pool.run(_loop, world, samples, tensor, True)
    replicas = world // tensor
    everything = [float(i) for i in range(1, samples + 1)]
    for stage in ("train", "val"):
        by_replica = [r["seen"][stage] for r in ranks[::tensor]]
        for rank in ranks:
            assert rank["seen"][stage] == by_replica[rank["replica"]], "copies see the same batches"
        batches = {len(b) for b in by_replica}
        assert batches == {-(-samples // (2 * replicas))}, "every replica runs the same number of steps"
        seen = [x for replica in by_replica for batch in replica for x in batch]
        spare = len(seen) - samples
        assert set(seen) == set(everything)
        # Replicas that the last global batch has nothing for run one sample again, which does not count (below).
        assert spare == max(0, replicas - (samples % (2 * replicas) or 2 * replicas))
    for rank in ranks:
        metrics = rank["logged"]
        assert metrics["metric_mean"] == pytest.approx(sum(everything) / samples)
        assert metrics["metric_sum"] == pytest.approx(sum(everything)), "not once for each tensor-parallel copy"
        assert metrics["logged_sum"] == pytest.approx(sum(everything))
        assert metrics["logged_mean"] == pytest.approx(sum(everything) / samples)
        assert metrics["logged_max"] == samples
        assert metrics["hook_sum"] == replicas
        predicted = [
            x for other in ranks[::tensor] for batch in other["predictions"] if batch is not None for x in batch
        ]
        assert sorted(predicted) == everything


def _groups() -> dict[str, Any]:
    strategy = HeteroStrategy(MIXED)
    trainer = Trainer(strategy=strategy, devices=4, max_steps=1, **SILENT)  # type: ignore[arg-type]
    module = vlm.build()
    trainer.fit(module, DataLoader(vlm.samples(4), batch_size=2, collate_fn=vlm.collate))
    llm = strategy.meshes["llm"]
    one = torch.ones(())
    dist.all_reduce(one, group=strategy.meshes["vision"]["tensor_parallel"].get_group())
    two = torch.ones(())
    dist.all_reduce(two, group=module.device_mesh["tensor_parallel"].get_group())
    backends = {
        tuple(dist.get_process_group_ranks(g)): dist.get_backend(g) for g in dist.distributed_c10d._world.pg_map
    }
    return {
        "names": llm.mesh_dim_names,
        "shape": tuple(llm.shape),
        "coordinate": llm.get_coordinate(),
        "data": (llm["data_parallel"].size(), llm["data_parallel"].get_local_rank()),
        "device_mesh": module.device_mesh is llm,
        "sums": (float(one), float(two)),
        "groups": sorted(ranks for ranks, backend in backends.items() if backend != "fake"),
        "fake": [ranks for ranks, backend in backends.items() if backend == "fake"],
    }


def test_meshes_and_process_groups(pool: Pool) -> None:
    layouts = resolve_layouts(MIXED, None, 4)
    for rank, found in enumerate(pool.run(_groups, 4)):
        assert found["names"] == MESH_AXES
        assert found["shape"] == (1, 1, 2, 1, 2)
        assert tuple(found["coordinate"]) == layouts.driver.coordinate(rank)
        assert found["data"] == (2, layouts.driver.replica_of(rank))
        assert found["device_mesh"]
        assert found["sums"] == (1.0, 2.0), "an axis of one rank has collectives too: they do nothing"
        # Exactly the planned sets, each once, and no communicator for a single rank.
        assert found["groups"] == sorted(ranks for ranks in process_groups(layouts) if rank in ranks)
        assert found["fake"] == [(rank,)]


def _from_hook() -> dict[str, tuple[int, ...]]:
    class Hooked(Probe):
        def configure_layouts(self) -> dict[str, ModuleLayout]:
            return mixed(2, 2)

    found = {}
    for name, strategy in (("hook", "hetero"), ("argument", HeteroStrategy(mixed(2, 1)))):
        trainer = Trainer(strategy=strategy, devices=2, max_steps=1, **SILENT)  # type: ignore[arg-type]
        trainer.fit(Hooked(), DataLoader(torch.ones(4, 1), batch_size=2))
        found[name] = trainer.strategy.layouts.driver.sizes  # type: ignore[union-attr]
    trainer = Trainer(strategy="hetero", devices=2, max_steps=1, **SILENT)  # type: ignore[arg-type]
    module = Probe()
    trainer.fit(module, DataLoader(torch.ones(4, 1), batch_size=2))
    found["default"] = trainer.strategy.layouts.driver.sizes  # type: ignore[union-attr]
    found["sharded"] = tuple(module.vision.weight.to_local().shape)  # type: ignore[operator]
    return found


def test_layouts_come_from_the_constructor_then_the_hook_then_the_default(pool: Pool) -> None:
    for found in pool.run(_from_hook, 2):
        assert found["hook"] == (1, 1, 1, 1, 2)
        assert found["argument"] == (1, 1, 2, 1, 1), "the constructor comes first"
        assert found["default"] == (1, 1, 2, 1, 1)
        assert found["sharded"] == (2, 1), "without layouts every module is sharded over all ranks"


class Late(Probe):
    """Builds its modules in configure_model, where the meshes are there already."""

    def __init__(self) -> None:
        super().__init__()
        del self.vision, self.llm

    def configure_model(self) -> None:
        if not hasattr(self, "vision"):
            assert self.device_mesh["tensor_parallel"].size() == 2
            self.vision, self.llm = nn.Linear(1, 4), nn.Linear(4, 1)


def _late() -> list[str]:
    module = Late()
    trainer = Trainer(strategy=HeteroStrategy(mixed(4, 2)), devices=4, max_steps=1, **SILENT)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(torch.ones(4, 1), batch_size=2))
    return [type(p).__name__ for p in module.vision.parameters()]


def test_modules_that_are_built_in_configure_model(pool: Pool) -> None:
    assert pool.run(_late, 4) == [["DTensor", "DTensor"]] * 4


class Projected(LightningModule):
    """A projector and head outside every placed module, and weights from a different seed on every rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.vision, self.projector = nn.Linear(3, 4), nn.Linear(4, 4)
        self.llm, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2)
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.projector(self.vision(batch)))
        return self.head(self.llm(hidden)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _outside(data: Tensor) -> dict[str, Any]:
    module = Projected(seed=dist_world() + int(os.environ["RANK"]))
    layouts = {
        "vision": ModuleLayout(shard_size=1),
        "llm": ModuleLayout(tensor_parallel_size=2, tensor_parallel_plan={"": "colwise_rep"}),
    }
    kept: dict[str, Any] = {}
    trainer = Trainer(strategy=HeteroStrategy(layouts), devices=4, max_steps=1, **SILENT)  # type: ignore[arg-type]
    original = module.on_before_optimizer_step

    def keep(optimizer: Any) -> None:
        kept["weights"] = {name: whole(p) for name, p in module.named_parameters()}
        kept["gradients"] = {name: whole(p.grad) for name, p in module.named_parameters()}
        original(optimizer)

    module.on_before_optimizer_step = keep  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(data, batch_size=4))
    kept["after"] = {name: whole(p) for name, p in module.named_parameters()}
    return kept


def test_parameters_outside_every_module_follow_the_driver(pool: Pool) -> None:
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ranks = pool.run(_outside, 4, data)
    one = Projected(0)
    one.load_state_dict(ranks[0]["weights"])
    one.training_step(data, 0).backward()
    for rank in ranks:
        for name, parameter in one.named_parameters():
            assert torch.equal(rank["weights"][name], ranks[0]["weights"][name]), "equal initial weights, unseeded"
            assert relative_error(rank["gradients"][name], parameter.grad) < 1e-10, name
            assert torch.equal(rank["after"][name], ranks[0]["after"][name]), "no drift between ranks"
        assert rank["gradients"]["unused.weight"] is None, "what nobody used has no gradient, so AdamW leaves it alone"

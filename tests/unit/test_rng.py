"""Random streams: who draws the same, who does not, and that they continue from what was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from lightning_hetero.layout import Layouts, ModuleLayout, resolve_layouts
from lightning_hetero.parallelize.streams import output_is_sharded, switch_streams
from lightning_hetero.rng import ModuleStreams, RandomStreams, merge_states, stream_key, stream_seed

CPU = torch.device("cpu")
gpu = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def layouts(world: int = 8, **llm: object) -> Layouts:
    llm = llm or {"tensor_parallel_size": 2}
    return resolve_layouts({"vision": ModuleLayout(), "llm": ModuleLayout(**llm)}, "llm", world)  # type: ignore[arg-type]


def streams(rank: int = 0, seed: int = 7, **llm: object) -> RandomStreams:
    return RandomStreams(layouts(**llm), rank, seed, CPU)


def draw(device: str = "cpu") -> Tensor:
    return torch.rand(4, device=device)


def drawn_in(module: ModuleStreams, sharded: bool = False) -> Tensor:
    with module.running():
        module.use(sharded=sharded)
        return draw()


def same(values: list[Tensor]) -> list[int]:
    """Index of the first value that each equals."""
    return [next(i for i, other in enumerate(values) if torch.equal(value, other)) for value in values]


def test_a_seed_is_a_pure_function() -> None:
    """A constant: another value would give resumed runs other masks."""
    assert stream_seed(7, "llm/stage 0/replica 1/context 0/shared") == 1800419346453239338
    key = stream_key(layouts().by_name["llm"], 3, sharded=True)
    assert key == "llm/stage 0/replica 1/context 0/tensor 1"
    seeds = {stream_seed(seed, f"{key}{i}", calls) for seed in range(5) for i in range(5) for calls in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_who_draws_the_same() -> None:
    of_ranks = [streams(rank) for rank in range(8)]
    assert same([drawn_in(s["llm"]) for s in of_ranks]) == [0, 0, 2, 2, 4, 4, 6, 6], "tensor copies agree"
    assert same([drawn_in(s["llm"], sharded=True) for s in of_ranks]) == list(range(8)), "shards differ"
    assert same([drawn_in(s["vision"]) for s in of_ranks]) == list(range(8)), "replicas differ"
    assert not torch.equal(drawn_in(streams()["llm"]), drawn_in(streams()["vision"])), "modules differ"
    assert not torch.equal(drawn_in(streams(seed=7)["llm"]), drawn_in(streams(seed=8)["llm"])), "runs differ"


def test_ranks_that_hold_other_tokens_or_layers_differ() -> None:
    sizes = {"context_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    assert same([drawn_in(streams(rank, **sizes)["llm"]) for rank in range(8)]) == [0, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_streams_are_isolated(device: str) -> None:
    """What runs between two calls of a module does not change its draws, nor do they change those outside of it."""

    def run(other: Callable[[], object]) -> list[Tensor]:
        module = ModuleStreams(1, 2, torch.device(device))
        torch.manual_seed(5)
        values = []
        for _ in range(2):
            with module.running():
                values += [draw(), draw(device)]
                module.use(sharded=True)
                values.append(draw(device))
            other()
        return values

    noisy = ModuleStreams(3, 4, torch.device(device))

    def use_another_module() -> None:
        with noisy.running():
            draw(device)

    quiet = run(lambda: None)
    outside = draw(device)
    assert all(map(torch.equal, quiet, run(use_another_module)))
    assert torch.equal(outside, draw(device))
    assert all(map(torch.equal, quiet, run(lambda: draw(device))))
    assert len({tuple(value.tolist()) for value in quiet}) == len(quiet)


def test_a_call_inside_a_call_returns_to_the_outer_stream() -> None:
    def run(inner: bool) -> list[Tensor]:
        of_rank = streams()
        with of_rank["llm"].running():
            values = [draw()]
            if inner:
                with of_rank["vision"].running():
                    draw()
            with of_rank["llm"].running():  # the driver's own call inside its step
                values.append(draw())
        return values

    assert all(map(torch.equal, run(False), run(True)))


def test_a_failed_call_leaves_nothing_behind() -> None:
    module = ModuleStreams(1, 2, CPU)
    torch.manual_seed(5)
    expected = draw()
    torch.manual_seed(5)

    def fail() -> None:
        with module.running():
            module.use(sharded=True)
            draw()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(draw(), expected)
    assert torch.equal(drawn_in(module), drawn_in(ModuleStreams(1, 2, CPU))), "the shared stream drew nothing"


def test_host_decisions_stay_shared_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the device's generator has a sharded stream there: a layer is skipped by all tensor copies or by none."""
    generator = torch.Generator()
    accelerator = SimpleNamespace(init=lambda: None, default_generators=(generator,))
    monkeypatch.setattr(torch, "get_device_module", lambda device: accelerator)
    on_host, on_device = [], []
    for sharded in (2, 3):
        module = ModuleStreams(1, sharded, torch.device("cuda", 0))
        with module.running():
            on_host.append(draw())
            on_device.append(torch.rand(4, generator=generator))
            module.use(sharded=True)
            on_host.append(draw())
            on_device.append(torch.rand(4, generator=generator))
    assert same(on_host) == [0, 1, 0, 1]
    assert same(on_device) == [0, 1, 0, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_sharded_stream_is_the_gpus() -> None:
    shards = [ModuleStreams(1, sharded, torch.device("cuda", 0)) for sharded in (2, 3)]
    assert same([drawn_in(shard) for shard in shards]) == [0, 0]
    on_device = []
    for shard in shards:
        with shard.running():
            shard.use(sharded=True)
            on_device.append(draw("cuda"))
    assert same(on_device) == [0, 1]


class TestSwitching:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down, self.head = (nn.Identity() for _ in range(4))
            self.drawn: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            for layer in (None, self.up, self.norm, self.down, self.head):
                x = x if layer is None else layer(x)
                self.drawn.append(draw())
            return x

    @staticmethod
    def drawn(plan: dict, tensor_rank: int) -> list[Tensor]:
        layers, module = TestSwitching.Layers(), ModuleStreams(1, 2 + tensor_rank, CPU)
        switch_streams(layers, plan, module)
        with module.running():
            layers(torch.zeros(1))
            return [*layers.drawn, draw()]

    @pytest.mark.parametrize(
        ("plan", "agree"),
        [
            ({"up": "colwise", "norm": "replicated_with_grad_allreduce", "down": "rowwise"}, [1, 0, 0, 1, 1, 1]),
            ({"up": "colwise", "down": "rowwise", "head": "colwise"}, [1, 0, 0, 1, 0, 1]),
            ({"up": "embedding_rowwise", "head": "colwise_gather_output"}, [1, 1, 1, 1, 1, 1]),
            ({"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}, [1, 0, 0, 0, 0, 1]),
            ({}, [1, 1, 1, 1, 1, 1]),
        ],
    )
    def test_draws_after_a_layer_fit_its_output(self, plan: dict, agree: list[int]) -> None:
        """Of two tensor ranks, before any layer, after each of them, and after the module."""
        assert list(map(torch.equal, self.drawn(plan, 0), self.drawn(plan, 1))) == list(map(bool, agree))

    def test_styles(self) -> None:
        assert output_is_sharded("colwise") is True
        assert output_is_sharded("rowwise") is False
        assert output_is_sharded("replicate") is None
        assert output_is_sharded(ColwiseParallel(output_layouts=Replicate())) is False
        assert output_is_sharded(SequenceParallel()) is True


class TestState:
    def draws(self, of_rank: RandomStreams) -> list[Tensor]:
        return [drawn_in(of_rank["vision"]), drawn_in(of_rank["llm"]), drawn_in(of_rank["llm"], sharded=True)]

    def test_round_trip(self, tmp_path: Path) -> None:
        saving = streams()
        self.draws(saving)
        torch.save(saving.state_dict(), tmp_path / "state.pt")
        expected = self.draws(saving)
        loading = streams(seed=999)
        loading.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert all(map(torch.equal, self.draws(loading), expected))
        assert loading.seed == 7

    def test_a_running_module_can_be_saved(self) -> None:
        saving, loading = streams(), streams()
        with saving["llm"].running():
            saving["llm"].use(sharded=True)
            draw()
            state = saving.state_dict()
            expected = draw()
        loading.load_state_dict(state)
        assert torch.equal(drawn_in(loading["llm"], sharded=True), expected)

    def test_streams_belong_to_replicas_not_to_ranks(self) -> None:
        """The merged state of all ranks, loaded where there are more replicas and more tensor ranks."""
        ranks = [streams(rank) for rank in range(8)]
        for rank in ranks:
            self.draws(rank)
        merged = merge_states(rank.state_dict() for rank in ranks)
        for rank in ranks:
            assert all(torch.equal(value, merged["states"][key]) for key, value in rank.state_dict()["states"].items())

        def loaded(rank: int) -> RandomStreams:
            of_rank = RandomStreams(layouts(world=16, tensor_parallel_size=4), rank, 0, CPU)
            of_rank.load_state_dict(merged)
            return of_rank

        for replica in range(4):
            continued = drawn_in(ranks[2 * replica]["llm"])
            assert all(torch.equal(drawn_in(loaded(4 * replica + copy)["llm"]), continued) for copy in range(4))
        new = [drawn_in(loaded(rank)["llm"], sharded=True) for rank in range(16)]
        assert same(new) == list(range(16)), "shards that were not there before start streams of their own"
        first = [drawn_in(RandomStreams(layouts(16), rank, 7, CPU)["vision"]) for rank in range(16)]
        again = [drawn_in(loaded(rank)["vision"]) for rank in range(16)]
        assert same([*first, *again]) == list(range(32)), "new replicas do not draw what the run began with"

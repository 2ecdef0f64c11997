"""Each contract of the self-test sees the faults that it is there for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest

from lightning_hetero import gradients, rng
from lightning_hetero.layout import ModuleLayout
from lightning_hetero.parallelize import recompute
from lightning_hetero.selftest_cases import Setup, clip_case, gradient_case, ragged_case, random_case
from tests.harness import Pool
from tests.harness import mutations as m

SETUP = Setup(devices=4, accelerator="cpu", num_nodes=1, precision="64-true")
LAYOUTS = {"vision": ModuleLayout(), "llm": ModuleLayout(tensor_parallel_size=2)}
Mutation = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def clipped_by_own_norm() -> Iterator[None]:
    """Each rank clips by the norm of the gradients that it holds."""
    original = gradients.GradientNorm.clip_by_norm

    def clip(self: gradients.GradientNorm, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(self, "group", None):
            return original(self, *args, **kwargs)

    with mock.patch.object(gradients.GradientNorm, "clip_by_norm", clip):
        yield


def key_of_replica_zero(layout: Any, rank: int, *, sharded: bool, original: Any = rng.stream_key) -> str:
    """All replicas draw from the streams of the first one."""
    first = layout.replicas[0][list(layout.replicas[layout.replica_of(rank)]).index(rank)]
    return original(layout, first, sharded=sharded)


@contextlib.contextmanager
def nothing_replayed() -> Iterator[None]:
    with mock.patch.object(recompute, "Replay", return_value=contextlib.nullcontext()):
        yield


def one_stream() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(rng.ModuleStreams, "use", return_value=None)


def equal_replicas() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(rng, "stream_key", key_of_replica_zero)


@dataclass
class Case:
    run: Callable[..., tuple[float, Sequence[str]]]
    says: str | None = None
    mutation: Mutation = contextlib.nullcontext


CASES = {
    "gradient": Case(gradient_case),
    "ragged": Case(partial(ragged_case, skips=True)),
    "ragged, always called": Case(partial(ragged_case, skips=False)),
    "clip": Case(clip_case),
    "random": Case(random_case),
    "gradient doubled": Case(gradient_case, "llm: gradient of llm.", partial(m.scaled_gradient, "llm", 2.0)),
    "ragged, dropped rows": Case(
        partial(ragged_case, skips=True), "vision: gradient of vision.", partial(m.dropped_sibling, backward=True)
    ),
    "clipped by own norm": Case(clip_case, "clipped gradient of ", clipped_by_own_norm),
    "one stream": Case(random_case, "sharded masks of llm, block 0, on ranks 0 and 1 differ", one_stream),
    "equal replicas": Case(random_case, "shared masks of vision, block 0, on ranks 0 and 1 differ", equal_replicas),
    "nothing replayed": Case(random_case, "the recomputation of llm on rank 0 drops", nothing_replayed),
}


def run_all() -> dict[str, tuple[float, Sequence[str]]]:
    """What every rank does: each case in turn."""
    found = {}
    for name, case in CASES.items():
        with case.mutation():
            found[name] = case.run(SETUP, LAYOUTS)
    return found


@pytest.fixture(scope="module")
def found(pool: Pool) -> dict[str, tuple[float, Sequence[str]]]:
    return pool.run(run_all, SETUP.devices, timeout=240)[0]


@pytest.mark.parametrize("name", CASES)
def test_contract(found: dict[str, tuple[float, Sequence[str]]], name: str) -> None:
    (error, failures), says = found[name], CASES[name].says
    if says is None:
        assert error < 1e-12
        assert not failures
    else:
        assert error > 1e-4
        assert any(says in failure for failure in failures), failures

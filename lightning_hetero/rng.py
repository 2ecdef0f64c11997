"""Random streams of placed modules: equal where ranks must agree, different where they must not.

A placed module draws from streams of its own, whatever else runs between its calls. On each rank it has two:

- the *shared* stream, equal on the tensor-parallel copies of a replica, for draws on activations that they all hold,
- the *sharded* stream, different on each of them, for draws on activations that are split over them (one stream there
  would repeat its masks from shard to shard).

Both differ between replicas, and between the ranks of a replica that hold other tokens or other layers. While a module
runs, the default generators hold its shared stream; what switches to the sharded one is
:mod:`lightning_hetero.parallelize.streams`. Draws on the host (which layer to skip) are decisions that all copies make
together, so on an accelerator the sharded stream concerns the device's generator only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.layout import Layouts, ResolvedLayout


def stream_key(layout: ResolvedLayout, rank: int, *, sharded: bool) -> str:
    """Name of a stream: the same on two ranks exactly if they draw the same numbers.

    Args:
        layout: The module's layout.
        rank: A rank that holds it.
        sharded: Whether the stream is for activations that are split over the tensor axis.

    Example:
        ``"vision/stage 0/replica 1/context 0/shared"``, ``"vision/stage 0/replica 1/context 0/tensor 1"``
    """
    stage, _, _, context, tensor = layout.coordinate(rank)
    copies = f"tensor {tensor}" if sharded else "shared"
    return f"{layout.name}/stage {stage}/replica {layout.replica_of(rank)}/context {context}/{copies}"


def stream_seed(seed: int, key: str, calls: int = 0) -> int:
    """Seed of a stream: a pure function, the same in every process and version of Python.

    Args:
        seed: Of the run, equal on all ranks.
        key: Name of the stream (:func:`stream_key`).
        calls: Where in the run the stream starts.

    Returns:
        The first 63 bits of SHA-256 over ``"{seed}/{calls}/{key}"``.
    """
    digest = hashlib.sha256(f"{seed}/{calls}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Snapshot:
    """Where a module's streams and the default generators were at some moment."""

    live: list[Tensor]
    states: dict[tuple[bool, str], Tensor]
    sharded: bool
    running: bool


class ModuleStreams:
    """The random streams of one placed module on this rank.

    Args:
        shared: Seed of the shared stream.
        sharded: Seed of the sharded stream.
        device: Where the module's activations are.
    """

    def __init__(self, shared: int, sharded: int, device: torch.device) -> None:
        self.device = device
        self.calls = 0
        self._running = False
        self._sharded = False
        self._states: dict[tuple[bool, str], Tensor] = {}
        if device.type != "cpu":
            torch.get_device_module(device).init()
        self.seed(shared, sharded)

    def seed(self, shared: int, sharded: int) -> None:
        """Starts both streams anew; not to be called while the module runs."""
        generators = self._generators
        for kind, generator in generators.items():
            self._states[False, kind] = _seeded(generator, shared)
        self._states[True, self.device.type] = _seeded(generators[self.device.type], sharded)

    @property
    def states(self) -> dict[tuple[bool, str], Tensor]:
        """State of each stream and device type, keyed by whether the stream is the sharded one."""
        if self._running:
            self._save()
        return dict(self._states)

    @states.setter
    def states(self, states: Mapping[tuple[bool, str], Tensor]) -> None:
        self._states = dict(states)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While it is open, the default generators hold this module's streams. Within itself it does nothing."""
        if self._running:
            yield
            return
        outside = [generator.get_state() for generator in self._generators.values()]
        self._running, self._sharded = True, False
        self.calls += 1
        for kind, generator in self._generators.items():
            generator.set_state(self._states[False, kind])
        try:
            yield
        finally:
            self._save()
            self._running = False
            self._set_live(outside)

    def use(self, *, sharded: bool) -> None:
        """Draws from the sharded or the shared stream from now on, if the module is running."""
        if not self._running or sharded == self._sharded:
            return
        kind = self.device.type
        generator = self._generators[kind]
        self._states[self._sharded, kind] = generator.get_state()
        self._sharded = sharded
        generator.set_state(self._states[sharded, kind])

    def snapshot(self) -> Snapshot:
        """Where the streams and the default generators are, for :meth:`restore`."""
        live = [generator.get_state() for generator in self._generators.values()]
        return Snapshot(live, dict(self._states), self._sharded, self._running)

    def restore(self, snapshot: Snapshot) -> None:
        """Puts the streams and the default generators back to where they were."""
        self._set_live(snapshot.live)
        self._states = dict(snapshot.states)
        self._sharded, self._running = snapshot.sharded, snapshot.running

    @property
    def _generators(self) -> dict[str, torch.Generator]:
        """The default generators that the module's code draws from, by device type."""
        generators = {"cpu": torch.default_generator}
        if self.device.type != "cpu":
            of_devices = torch.get_device_module(self.device).default_generators
            generators[self.device.type] = of_devices[self.device.index or 0]
        return generators

    def _set_live(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators.values(), states, strict=True):
            generator.set_state(state)

    def _save(self) -> None:
        """Brings ``_states`` up to date with the generators."""
        for kind, generator in self._generators.items():
            self._states[self._sharded and kind == self.device.type, kind] = generator.get_state()


class Replay:
    """Context in which a module draws what it drew after a snapshot; afterwards all is as it was before.

    It may be entered again, as when one graph is run backwards twice.
    """

    def __init__(self, streams: ModuleStreams, snapshot: Snapshot) -> None:
        self._streams = streams
        self._snapshot = snapshot

    def __enter__(self) -> None:
        self._before = self._streams.snapshot()
        self._streams.restore(self._snapshot)

    def __exit__(self, *_: object) -> None:
        self._streams.restore(self._before)


class RandomStreams:
    """The random streams of all placed modules that this rank holds.

    Args:
        layouts: The layouts.
        rank: This rank.
        seed: Of the run, equal on all ranks.
        device: This rank's device.

    Example:
        >>> with streams["vision"].running():
        ...     features = vision(images)
    """

    def __init__(self, layouts: Layouts, rank: int, seed: int, device: torch.device) -> None:
        self.seed = seed
        self._keys: dict[str, dict[bool, str]] = {}
        self._modules: dict[str, ModuleStreams] = {}
        for name, layout in layouts.by_name.items():
            if rank in layout:
                keys = {sharded: stream_key(layout, rank, sharded=sharded) for sharded in (False, True)}
                self._keys[name] = keys
                self._modules[name] = ModuleStreams(
                    stream_seed(seed, keys[False]), stream_seed(seed, keys[True]), device
                )

    def __getitem__(self, name: str) -> ModuleStreams:
        return self._modules[name]

    def state_dict(self) -> dict[str, Any]:
        """The streams of this rank; :func:`merge_states` joins those of all ranks.

        Returns:
            ``seed``; ``calls`` by module; ``states`` by stream and device type, such as
            ``"llm/stage 0/replica 0/context 0/shared/cpu"``. Streams are named by what they are for, not by the rank
            that drew from them.
        """
        return {
            "seed": self.seed,
            "calls": {name: streams.calls for name, streams in self._modules.items()},
            "states": {
                f"{self._keys[name][sharded]}/{kind}": state
                for name, streams in self._modules.items()
                for (sharded, kind), state in streams.states.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues saved streams.

        A stream that is not among the saved ones, because the layout has changed, starts anew from the saved seed and
        the number of calls: agreed by all ranks, and not with the numbers that the run began with.

        Args:
            state: What :meth:`state_dict` returned on this rank, or :func:`merge_states` for all.
        """
        self.seed = state["seed"]
        for name, streams in self._modules.items():
            keys = self._keys[name]
            streams.calls = state["calls"].get(name, 0)
            streams.seed(*(stream_seed(self.seed, keys[sharded], streams.calls) for sharded in (False, True)))
            saved = {where: state["states"].get(f"{keys[where[0]]}/{where[1]}") for where in streams.states}
            streams.states |= {where: value.cpu() for where, value in saved.items() if value is not None}


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins what :meth:`RandomStreams.state_dict` returned on different ranks: where keys are equal, values are."""
    merged: dict[str, Any] = {"calls": {}, "states": {}}
    for state in states:
        merged["seed"] = state["seed"]
        for part in ("calls", "states"):
            merged[part] |= state[part]
    return merged


def _seeded(like: torch.Generator, seed: int) -> Tensor:
    return torch.Generator(like.device).manual_seed(seed).get_state()

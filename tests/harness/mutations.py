"""Faults put into the package on purpose, one class of bug each: the oracle has to see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lightning_hetero import gradients, strategy
from lightning_hetero.boundary import call, exchange
from lightning_hetero.boundary.route import Piece, Route, leave_pieces


@contextmanager
def scaled_gradient(module: str, factor: float) -> Iterator[None]:
    """One module's gradients come out multiplied by a factor, as when its own data-parallel size is averaged over."""

    original = strategy.HeteroStrategy.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for name, parameter in self.lightning_module.named_parameters():
            if name.startswith(module + ".") and parameter.grad is not None:
                gradients.local(parameter.grad).mul_(factor)
        return result

    with patch.object(strategy.HeteroStrategy, "backward", backward):
        yield


@contextmanager
def swapped_siblings() -> Iterator[None]:
    """Two runs of rows that a replica is given, or gives, change places in what leaves the module."""

    def pieces(assignment: Any, offsets: Any) -> list[Piece]:
        result = leave_pieces(assignment, offsets)
        for i, a in enumerate(result):
            for j, b in enumerate(result[i + 1 :], i + 1):
                if a.destination == b.destination and b.start == a.start + a.size:
                    result[i] = replace(a, start=a.start + b.size)
                    result[j] = replace(b, start=a.start)
                    return result
                if a.source == b.source and b.source_start == a.source_start + a.size:
                    result[i] = replace(a, source_start=a.source_start + b.size)
                    result[j] = replace(b, source_start=a.source_start)
                    return result
        return result

    with patch.object(call, "leave_pieces", pieces):
        yield


@contextmanager
def dropped_sibling(*, backward: bool) -> Iterator[None]:
    """One run of rows never arrives: in forward its place stays zero, in backward its gradient is lost."""
    original = call.Boundary._plan_leave

    def plan(self: Any, *args: Any) -> Any:
        kept = original(self, *args)
        with patch.object(call, "leave_pieces", lambda *args: leave_pieces(*args)[1:]):
            broken = original(self, *args)
        return (kept[0], broken[1]) if backward else broken

    with patch.object(call.Boundary, "_plan_leave", plan):
        yield


@contextmanager
def zero_gradient() -> Iterator[None]:
    """The gradient that enters the module is zero."""
    original = exchange._Cross.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        return original(ctx, *(None if g is None else torch.zeros_like(g) for g in grads))

    with patch.object(exchange._Cross, "backward", staticmethod(backward)):
        yield


@contextmanager
def partial_sum(times: int) -> Iterator[None]:
    """Partial gradients are summed over the tensor ranks not at all, or twice."""
    original = gradients.GradientSync.__init__

    def init(self: Any, partial: Any, replicated: Any, host: Any) -> None:
        original(self, [*partial] * times, replicated, host)

    with patch.object(gradients.GradientSync, "__init__", init):
        yield


class Transposed(Route):
    """The literal transpose of a route: what was sent comes back, and copies add up."""


@contextmanager
def literal_transpose() -> Iterator[None]:
    """The backward of leaving is the transpose of the forward route instead of the route of the exchanged layouts."""
    plan_original, move_original = call.Boundary._plan_leave, exchange.Transport.move

    def plan(self: Any, *args: Any) -> Any:
        leave, back = plan_original(self, *args)
        kept = tuple((start, source_start, size) for source_start, start, size in leave.kept)
        return leave, Transposed(back.rows, kept, leave.receives, leave.sends)

    def move(self: Any, tensors: Any, routes: Any) -> Any:
        if not any(isinstance(route, Transposed) for route in routes):
            return move_original(self, tensors, routes)
        results = []
        for tensor, route in zip(tensors, routes, strict=True):
            result = tensor.new_zeros((route.rows, *tensor.shape[1:]))
            operations, arrivals = [], []
            for peer, runs in route.receives:
                for start, stop in runs:
                    buffer = tensor.new_empty((stop - start, *tensor.shape[1:]))
                    arrivals.append((start, stop, buffer))
                    operations.append(dist.P2POp(dist.irecv, buffer, peer, self.group))
            for peer, runs in route.sends:
                operations += [
                    dist.P2POp(dist.isend, tensor[start:stop].contiguous(), peer, self.group) for start, stop in runs
                ]
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()
            for source_start, start, size in route.kept:
                result[start : start + size] += tensor[source_start : source_start + size]
            for start, stop, buffer in arrivals:
                result[start:stop] += buffer
            results.append(result)
        return results, 0

    with patch.object(call.Boundary, "_plan_leave", plan), patch.object(exchange.Transport, "move", move):
        yield

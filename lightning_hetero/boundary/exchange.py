"""Exchange: the one place where rows move between layouts, in forward and in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.boundary.route import Route


@dataclass
class Traffic:
    """What one rank sent through a boundary, counted since the last :meth:`clear`.

    Attributes:
        forward_bytes: Bytes sent by forward transfers (enter and leave).
        backward_bytes: Bytes sent by their backwards.
        items: Items that this rank computed, stand-ins left out.
        calls: Calls that ran.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    items: int = 0
    calls: int = 0

    def clear(self) -> None:
        self.forward_bytes = self.backward_bytes = self.items = self.calls = 0


class Transport:
    """Carries rows and flags between the ranks of one boundary.

    Args:
        group: Process group of all ranks of the boundary, for tensors.
        host: Process group of the same ranks on the CPU, for counts and flags: a count never costs a device
            synchronisation.
    """

    def __init__(self, group: dist.ProcessGroup, host: dist.ProcessGroup) -> None:
        self.group = group
        self.host = host
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()

    def share(self, values: Sequence[int]) -> list[list[int]]:
        """Exchanges a few integers: every rank's values, by rank in the group."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64)
        all_values = torch.empty(self.size * len(values), dtype=torch.int64)
        dist.all_gather_into_tensor(all_values, mine, group=self.host)
        return all_values.view(self.size, -1).tolist()

    def share_objects(self, value: Any) -> list[Any]:
        """Exchanges picklable objects: slower than :meth:`share`, for what is exchanged once."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self.size == 1:
            return list(flags)
        shared = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.host)
        return [bool(flag) for flag in shared.tolist()]

    def move(self, tensors: Sequence[Tensor], routes: Sequence[Route]) -> tuple[list[Tensor], int]:
        """Executes the routes of several tensors, all at once.

        Args:
            tensors: Each ``[source rows, ...]``.
            routes: This rank's part of each one's route.

        Returns:
            The results, each ``[route.rows, ...]`` with zeros in rows that the route does not fill, and the bytes
            that this rank sent.
        """
        operations: dict[dist.ProcessGroup, list[dist.P2POp]] = {}
        results: list[Tensor] = []
        arrivals: list[tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]] = []
        sent = 0
        for tensor, route in zip(tensors, routes, strict=True):
            run = route.narrows()
            if run is not None:
                results.append(tensor[run[0] : run[1]])
                continue
            allocate = tensor.new_empty if route.rows_filled == route.rows else tensor.new_zeros
            result = allocate((route.rows, *tensor.shape[1:]))
            results.append(result)
            # What lies in host memory (grids, lengths) travels on the host.
            group = self.host if tensor.device.type == "cpu" else self.group
            queue = operations.setdefault(group, [])
            for peer, runs in route.receives:
                # One run is received where it belongs; several arrive as one message and are spread afterwards.
                if len(runs) == 1:
                    buffer = result[runs[0][0] : runs[0][1]]
                else:
                    buffer = tensor.new_empty((sum(stop - start for start, stop in runs), *tensor.shape[1:]))
                    arrivals.append((result, buffer, runs))
                queue.append(dist.P2POp(dist.irecv, _bytes(buffer), peer, group))
            for peer, runs in route.sends:
                parts = [tensor[start:stop] for start, stop in runs]
                message = _bytes((parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous())
                queue.append(dist.P2POp(dist.isend, message, peer, group))
                sent += message.numel()
            for source_start, start, size in route.kept:
                result[start : start + size].copy_(tensor[source_start : source_start + size])
        for work in [work for queue in operations.values() if queue for work in dist.batch_isend_irecv(queue)]:
            work.wait()
        for result, buffer, runs in arrivals:
            offset = 0
            for start, stop in runs:
                result[start:stop].copy_(buffer[offset : offset + stop - start])
                offset += stop - start
        return results, sent


def cross(
    tensors: Sequence[Tensor],
    routes: Sequence[Route],
    backs: Sequence[Route],
    transport: Transport,
    *,
    differentiable: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Carries tensors to another layout; gradients come back along ``backs``.

    Args:
        tensors: Each ``[source rows, ...]``; integer tensors may be among them.
        routes: This rank's part of each one's forward.
        backs: This rank's part of each one's backward, planned with the layouts exchanged.
        transport: Of the boundary.
        differentiable: Whether gradients have to come back. All ranks must agree.

    Returns:
        The results, and an anchor: a zero that depends on the transfer. A rank on which nothing of the result
        reaches the loss adds the anchor to it, so that it takes part in the transfer's backward all the same.
    """
    if not differentiable:
        moved, sent = transport.move(tensors, routes)
        transport.traffic.forward_bytes += sent
        return moved, None
    device = next((tensor.device for tensor in tensors if tensor.is_floating_point()), tensors[0].device)
    # The gate makes the results require grad also on a rank whose own tensors do not.
    gate = torch.zeros((), device=device, requires_grad=True)
    *moved, anchor = _Cross.apply(transport, routes, backs, gate, *tensors)
    return moved, anchor


class _Cross(torch.autograd.Function):
    """One transfer of several tensors: one node, so that ranks cannot run the parts of a backward in other orders."""

    @staticmethod
    def forward(
        ctx: Any,
        transport: Transport,
        routes: Sequence[Route],
        backs: Sequence[Route],
        gate: Tensor,
        *tensors: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.transport, ctx.backs = transport, backs
        moved, sent = transport.move(tensors, routes)
        transport.traffic.forward_bytes += sent
        ctx.meta = [(tensor.shape, tensor.dtype, tensor.device) for tensor in moved]
        ctx.floating = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        ctx.mark_non_differentiable(*(m for m, floating in zip(moved, ctx.floating, strict=True) if not floating))
        return (*moved, gate.detach().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # A result that got a gradient on one rank has one on all; one that got none anywhere sends none back, so
        # that an optimizer leaves alone what one process would leave alone.
        given = [g is not None and floating for g, floating in zip(gradients[:-1], ctx.floating, strict=True)]
        present = ctx.transport.any(given)
        outgoing: list[Tensor] = []
        for gradient, (shape, dtype, device), flag in zip(gradients[:-1], ctx.meta, present, strict=True):
            if flag:
                outgoing.append(torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient)
        backs = [back for back, flag in zip(ctx.backs, present, strict=True) if flag]
        moved, sent = ctx.transport.move(outgoing, backs)
        ctx.transport.traffic.backward_bytes += sent
        returned = iter(moved)
        return (None, None, None, None, *(next(returned) if flag else None for flag in present))


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as bytes, so that every dtype travels on every backend."""
    return tensor.reshape(-1).view(torch.uint8)

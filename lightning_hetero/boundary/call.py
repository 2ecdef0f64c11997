"""The hook: a call of a placed module enters its layout, runs, and leaves again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from lightning_hetero.boundary.exchange import Transport, cross
from lightning_hetero.boundary.items import Cut, TensorSpec, cut_arguments, cut_result
from lightning_hetero.boundary.route import (
    Assignment,
    Route,
    assign_items,
    enter_pieces,
    leave_pieces,
    plan_route,
    reverse,
)
from lightning_hetero.errors import BoundaryError
from lightning_hetero.layout import ResolvedLayout


@dataclass
class StepState:
    """What the boundaries of one strategy share while a step runs.

    Attributes:
        anchors: Zeros that tie the transfers of this step to the loss.
        running: Name of the placed module that is running.
    """

    anchors: list[Tensor] = field(default_factory=list)
    running: str | None = None

    def anchor(self, loss: Tensor) -> Tensor:
        """The loss, dependent on every transfer of the step, and forgets them."""
        for anchor in self.anchors:
            loss = loss + anchor.to(loss.dtype)
        self.anchors.clear()
        return loss


@dataclass(frozen=True)
class CallRoutes:
    """One rank's routes of a call: the four transfers, and what it computes."""

    enter: Route
    enter_back: Route
    items: int
    own_items: int


class Boundary:
    """Runs the calls of one placed module in that module's layout.

    Args:
        layout: The module's layout.
        driver: The driver's layout.
        transport: Between the ranks of both.
        state: Shared by the boundaries of a strategy.
        rank: This rank.
    """

    def __init__(
        self, layout: ResolvedLayout, driver: ResolvedLayout, transport: Transport, state: StepState, rank: int
    ) -> None:
        self.layout = layout
        self.driver = driver
        self.transport = transport
        self.state = state
        self.rank = rank
        self._replica = layout.replica_of(rank)
        self._driver_replica = driver.replica_of(rank)
        self._form: tuple[list[Any], TreeSpec] | None = None
        # Counts repeat from step to step; a plan depends on nothing else.
        self._assign = lru_cache(maxsize=256)(assign_items)
        self._enter = lru_cache(maxsize=256)(self._plan_enter)
        self._leave = lru_cache(maxsize=256)(self._plan_leave)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def traffic(self) -> Any:
        """Bytes, items and calls of this rank."""
        return self.transport.traffic

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries the arguments over, calls ``forward`` with this rank's share, and carries the result back.

        Raises:
            BoundaryError: If the call cannot be cut, ranks disagree about it, or another placed module is running.
        """
        if self.state.running is not None:
            raise BoundaryError(
                f"placed module '{self.name}' was called inside placed module '{self.state.running}', and neither is "
                f"the driver ('{self.driver.name}'); call it from training_step or the driver, or "
                "give only one of them a layout"
            )
        cut = cut_arguments(self.name, args, kwargs)
        cut, counts, differentiable_inputs = self._agree(cut)
        if not any(counts):
            return self._nothing(forward, cut)
        assignment = self._assign(counts, self.layout.data_size)
        routes = self._enter(assignment, counts)
        inputs, _ = cross(
            cut.tensors, routes.enter, routes.enter_back, self.transport, differentiable=differentiable_inputs
        )
        shared_args, shared_kwargs = cut.join(inputs)
        self.state.running = self.name
        try:
            result = cut_result(self.name, forward(*shared_args, **shared_kwargs), routes.items)
        finally:
            self.state.running = None
        self.traffic.items += routes.own_items
        self.traffic.calls += 1
        rows_per_item = result.rows // routes.items
        self._form = (result.slots, result.tree)
        leave, leave_back = self._leave(assignment, counts, rows_per_item)
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in result.tensors)
        outputs, anchor = cross(result.tensors, leave, leave_back, self.transport, differentiable=differentiable)
        if anchor is not None:
            self.state.anchors.append(anchor)
        return result.join(outputs)

    def _agree(self, cut: Cut) -> tuple[Cut, tuple[int, ...], bool]:
        """Tells the other ranks what this rank calls with.

        Returns:
            The call (a rank without items takes over the others' form of it), the items of every driver replica, and
            whether any rank's arguments need a gradient.
        """
        wants = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in cut.tensors)
        headers = self.transport.share([cut.rows, cut.signature(), int(wants)])
        by_rank = dict(zip(sorted({*self.layout.ranks, *self.driver.ranks}), headers, strict=True))
        for replica, ranks in enumerate(self.driver.replicas):
            counts = {by_rank[rank][0] for rank in ranks}
            if len(counts) > 1:
                raise BoundaryError(
                    f"'{self.name}' was called with {sorted(counts)} items on the ranks of driver replica {replica} "
                    f"({list(ranks)}), which must see the same batch; shard the loader by strategy.loader_rank of "
                    "strategy.loader_world_size"
                )
        signatures = {by_rank[rank][1] for rank in by_rank}
        if len(signatures) > 1:
            cut = self._common_form(cut)
        return cut, tuple(by_rank[ranks[0]][0] for ranks in self.driver.replicas), any(h[2] for h in headers)

    def _common_form(self, cut: Cut) -> Cut:
        """Agrees on one form of the arguments where they differ: that of the ranks that have items."""
        forms = self.transport.share_objects((cut.rows, cut.slots, cut.tree))
        with_items = [form for form in forms if form[0]] or forms[:1]
        _, slots, tree = with_items[0]
        for _, other_slots, other_tree in with_items[1:]:
            if other_tree != tree or [_kind(s) for s in other_slots] != [_kind(s) for s in slots]:
                raise BoundaryError(
                    f"'{self.name}' was called with arguments of different form on different ranks: {slots} and "
                    f"{other_slots}; dtypes and all dims but dim 0 must agree"
                )
        if cut.rows:
            return cut
        return Cut(_no_rows(slots, cut.tensors[0].device), 0, slots, tree)

    def _nothing(self, forward: Callable[..., Any], cut: Cut) -> Any:
        """The result of a call without items anywhere: every tensor with zero rows.

        Only the first call of a run computes it; later ones know its form.
        """
        if self._form is None:
            args, kwargs = cut.join()
            with torch.no_grad():
                return forward(*args, **kwargs)
        slots, tree = self._form
        return Cut(_no_rows(slots, cut.tensors[0].device), 0, slots, tree).join()

    def _plan_enter(self, assignment: Assignment, counts: tuple[int, ...]) -> CallRoutes:
        pieces = enter_pieces(assignment)
        mine = assignment[self._replica]
        items = sum(segment.size for segment in mine)
        here, there = self.driver.replicas, self.layout.replicas
        # The gradient of a stand-in is nobody's: the way back carries real items only.
        back = [reversed_ for reversed_, real in zip(reverse(pieces), _real(assignment), strict=True) if real]
        return CallRoutes(
            enter=plan_route(pieces, here, there, self.rank, items),
            enter_back=plan_route(back, there, here, self.rank, counts[self._driver_replica]),
            items=items,
            own_items=sum(segment.size for segment in mine if not segment.standin),
        )

    def _plan_leave(self, assignment: Assignment, counts: tuple[int, ...], rows_per_item: int) -> tuple[Route, Route]:
        pieces = leave_pieces(assignment, rows_per_item)
        here, there = self.driver.replicas, self.layout.replicas
        rows = counts[self._driver_replica] * rows_per_item
        held = sum(segment.size for segment in assignment[self._replica]) * rows_per_item
        return (
            plan_route(pieces, there, here, self.rank, rows),
            plan_route(reverse(pieces), here, there, self.rank, held),
        )


class PlacedModule:
    """Mixin of a placed module's class: every call goes through its boundary.

    A call, not ``forward``, is taken over: FSDP2 and other hooks then run inside the boundary, in the module's own
    layout, and only when the boundary runs the module.
    """

    _boundary: Boundary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._boundary(super().__call__, args, kwargs)  # type: ignore[misc]


def place(module: nn.Module, boundary: Boundary) -> None:
    """Puts a boundary around a module: the instance gets a subclass of its class, as ``fully_shard`` does."""
    cls = type(module)
    if not issubclass(cls, PlacedModule):
        module.__class__ = type(f"Placed{cls.__name__}", (PlacedModule, cls), {"__module__": cls.__module__})
    object.__setattr__(module, "_boundary", boundary)


def _no_rows(slots: list[Any], device: torch.device) -> list[Tensor]:
    specs = [slot for slot in slots if isinstance(slot, TensorSpec)]
    return [torch.empty((0, *spec.shape), dtype=spec.dtype, device=device) for spec in specs]


def _kind(slot: Any) -> Any:
    return slot if isinstance(slot, TensorSpec) else type(slot).__name__


def _real(assignment: Assignment) -> list[bool]:
    return [not segment.standin for segments in assignment for segment in segments]

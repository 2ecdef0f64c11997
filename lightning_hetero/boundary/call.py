"""The hook: a call of a placed module enters its layout, runs, and leaves again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from lightning_hetero.boundary.exchange import Traffic, Transport, cross
from lightning_hetero.boundary.items import Cut, TensorSpec, cut_arguments, cut_result
from lightning_hetero.boundary.rendezvous import Header, Rendezvous
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

Form = tuple[list[Any], TreeSpec]
"""Slots and nesting of a call or result, without its tensors."""


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
        rendezvous: Where the ranks agree on a call.
        rank: This rank.
    """

    def __init__(
        self, layout: ResolvedLayout, driver: ResolvedLayout, transport: Transport, rendezvous: Rendezvous, rank: int
    ) -> None:
        self.layout = layout
        self.driver = driver
        self.transport = transport
        self.rendezvous = rendezvous
        self.rank = rank
        self.index = len(rendezvous.boundaries)
        self.device = torch.device("cpu")
        rendezvous.boundaries.append(self)
        self._forward: Callable[..., Any] | None = None
        self._replica = layout.replica_of(rank)
        self._driver_replica = driver.replica_of(rank)
        # Forms of arguments by signature, as far as all ranks know them, and the form of the last result.
        self._argument_forms: dict[int, Form] = {}
        self._result_form: Form | None = None
        # Counts repeat from step to step; a plan depends on nothing else.
        self._assign = lru_cache(maxsize=256)(assign_items)
        self._enter = lru_cache(maxsize=256)(self._plan_enter)
        self._leave = lru_cache(maxsize=256)(self._plan_leave)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def traffic(self) -> Traffic:
        """Bytes, items and calls of this rank."""
        return self.transport.traffic

    def attach(self, forward: Callable[..., Any], device: torch.device) -> None:
        """Says what a call runs, and where."""
        self._forward, self.device = forward, device

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of the placed module does.

        Raises:
            BoundaryError: If the call cannot be cut, ranks disagree about it, or another placed module is running.
        """
        running = self.rendezvous.running
        if running is not None:
            raise BoundaryError(
                f"placed module '{self.name}' was called inside placed module '{running}', and neither is the driver "
                f"('{self.driver.name}'); call it from training_step or the driver, or give only one of them a layout"
            )
        return self.rendezvous.call(self, cut_arguments(self.name, args, kwargs))

    def run(self, cut: Cut | None, headers: list[Header]) -> Any:
        """Runs one call on all ranks: carries arguments over, computes this rank's share, carries the result back.

        Args:
            cut: What this rank calls with; ``None`` if it only joins.
            headers: Of all ranks of the boundary.

        Returns:
            The result for this rank's items.
        """
        assert self._forward is not None
        cut, counts = self._agree(cut, headers)
        # A rank that joins runs in the callers' mode, not in that of the place where it waits.
        with torch.set_grad_enabled(any(header.grad_mode for header in headers)):
            if not any(counts):
                return self._nothing(cut)
            assignment = self._assign(counts, self.layout.data_size)
            routes = self._enter(assignment, counts)
            differentiable = any(header.wants_gradient for header in headers)
            inputs, _ = cross(
                cut.tensors, routes.enter, routes.enter_back, self.transport, differentiable=differentiable
            )
            shared_args, shared_kwargs = cut.join(inputs)
            self.rendezvous.running = self.name
            try:
                result = cut_result(self.name, self._forward(*shared_args, **shared_kwargs), routes.items)
            finally:
                self.rendezvous.running = None
            self.traffic.items += routes.own_items
            self.traffic.calls += 1
            self._result_form = (result.slots, result.tree)
            leave, leave_back = self._leave(assignment, counts, result.rows // routes.items)
            differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in result.tensors)
            outputs, anchor = cross(result.tensors, leave, leave_back, self.transport, differentiable=differentiable)
        if anchor is not None:
            self.rendezvous.anchors.append(anchor)
        return result.join(outputs)

    def _agree(self, cut: Cut | None, headers: list[Header]) -> tuple[Cut, tuple[int, ...]]:
        """Settles the form of the arguments and the number of items of every driver replica.

        Returns:
            The call, in the form of the ranks that have items if this rank has none, and the counts.
        """
        by_rank = dict(zip(sorted({*self.layout.ranks, *self.driver.ranks}), headers, strict=True))
        for replica, ranks in enumerate(self.driver.replicas):
            items = {by_rank[rank].items for rank in ranks}
            if len(items) > 1:
                raise BoundaryError(
                    f"'{self.name}' was called with {sorted(items)} items on the ranks of driver replica {replica} "
                    f"({list(ranks)}), which must see the same batch; shard the loader by strategy.loader_rank of "
                    "strategy.loader_world_size"
                )
        wanted = {header.signature for header in headers if header.items} or {max(h.signature for h in headers)}
        differ = any(header.signature not in wanted for header in headers)
        if len(wanted) > 1 or (differ and not wanted <= set(self._argument_forms)):
            self._exchange_forms(cut)
        (signature,) = wanted
        counts = tuple(by_rank[ranks[0]].items for ranks in self.driver.replicas)
        if cut is None or cut.signature() != signature:
            slots, tree = self._argument_forms[signature]
            cut = Cut(_no_rows(slots, self.device), 0, slots, tree)
        return cut, counts

    def _exchange_forms(self, cut: Cut | None) -> None:
        """Makes the forms of all ranks' arguments known to all of them; refuses forms that cannot run as one call."""
        forms = self.transport.share_objects(None if cut is None else (cut.rows, cut.signature(), cut.slots, cut.tree))
        given = [form for form in forms if form is not None]
        for _, signature, slots, tree in given:
            self._argument_forms[signature] = (slots, tree)
        with_items = {form[1]: form for form in given if form[0]}
        if len(with_items) > 1:
            first, second, *_ = (form[2] for form in with_items.values())
            raise BoundaryError(
                f"'{self.name}' was called with arguments of different form on different ranks: {first} and {second}; "
                "dtypes and all dims but dim 0 must agree"
            )

    def _nothing(self, cut: Cut) -> Any:
        """The result of a call without items anywhere: every tensor with zero rows.

        Only the first call of a run computes it; later ones know its form.
        """
        if self._result_form is None:
            assert self._forward is not None
            args, kwargs = cut.join()
            with torch.no_grad():
                return self._forward(*args, **kwargs)
        slots, tree = self._result_form
        return Cut(_no_rows(slots, self.device), 0, slots, tree).join()

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
        return self._boundary(args, kwargs)


def place(module: nn.Module, boundary: Boundary, device: torch.device) -> None:
    """Puts a boundary around a module: the instance gets a subclass of its class, as ``fully_shard`` does."""
    cls = type(module)
    if not issubclass(cls, PlacedModule):
        module.__class__ = type(f"Placed{cls.__name__}", (PlacedModule, cls), {"__module__": cls.__module__})
    object.__setattr__(module, "_boundary", boundary)
    boundary.attach(super(PlacedModule, module).__call__, device)  # type: ignore[misc]


def _no_rows(slots: list[Any], device: torch.device) -> list[Tensor]:
    specs = [slot for slot in slots if isinstance(slot, TensorSpec)]
    return [torch.empty((0, *spec.shape), dtype=spec.dtype, device=device) for spec in specs]


def _real(assignment: Assignment) -> list[bool]:
    return [not segment.standin for segments in assignment for segment in segments]

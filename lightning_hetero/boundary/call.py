"""The hook: a call of a placed module enters its layout, runs, and leaves again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.boundary.balance import BalanceMode, balance_items
from lightning_hetero.boundary.exchange import Traffic, Transport, cross
from lightning_hetero.boundary.items import Call, Form, cut_arguments, cut_result
from lightning_hetero.boundary.rendezvous import Header, Rendezvous
from lightning_hetero.boundary.route import (
    Assignment,
    Offsets,
    Piece,
    Route,
    assign_items,
    enter_back_pieces,
    enter_pieces,
    held_rows,
    leave_pieces,
    plan_route,
    reverse,
    row_offsets,
)
from lightning_hetero.boundary.specs import Dim0Items, ItemSpec, pad_to, resize
from lightning_hetero.errors import BoundaryError
from lightning_hetero.layout import ResolvedLayout
from lightning_hetero.rng import ModuleStreams

Sizes = tuple[tuple[int, ...], ...]
"""For each driver replica the sizes of its items."""


class Boundary:
    """Runs the calls of one placed module in that module's layout.

    Args:
        layout: The module's layout.
        driver: The driver's layout.
        transport: Between the ranks of both.
        rendezvous: Where the ranks agree on a call.
        rank: This rank.
        streams: The module's random streams.
        spec: How its calls are cut into items.
        balance: How items are spread over its replicas.
    """

    def __init__(
        self,
        layout: ResolvedLayout,
        driver: ResolvedLayout,
        transport: Transport,
        rendezvous: Rendezvous,
        rank: int,
        streams: ModuleStreams,
        spec: ItemSpec | None = None,
        balance: BalanceMode = "replica",
    ) -> None:
        self.layout = layout
        self.driver = driver
        self.transport = transport
        self.rendezvous = rendezvous
        self.rank = rank
        self.streams = streams
        self.spec = spec or Dim0Items()
        self.balance = balance
        self.index = len(rendezvous.boundaries)
        self.device = torch.device("cpu")
        rendezvous.boundaries.append(self)
        self._forward: Callable[..., Any] | None = None
        self._ranks = sorted({*layout.ranks, *driver.ranks})
        self._replica = layout.replica_of(rank)
        self._driver_replica = driver.replica_of(rank)
        # Forms of arguments by signature, as far as all ranks know them, and the form of the last result.
        self._argument_forms: dict[int, Form] = {}
        self._result_form: Form | None = None
        # Counts repeat from step to step; a plan depends on nothing else.
        self._assign = lru_cache(maxsize=256)(self._plan_items)
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
        return self.rendezvous.call(self, cut_arguments(self.name, self.spec, args, kwargs))

    def run(self, call: Call | None, headers: list[Header]) -> Any:
        """Runs one call on all ranks: carries arguments over, computes this rank's share, carries the result back.

        Args:
            call: What this rank calls with; ``None`` if it only joins.
            headers: Of all ranks of the boundary.

        Returns:
            The result for this rank's items.
        """
        assert self._forward is not None
        call = self._agree(call, headers)
        # A rank that joins runs in the callers' mode, not in that of the place where it waits.
        with torch.set_grad_enabled(any(header.grad_mode for header in headers)):
            if not any(header.items for header in headers):
                return self._nothing(call)
            sizes = self._share_sizes(call, headers)
            assignment = self._assign(sizes)
            mine = assignment[self._replica]
            inputs = self._bring(call, sizes, assignment, any(header.wants_gradient for header in headers))
            shared_args, shared_kwargs = call.form.join(inputs)
            computed = [size for s in mine for size in sizes[s.replica][s.start : s.stop]]
            self.rendezvous.running = self.name
            try:
                with self.streams.running():
                    result = self._forward(*shared_args, **shared_kwargs)
            finally:
                self.rendezvous.running = None
            self.traffic.items += sum(segment.size for segment in mine if not segment.standin)
            self.traffic.calls += 1
            tensors, scales, form = cut_result(self.name, self.spec, result, computed)
            self._result_form = form
            outputs, anchor = self._take_back(tensors, scales, sizes, assignment)
        if anchor is not None:
            self.rendezvous.anchors.append(anchor)
        return form.join(outputs)

    # ------------------------------------------------------------------ agreeing

    def _agree(self, call: Call | None, headers: list[Header]) -> Call:
        """Settles the form of the arguments: a rank without items takes over that of the ranks that have some."""
        by_rank = dict(zip(self._ranks, headers, strict=True))
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
            self._exchange_forms(call)
        (signature,) = wanted
        if call is None or call.form.signature() != signature:
            form = self._argument_forms[signature]
            call = Call(form.empty(self.device), (), form)
        return call

    def _exchange_forms(self, call: Call | None) -> None:
        """Makes the forms of all ranks' arguments known to all of them; refuses forms that cannot run as one call."""
        shared = self.transport.share_objects(None if call is None else (len(call.sizes), call.form))
        given = [(items, form.signature(), form) for items, form in filter(None, shared)]
        for _, signature, form in given:
            self._argument_forms[signature] = form
        with_items = {signature: form for items, signature, form in given if items}
        if len(with_items) > 1:
            first, second, *_ = (form.slots for form in with_items.values())
            raise BoundaryError(
                f"'{self.name}' was called with arguments of different form on different ranks: {list(first)} and "
                f"{list(second)}; dtypes and all dims but dim 0 must agree"
            )

    def _share_sizes(self, call: Call, headers: list[Header]) -> Sizes:
        """The sizes of all items of all driver replicas. Where every size is 1 the counts say it all."""
        by_rank = dict(zip(self._ranks, headers, strict=True))
        counts = [by_rank[ranks[0]].items for ranks in self.driver.replicas]
        if isinstance(self.spec, Dim0Items):
            return tuple((1,) * count for count in counts)
        longest = max(counts)
        shared = self.transport.share([*call.sizes, *(0,) * (longest - len(call.sizes))])
        of_rank = dict(zip(self._ranks, shared, strict=True))
        return tuple(
            tuple(of_rank[ranks[0]][:count]) for ranks, count in zip(self.driver.replicas, counts, strict=True)
        )

    def _nothing(self, call: Call) -> Any:
        """The result of a call without items anywhere: every tensor with zero rows.

        Only the first call of a run computes it; later ones know its form.
        """
        if self._result_form is None:
            assert self._forward is not None
            args, kwargs = call.form.join(call.tensors)
            with torch.no_grad(), self.streams.running():
                return self._forward(*args, **kwargs)
        return self._result_form.join(self._result_form.empty(self.device))

    # ------------------------------------------------------------------ moving

    def _bring(self, call: Call, sizes: Sizes, assignment: Assignment, differentiable: bool) -> list[Tensor]:
        """Carries the arguments to the module's replicas."""
        cuts = [spec.cut for spec in call.form.specs]
        every_size = [size for own in sizes for size in own]
        tensors = resize(call.tensors, cuts, every_size)
        pairs = [self._enter(assignment, sizes, cut is not None and cut.packed) for cut in cuts]
        moved, _ = cross(
            tensors,
            [there for there, _ in pairs],
            [back for _, back in pairs],
            self.transport,
            differentiable=differentiable,
        )
        share = [size for s in assignment[self._replica] for size in sizes[s.replica][s.start : s.stop]]
        return resize(moved, cuts, share)

    def _take_back(
        self, tensors: list[Tensor], scales: list[int], sizes: Sizes, assignment: Assignment
    ) -> tuple[list[Tensor], Tensor | None]:
        """Carries the result's rows back to the items' driver replicas."""
        dim = self.spec.result_pad
        if dim is not None:
            # Replicas padded to their own longest item.
            lengths = [tensor.shape[dim] if tensor.ndim > dim else 0 for tensor in tensors]
            longest = [max(values) for values in zip(*self.transport.share(lengths), strict=True)]
            tensors = [pad_to(t, dim, n) if t.ndim > dim else t for t, n in zip(tensors, longest, strict=True)]
        pairs = [self._leave(assignment, sizes, scale) for scale in scales]
        return cross(
            tensors,
            [there for there, _ in pairs],
            [back for _, back in pairs],
            self.transport,
            differentiable=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        )

    # ------------------------------------------------------------------ planning

    def _plan_items(self, sizes: Sizes) -> Assignment:
        equal = len({size for own in sizes for size in own}) == 1
        if self.balance == "none" or (equal and self.balance == "replica"):
            return assign_items([len(own) for own in sizes], self.layout.data_size)
        return balance_items([self.spec.costs(own) for own in sizes], self.layout.data_size, self.balance)

    def _plan_enter(self, assignment: Assignment, sizes: Sizes, packed: bool) -> tuple[Route, Route]:
        offsets = row_offsets(sizes if packed else [(1,) * len(own) for own in sizes])
        return self._both_ways(
            enter_pieces(assignment, offsets),
            enter_back_pieces(assignment, offsets),
            held_rows(assignment[self._replica], offsets),
            offsets,
        )

    def _plan_leave(self, assignment: Assignment, sizes: Sizes, scale: int) -> tuple[Route, Route]:
        offsets = row_offsets([[self.spec.output_rows(size) * scale for size in own] for own in sizes])
        pieces = leave_pieces(assignment, offsets)
        back, there = self._both_ways(reverse(pieces), pieces, held_rows(assignment[self._replica], offsets), offsets)
        return there, back

    def _both_ways(self, inward: list[Piece], outward: list[Piece], held: int, offsets: Offsets) -> tuple[Route, Route]:
        """This rank's routes from the driver to the module and from the module to the driver."""
        driver, module = self.driver.replicas, self.layout.replicas
        own = offsets[self._driver_replica][-1]
        return (
            plan_route(inward, driver, module, self.rank, held),
            plan_route(outward, module, driver, self.rank, own),
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

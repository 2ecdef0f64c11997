"""The rendezvous: ranks tell each other what they are about to do, and do it together.

A rank may call an encoder that another rank skips in this step, in another order, or with nothing in it. Collectives
inside the encoder, and those of the driver's FSDP2 units, must nevertheless be entered by all ranks in one order. So at
every call of a placed module, and before each unit of the driver up to its first block, ranks exchange *I am calling
module m* or *I am at unit u*. While any call is pending, the lowest module runs, on all ranks: those that wait join
with zero items. When all are at the same unit they go on. Calls after the first block settle at the step's end.

Meeting only at the end of the step, or only at the first call of the driver, deadlocks: FSDP2's all-gather of a unit
that one rank has reached and another has not never completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_hetero.errors import BoundaryError

if TYPE_CHECKING:
    from lightning_hetero.boundary.call import Boundary
    from lightning_hetero.boundary.exchange import Transport
    from lightning_hetero.boundary.items import Call

END_OF_STEP, COLLECTIVE = -1, -2
_AT, _CALL = 0, 1


class Header(tuple[int, ...]):
    """What one rank is about to do: ``(kind, index, items, signature, wants gradient, grad mode)``."""

    __slots__ = ()

    @property
    def calls(self) -> int | None:
        """Index of the module that the rank calls, or ``None``."""
        return self[1] if self[0] == _CALL else None

    def of(self, module: int) -> Header:
        """The header as far as a module's call goes: empty if the rank does not make it."""
        return self if self.calls == module else Header((_CALL, module, 0, 0, 0, 0))

    @property
    def items(self) -> int:
        return self[2]

    @property
    def signature(self) -> int:
        return self[3]

    @property
    def wants_gradient(self) -> bool:
        return bool(self[4])

    @property
    def grad_mode(self) -> bool:
        return bool(self[5])


class Rendezvous:
    """Where the ranks of all boundaries meet, and what they share while a step runs.

    Args:
        transport: Between all ranks.
        meets: Whether ranks may differ in what they call. The copies of a single driver replica do not.

    Attributes:
        boundaries: The boundaries that meet here, in the order in which pending calls run.
        anchors: Zeros that tie the transfers of this step to its loss, not yet part of any graph.
        running: Name of the placed module that is running.
    """

    def __init__(self, transport: Transport, *, meets: bool = True) -> None:
        self.transport = transport
        self.meets = meets
        self.boundaries: list[Boundary] = []
        self.anchors: list[Tensor] = []
        self.running: str | None = None
        self._in_step = False
        self._anchored = False

    def begin_step(self) -> None:
        """To be called on all ranks before the user's step."""
        self.anchors.clear()
        self._in_step, self._anchored = True, False

    def end_step(self, loss: Tensor | None) -> Tensor | None:
        """Joins the calls that other ranks still make, and ties all transfers to the loss.

        Args:
            loss: What the step returned, if it is to be trained on.

        Returns:
            The loss. It requires a gradient if any rank's does, so that every rank runs a backward.
        """
        self._in_step = False
        wanted = self._settle(END_OF_STEP, loss is not None and (loss.requires_grad or bool(self.anchors)))
        if loss is None:
            return None
        for anchor in self.anchors:
            loss = loss + anchor.to(loss.dtype)
        self.anchors.clear()
        if wanted and not loss.requires_grad:
            loss = loss + torch.zeros_like(loss, requires_grad=True)
        return loss

    def call(self, boundary: Boundary, call: Call) -> Any:
        """Runs a call of this rank, and before it the calls of lower modules that other ranks are waiting in."""
        grad_mode = torch.is_grad_enabled()
        wants = grad_mode and any(tensor.requires_grad for tensor in call.tensors)
        mine = (_CALL, boundary.index, len(call.sizes), call.form.signature(), int(wants), int(grad_mode))
        while True:
            headers = self._share(mine)
            index = min(header.calls for header in headers if header.calls is not None)
            result = self._run(index, call if index == boundary.index else None, headers)
            if index == boundary.index:
                return result

    def meet(self) -> None:
        """To be called before a collective over driver replicas in the user's step, such as a logged mean.

        A rank that skips an encoder would otherwise wait in the collective for ranks that wait in the encoder's call.
        """
        if self._in_step and self.running is None:
            self._settle(COLLECTIVE, False)

    def watch(self, driver: nn.Module, units: Sequence[nn.Module]) -> None:
        """Makes ranks meet before the driver's root unit and before its other units up to the first block.

        To be called after ``fully_shard``: the hooks then run before those that gather parameters.

        Args:
            driver: The driver.
            units: Its FSDP2 units in the order of execution, without the driver itself.
        """
        for number, module in reversed(list(enumerate([driver, *units]))):
            module.register_forward_pre_hook(self._hook(number), prepend=True, with_kwargs=True)
        # Directly behind FSDP2's hook: others (of tensor parallelism, of a user) must find the tensors.
        reveal = driver.register_forward_pre_hook(_reveal, with_kwargs=True)
        hooks = driver._forward_pre_hooks
        order = list(hooks)
        for key in order[order.index(driver._get_fsdp_state()._pre_forward_hook_handle.id) + 1 :]:  # type: ignore[operator]
            if key != reveal.id:
                hooks.move_to_end(key)  # type: ignore[attr-defined]

    def _hook(self, number: int) -> Any:
        def meet(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._in_step or self.running is not None:
                return None  # a recomputation in the backward, or a part of a placed module
            if number == 0:
                self._anchored = False
                self._settle(0, False)
                # FSDP2 reduces a unit when the gradients of its inputs are there, or at the end of the backward if no
                # input requires one. That would differ between a rank with features and one without, so FSDP2 does
                # not get to see the root's inputs: the root is reduced at the end everywhere.
                return tree_map_only(Tensor, _Hidden, (args, kwargs))
            if self._anchored:
                return None
            place = _first_floating(args, kwargs)
            tensor = None if place is None else (args if isinstance(place, int) else kwargs)[place]  # type: ignore[index]
            wants = tensor is not None and torch.is_grad_enabled() and (tensor.requires_grad or bool(self.anchors))
            wanted = self._settle(number, wants)
            if tensor is None:
                return None
            self._anchored = True
            # What an FSDP2 unit does after its backward depends on whether its input requires a gradient, so that
            # is the same everywhere. Out of place: an in-place edit could lose FSDP2's own hook on the tensor.
            for anchor in self.anchors:
                tensor = tensor + anchor.to(tensor.dtype)
            self.anchors.clear()
            if wanted and not tensor.requires_grad and torch.is_grad_enabled():
                tensor = tensor + torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
            if isinstance(place, int):
                return (*args[:place], tensor, *args[place + 1 :]), kwargs
            return args, {**kwargs, str(place): tensor}

        return meet

    def _settle(self, unit: int, wants: bool) -> bool:
        """Waits at a unit until all ranks are there, joining the calls that they make meanwhile.

        Returns:
            Whether any rank wants a gradient there.
        """
        if not self.meets:
            return wants
        while True:
            headers = self._share((_AT, unit, 0, 0, int(wants), 0))
            pending = [header.calls for header in headers if header.calls is not None]
            if not pending:
                break
            self._run(min(pending), None, headers)
            wants = wants or (torch.is_grad_enabled() and bool(self.anchors))
        places = {header[1] for header in headers}
        if len(places) > 1:
            where = [header[1] for header in headers]
            raise BoundaryError(
                "ranks are at different places of the step and none of them calls a placed module: "
                + ", ".join(f"rank {rank} {_place_name(place)}" for rank, place in enumerate(where))
                + "; every replica must call the driver equally often in a step"
            )
        return any(header.wants_gradient for header in headers)

    def _run(self, index: int, call: Call | None, headers: list[Header]) -> Any:
        return self.boundaries[index].run(call, [header.of(index) for header in headers])

    def _share(self, mine: tuple[int, ...]) -> list[Header]:
        return [Header(values) for values in self.transport.share(mine)]


class _Hidden:
    """A tensor that FSDP2's hooks do not find among a call's arguments."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _reveal(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]

    def reveal(hidden: _Hidden) -> Tensor:
        """The tensor, cast as FSDP2 casts inputs."""
        casts = policy.cast_forward_inputs and policy.param_dtype is not None and hidden.tensor.is_floating_point()
        return hidden.tensor.to(policy.param_dtype) if casts else hidden.tensor

    return tree_map_only(_Hidden, reveal, (args, kwargs))


def _place_name(unit: int) -> str:
    if unit == END_OF_STEP:
        return "has ended its step"
    if unit == COLLECTIVE:
        return "is in a reduction over replicas (token_mean, sync_dist, all_gather)"
    return "is about to call the driver" if unit == 0 else f"is before the driver's unit {unit}"


def _first_floating(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Where the first floating-point tensor of a call is: a block's hidden states."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, Tensor) and value.is_floating_point():
            return place
    return None

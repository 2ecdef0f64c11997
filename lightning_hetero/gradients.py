"""The gradient contract: sums over replicas, one division, and a norm that counts every parameter once.

With ``R`` replicas of the driver and ``loss_r`` what replica ``r`` returned, every parameter of every module ends up
with ``(1/R) * sum_r d loss_r / d parameter``. The strategy divides the loss by ``R`` before the backward; everything
here, and FSDP2, only sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from lightning_hetero.layout import ResolvedLayout


def token_mean(module: Any, loss_sum: Tensor, num_tokens: Tensor | int) -> Tensor:
    """Scales a sum of token losses so that the gradient is that of the mean over the tokens of all replicas.

    Replicas hold different numbers of tokens; the mean of their means would weigh a token of a short batch more. The
    result is ``loss_sum * R / total`` with ``R`` replicas and ``total`` tokens on all of them, whose mean over the
    replicas (what every data-parallel strategy optimises) is ``sum(loss) / sum(tokens)``.

    Works under any strategy. With the strategy's microbatches the mean is over the tokens of all of them, as long as
    the module defines ``count_tokens(batch)`` or the batch has ``labels``. Over ``accumulate_grad_batches`` the result
    stays the mean over the batches.

    Args:
        module: The LightningModule, inside a step.
        loss_sum: Sum of this replica's token losses, a scalar.
        num_tokens: Number of tokens in it; may be 0 if the others' is not.

    Returns:
        The loss to return from ``training_step``.
    """
    total = torch.as_tensor(num_tokens, device=loss_sum.device).detach().to(_exact(loss_sum))
    group, replicas = _data_parallel_group(module)
    strategy = module.trainer.strategy if getattr(module, "_trainer", None) is not None else None
    if getattr(strategy, "runs_standin", False):
        total = torch.zeros_like(total)
    step = getattr(strategy, "token_count", None)
    if step is not None:
        total = step.add(total)
    elif replicas > 1:
        if (meet := getattr(strategy, "meet", None)) is not None:
            meet()
        total = total.clone()
        dist.all_reduce(total, group=group)
    # No tokens anywhere: the sum is zero too.
    return loss_sum * (replicas / total.clamp(min=torch.finfo(total.dtype).tiny)).to(loss_sum.dtype)


def _exact(loss: Tensor) -> torch.dtype:
    """A dtype that counts tokens exactly: bfloat16 would not go beyond 256."""
    return loss.dtype if loss.dtype == torch.float64 else torch.float32


def _data_parallel_group(module: Any) -> tuple[dist.ProcessGroup | None, int]:
    """One rank of each replica, and the number of replicas, under any strategy."""
    if not (dist.is_available() and dist.is_initialized()):
        return None, 1
    group = getattr(module.trainer.strategy, "data_parallel_group", None)
    if group is None and getattr(module, "_device_mesh", None) is not None:
        group = module.device_mesh["data_parallel"].get_group()
    group = group or dist.group.WORLD
    return group, dist.get_world_size(group)


@dataclass(frozen=True)
class Reduction:
    """Gradients that are summed over a group once a backward is done.

    Attributes:
        parameters: By path.
        group: The ranks whose gradients are summed.
    """

    parameters: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup


class GradientSync:
    """Sums what FSDP2 does not: gradients of replicated parameters, and partial gradients over tensor ranks.

    Gradients may gather over several backwards and be summed with the last one of them.

    Args:
        partial: Parameters with partial gradients, summed over tensor ranks.
        replicated: Parameters that no FSDP2 unit manages, summed over replicas.
        host: A CPU-side group of all ranks that take part.
    """

    def __init__(self, partial: Sequence[Reduction], replicated: Sequence[Reduction], host: dist.ProcessGroup) -> None:
        self.partial = partial
        self.replicated = replicated
        self.host = host
        self._own = {p for reduction in (*partial, *replicated) for p in reduction.parameters.values()}
        self._set_aside: dict[nn.Parameter, Tensor] = {}
        self._gathering = False

    def before_backward(self) -> None:
        """Sets gradients of earlier backwards aside if they are summed already."""
        if self._gathering:
            return
        self._set_aside.clear()
        for parameter in self._own:
            if parameter.grad is not None:
                self._set_aside[parameter] = parameter.grad
                parameter.grad = None

    def after_backward(self, parameters: Iterable[nn.Parameter], *, reduce: bool) -> None:
        """Sums the gradients since they were last summed, and adds those set aside.

        Args:
            parameters: All parameters of the model, whose DTensor gradients may be partial.
            reduce: Whether to do so, or to go on gathering.
        """
        self._gathering = not reduce
        if not reduce:
            return
        settle_partial(parameters)
        if self._own:
            self._fill_missing()
        for reduction in (*self.partial, *self.replicated):
            _all_reduce(reduction)
        for parameter, gradient in self._set_aside.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._set_aside.clear()

    def _fill_missing(self) -> None:
        """A gradient that only some ranks have counts as zero on the others; one that none has stays ``None``."""
        parameters = [p for reduction in (*self.partial, *self.replicated) for p in reduction.parameters.values()]
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self.host)
        for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _all_reduce(reduction: Reduction) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in reduction.parameters.values():
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=reduction.group)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def settle_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Sums DTensor gradients that autograd left as ``Partial`` over a mesh axis, so that each is the gradient."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            placements = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
            parameter.grad = gradient.redistribute(placements=placements)


def copies(parameter: Tensor, layout: ResolvedLayout) -> int:
    """On how many ranks each element of a parameter is."""
    sharded = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate() and not placement.is_partial():  # a strided shard is no Shard
                sharded *= parameter.device_mesh.size(axis)
    return len(layout.ranks) // sharded


@dataclass
class GradientNorm:
    """Norms and clipping over parameters of several meshes.

    A rank adds up the elements it holds, each weighted by one over the number of ranks that hold it; one sum over
    the world then counts every element once, whatever meshes there are.

    Attributes:
        layout_of: The layout of each parameter.
        group: The world.
    """

    layout_of: Mapping[nn.Parameter, ResolvedLayout]
    group: dist.ProcessGroup | None = None
    _copies: dict[nn.Parameter, int] = field(default_factory=dict)

    def total(self, parameters: Iterable[nn.Parameter], device: torch.device, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of all parameters, everywhere. Collective.

        Args:
            parameters: Parameters of the model.
            device: Where the result is wanted.
            norm_type: Of the p-norm; may be ``inf``.

        Returns:
            A scalar tensor, equal on all ranks.
        """
        infinite = norm_type == float("inf")
        by_weight: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None and (gradient := local(parameter.grad)).numel():
                weight = 1 if infinite else self._copies_of(parameter)
                by_weight.setdefault((weight, gradient.dtype), []).append(gradient.detach())
        # float64 from the first sum on: shards differ between layouts, and rounding must not.
        result = torch.zeros((), device=device, dtype=_wide(device))
        for (weight, _), gradients in by_weight.items():
            norms = torch.stack(torch._foreach_norm(gradients, norm_type)).to(result)
            result = torch.maximum(result, norms.max()) if infinite else result + norms.pow(norm_type).sum() / weight
        if self.group is not None:
            dist.all_reduce(result, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=self.group)
        return result if infinite else result.pow(1.0 / norm_type)

    def clip_by_norm(
        self, parameters: Iterable[nn.Parameter], device: torch.device, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``, as ``clip_grad_norm_`` does.

        Returns:
            The norm before.
        """
        parameters = list(parameters)
        norm = self.total(parameters, device, norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor.to(parameter.grad.dtype))
        return norm

    def _copies_of(self, parameter: nn.Parameter) -> int:
        if parameter not in self._copies:
            self._copies[parameter] = copies(parameter, self.layout_of[parameter])
        return self._copies[parameter]


def clip_by_value(parameters: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamps every element of every gradient to ``[-clip_value, clip_value]``."""
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).clamp_(-clip_value, clip_value)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64

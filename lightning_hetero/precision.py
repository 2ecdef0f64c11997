"""Precision: FSDP2's policy from the Trainer's flag, clipping that spans meshes, one scaler decision for the world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_hetero.gradients import GradientNorm, clip_by_value, local


def fsdp_policy(plugin: Precision) -> MixedPrecisionPolicy:
    """FSDP2's policy for the Trainer's precision: low precision to compute in, float32 to reduce gradients in.

    Under ``*-mixed`` FSDP2 gathers parameters in the low precision; the sharded ones stay in float32. Under ``*-true``
    parameters are in the low precision throughout, and only the reduction is not.
    """
    if isinstance(plugin, MixedPrecision):
        low = torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
        return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    if isinstance(plugin, HalfPrecision):
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


class HeteroPrecision:
    """Mixin of a precision plugin's class: gradient clipping that spans meshes.

    Lightning clips through the precision plugin, which has only the optimizer; the mixin finds the strategy's norm.
    """

    _norm: GradientNorm
    _device: torch.device

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self._norm.clip_by_norm(self.main_params(optimizer), self._device, float(clip_val))  # type: ignore[attr-defined]

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        clip_by_value(self.main_params(optimizer), float(clip_val))  # type: ignore[attr-defined]


class HeteroGradScaler:
    """Mixin of a ``GradScaler``'s class: overflow anywhere is overflow everywhere.

    The stock scaler looks at one mesh at a time: with two, their scales drift apart, and a rank without gradients
    raises. Here each rank looks at the gradients that it holds, and one maximum over the world decides.
    """

    _group: dist.ProcessGroup | None
    _device_of_flag: torch.device

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found_inf = found_inf.to(self._device_of_flag)
        inv_scale = inv_scale.to(self._device_of_flag)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and (gradient := local(parameter.grad)).numel():
                    by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        if self._group is not None:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)
        return {found_inf.device: found_inf}


def extend_precision(plugin: Any, norm: GradientNorm, device: torch.device) -> None:
    """Gives a precision plugin what spans meshes: the instance, and its scaler, get subclasses of their classes."""
    _extend(plugin, HeteroPrecision)
    plugin._norm, plugin._device = norm, device
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        _extend(scaler, HeteroGradScaler)
        scaler._group, scaler._device_of_flag = norm.group, device


def scale_loss(plugin: Any, loss: Tensor) -> Tensor:
    """The loss times the scaler's factor, if the plugin has a scaler."""
    scaler = getattr(plugin, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)


def _extend(instance: Any, mixin: type) -> None:
    cls = type(instance)
    if not issubclass(cls, mixin):
        instance.__class__ = type(f"Hetero{cls.__name__}", (mixin, cls), {"__module__": cls.__module__})

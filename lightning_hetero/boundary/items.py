"""Calls taken apart: the tensors that are cut into items, and the nesting that holds them.

How many items a call has and which rows are whose is the module's item spec's to say (``specs``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from lightning_hetero.boundary.specs import ItemSpec, TensorCut
from lightning_hetero.errors import BoundaryError


@dataclass(frozen=True)
class TensorSpec:
    """What all ranks must agree on of a tensor that is cut.

    Attributes:
        dtype: Of the tensor.
        shape: Without dim 0; ``None`` for a dim that is as long as the longest item.
        cut: How an argument is cut; ``None`` for a result.
        device: ``"cpu"`` for what stays in host memory, else ``None``: the rank's device.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    cut: TensorCut | None = None
    device: str | None = None

    def empty(self, device: torch.device, longest: int = 1) -> Tensor:
        """A tensor of this form without rows."""
        shape = [longest if size is None else size for size in self.shape]
        return torch.empty((0, *shape), dtype=self.dtype, device=self.device or device)


@dataclass(frozen=True)
class Form:
    """A call's arguments or result without its tensors.

    Attributes:
        slots: For every leaf its :class:`TensorSpec`, or the leaf itself if it is not cut.
        tree: The nesting.
    """

    slots: tuple[Any, ...]
    tree: TreeSpec

    @property
    def specs(self) -> list[TensorSpec]:
        """Of the tensors that are cut."""
        return [slot for slot in self.slots if isinstance(slot, TensorSpec)]

    def join(self, tensors: Sequence[Tensor]) -> Any:
        """Puts tensors into the nesting, in the order of :attr:`specs`."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(slot, TensorSpec) else slot for slot in self.slots]
        return tree_unflatten(leaves, self.tree)

    def empty(self, device: torch.device) -> list[Tensor]:
        """Tensors of this form without rows."""
        return [spec.empty(device) for spec in self.specs]

    def signature(self) -> int:
        """A number that is equal on two ranks if their calls have one form.

        Plain values count: a flag can change what the result looks like. Others are known by their type only.
        """
        plain = (TensorSpec, bool, int, float, str, type(None))
        slots = [slot if isinstance(slot, plain) else type(slot).__name__ for slot in self.slots]
        return int.from_bytes(hashlib.sha1(f"{self.tree}{slots}".encode()).digest()[:7], "big")


@dataclass(frozen=True)
class Call:
    """One rank's call of a placed module.

    Attributes:
        tensors: The arguments that are cut.
        sizes: Of its items.
        form: The rest.
    """

    tensors: list[Tensor]
    sizes: tuple[int, ...]
    form: Form


def cut_arguments(name: str, spec: ItemSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Takes a call's arguments apart.

    Args:
        name: The placed module, for errors.
        spec: Its item spec.
        args: Positional arguments, nested at will.
        kwargs: Keyword arguments.

    Raises:
        BoundaryError: If the spec cannot cut the call.
    """
    items = spec.items(name, args, kwargs)
    cuts = iter(items.cuts)
    leaves, tree = tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    slots: list[Any] = []
    for leaf in leaves:
        cut = next(cuts) if isinstance(leaf, Tensor) else None
        if cut is None:
            slots.append(leaf)
            continue
        tensor = _whole(leaf)
        # Grids and lengths that are kept on the host stay there, where the features are elsewhere.
        host = "cpu" if tensor.device.type == "cpu" and not tensor.is_floating_point() else None
        tensors.append(tensor)
        slots.append(TensorSpec(tensor.dtype, cut.form(tensor.shape), cut, host))
    return Call(tensors, items.sizes, Form(tuple(slots), tree))


def cut_result(name: str, spec: ItemSpec, result: Any, sizes: Sequence[int]) -> tuple[list[Tensor], list[int], Form]:
    """Takes a module's result apart.

    Args:
        name: The placed module, for errors.
        spec: Its item spec.
        result: A tensor, tuple, dict or ``ModelOutput``.
        sizes: Of the items that it was computed from.

    Returns:
        The tensors, the factor between each one's rows and the spec's output rows, and the rest.

    Raises:
        BoundaryError: Naming a tensor whose rows cannot be given back to the items.
    """
    leaves, tree = tree_flatten_with_path(result)
    tensors: list[Tensor] = []
    scales: list[int] = []
    slots: list[Any] = []
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            slots.append(leaf)
            continue
        tensor = _whole(leaf)
        scales.append(spec.result_scale(name, f"result{keystr(path)}", tensor.shape, sizes))
        tensors.append(tensor)
        slots.append(TensorSpec(tensor.dtype, tuple(tensor.shape[1:])))
    if not tensors:
        raise BoundaryError(f"'{name}' returned no tensor, got {type(result).__name__}")
    return tensors, scales, Form(tuple(slots), tree)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

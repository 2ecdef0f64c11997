"""Items: how a call's arguments are cut into images or clips, and its result into rows.

The default is dim 0: every tensor argument has one entry an item, every tensor of the result the same number of rows
an item.
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

from lightning_hetero.errors import BoundaryError


@dataclass(frozen=True)
class TensorSpec:
    """What all ranks must agree on of a tensor that is cut: everything but the number of rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """Nested arguments or results, taken apart.

    Attributes:
        tensors: The leaves that are cut, each ``[rows, ...]``.
        rows: Their common number of rows.
        slots: For every leaf its :class:`TensorSpec`, or the leaf itself if it is not cut.
        tree: The nesting.
    """

    tensors: list[Tensor]
    rows: int
    slots: list[Any]
    tree: TreeSpec

    def join(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Puts the tensors, or others in the same order, into the nesting."""
        remaining = iter(self.tensors if tensors is None else tensors)
        return tree_unflatten(
            [next(remaining) if isinstance(slot, TensorSpec) else slot for slot in self.slots], self.tree
        )

    def signature(self) -> int:
        """A number that is equal on two ranks if their calls can be cut alike."""
        # Plain values count: a flag can change what the result looks like. Others are known by their type.
        plain = (TensorSpec, bool, int, float, str, type(None))
        slots = [slot if isinstance(slot, plain) else type(slot).__name__ for slot in self.slots]
        return int.from_bytes(hashlib.sha1(f"{self.tree}{slots}".encode()).digest()[:7], "big")


def cut_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cut:
    """Cuts a call's arguments along dim 0.

    Args:
        name: The placed module, for errors.
        args: Positional arguments, nested at will.
        kwargs: Keyword arguments.

    Raises:
        BoundaryError: If no argument is a tensor with a dim 0, or they disagree on the number of items.
    """
    leaves, tree = tree_flatten_with_path((args, kwargs))
    rows: int | None = None
    tensors, slots = [], []
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            slots.append(leaf)
            continue
        if rows is None:
            rows, first = leaf.shape[0], _place(path)
        if leaf.shape[0] != rows:
            raise BoundaryError(
                f"'{name}' was called with tensors of different numbers of items: {first} has {rows} along dim 0, "
                f"{_place(path)} has {leaf.shape[0]} (shape {list(leaf.shape)}); every tensor needs one entry an item, "
                "pass what all items share as a plain value or keep it in the module"
            )
        tensors.append(_whole(leaf))
        slots.append(TensorSpec(leaf.dtype, tuple(leaf.shape[1:])))
    if rows is None:
        raise BoundaryError(
            f"'{name}' was called without a tensor to cut into items; pass a tensor with one entry an item along dim 0"
        )
    return Cut(tensors, rows, slots, tree)


def cut_result(name: str, result: Any, items: int) -> Cut:
    """Cuts a module's result along dim 0, which must hold the same number of rows for every item.

    Args:
        name: The placed module, for errors.
        result: A tensor, tuple, dict or ``ModelOutput``.
        items: Number of items that it was computed from.

    Raises:
        BoundaryError: Naming a tensor whose dim 0 is not a multiple of the items, or differs from the others'.
    """
    leaves, tree = tree_flatten(result)
    paths, _ = tree_flatten_with_path(result)
    tensors, slots = [], []
    rows: int | None = None
    for (path, _), leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            slots.append(leaf)
            continue
        leaf = _whole(leaf)
        if leaf.ndim == 0 or (leaf.shape[0] % items if rows is None else leaf.shape[0] != rows):
            wanted = f"a multiple of its {items} items" if rows is None else f"{rows} rows like the others"
            raise BoundaryError(
                f"'{name}' returned a tensor that cannot be given back to its items: result{keystr(path)} has shape "
                f"{list(leaf.shape)}, expected dim 0 to be {wanted}; return one entry an item, or keep other values "
                "out of the result"
            )
        rows = leaf.shape[0]
        tensors.append(leaf)
        slots.append(TensorSpec(leaf.dtype, tuple(leaf.shape[1:])))
    if rows is None:
        raise BoundaryError(f"'{name}' returned no tensor, got {type(result).__name__}")
    return Cut(tensors, rows, slots, tree)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _place(path: Sequence[Any]) -> str:
    """A leaf of ``(args, kwargs)`` as a user would write it."""
    kind, *rest = path
    return ("argument " if kind.idx == 0 else "keyword argument ") + keystr(tuple(rest))

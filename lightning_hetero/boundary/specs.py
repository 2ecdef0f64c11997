"""Item specs: how the calls of a module are cut into items, where that is more than one entry of dim 0 an item.

An item has a *size*, one integer: its patches, its frames, or just 1. Sizes are all that ranks have to tell each other
about a call's items. From them every rank derives

- how many rows of each argument tensor belong to which item (one, or ``size``: :class:`TensorCut`),
- how many rows of each result tensor belong to which item (:meth:`ItemSpec.output_rows`, times a whole number that
  is the same for all items: :meth:`ItemSpec.result_scale`),
- what the item costs (:meth:`ItemSpec.costs`).

A module gets a spec from the LightningModule's ``item_specs()`` or from its own attribute ``item_spec``:
:func:`find_spec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import MappingKey, SequenceKey, keystr, tree_flatten_with_path

from lightning_hetero.boundary.balance import item_costs
from lightning_hetero.errors import BoundaryError

Path = tuple[Any, ...]
"""Where a leaf of ``(args, kwargs)`` is, in pytree keys."""


@dataclass(frozen=True)
class TensorCut:
    """How one argument tensor is cut along dim 0.

    Attributes:
        packed: An item has as many rows as its size; else one.
        pad: The dim, dim 0 being the items, along which items of different length are padded: ranks may differ in it.
    """

    packed: bool = False
    pad: int | None = None

    def rows(self, sizes: Sequence[int]) -> list[int]:
        """Rows of each item."""
        return list(sizes) if self.packed else [1] * len(sizes)

    def form(self, shape: Sequence[int]) -> tuple[int | None, ...]:
        """The part of a tensor's shape that all ranks must agree on: without dim 0, ``None`` where it is padded."""
        return tuple(None if dim == self.pad else size for dim, size in enumerate(shape) if dim)


@dataclass(frozen=True)
class CallItems:
    """The items of one rank's call.

    Attributes:
        sizes: Of each item.
        cuts: For every tensor among the leaves of ``(args, kwargs)``, in the order of ``tree_flatten``, how it is cut;
            ``None`` if it is not (a tensor without dims).
    """

    sizes: tuple[int, ...]
    cuts: tuple[TensorCut | None, ...]

    def take(self, tensors: Sequence[Tensor], start: int, stop: int) -> tuple[CallItems, list[Tensor]]:
        """The items from ``start`` up to ``stop``.

        Args:
            tensors: Of the call, one for each of :attr:`cuts`.
            start: First item.
            stop: One past the last.

        Returns:
            The items taken, and the tensors cut down to them (views).
        """
        taken = []
        for tensor, cut in zip(tensors, self.cuts, strict=True):
            if cut is not None:
                rows = cut.rows(self.sizes)
                tensor = tensor.narrow(0, sum(rows[:start]), sum(rows[start:stop]))
            taken.append(tensor)
        return replace(self, sizes=self.sizes[start:stop]), taken


def resize(tensors: Sequence[Tensor], cuts: Sequence[TensorCut | None], sizes: Sequence[int]) -> list[Tensor]:
    """Pads, or shortens, the padded tensors to the longest of some items.

    Before tensors cross, to the longest item of all ranks: they then have one form. Afterwards, to the longest item
    of a rank's share: no work for padding that only other ranks need.

    Args:
        tensors: Of a call.
        cuts: How they are cut.
        sizes: Of the items that have to fit.

    Returns:
        The tensors; padded ones have the longest size, at least 1, along their padded dim, zeros in what was added.
    """
    longest = max(sizes, default=0) or 1
    return [
        tensor if cut is None or cut.pad is None else pad_to(tensor, cut.pad, longest)
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]


def pad_to(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor with ``size`` entries along a dim: shortened (a view), or continued with zeros."""
    given = tensor.shape[dim]
    if given >= size:
        return tensor.narrow(dim, 0, size)
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, size - given])


@dataclass(frozen=True, kw_only=True)
class ItemSpec(ABC):
    """How the calls of one module are cut into items, and its results given back to them.

    Subclass it for a module whose calls none of the specs here describes; :meth:`items` is all that has to be defined.

    Args:
        linear: Cost of each unit of an item's size, for balancing.
        quadratic: Cost of each pair of units, see :func:`~lightning_hetero.boundary.balance.item_costs`.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    @abstractmethod
    def items(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallItems:
        """Counts the items of a call and says how its tensors are cut; called once for each call.

        Args:
            name: The placed module, for errors.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            BoundaryError: Naming the argument that does not fit.
        """

    def output_rows(self, size: int) -> int:
        """Rows that an item of a size has in the result, up to a factor that is the same for all items."""
        return 1

    def allows(self, scale: int) -> bool:
        """Whether a result tensor may have ``scale`` times the output rows."""
        return True

    @property
    def result_pad(self) -> int | None:
        """The dim of result tensors (those that have it) that is as long as the longest item needs, if there is one.

        Ranks pad it to a common length before results cross.
        """
        return None

    def costs(self, sizes: Sequence[int]) -> list[float]:
        """What each item costs the module."""
        return item_costs(sizes, linear=self.linear, quadratic=self.quadratic)

    def result_scale(self, name: str, where: str, shape: Sequence[int], sizes: Sequence[int]) -> int:
        """The factor between :meth:`output_rows` and the rows that an item has in a result tensor.

        A property of the module, not of the batch, so it is equal on all ranks.

        Args:
            name: The placed module, for errors.
            where: The tensor as a user would write it, for errors.
            shape: Of the tensor.
            sizes: Of the items that it was computed from, at least one.

        Raises:
            BoundaryError: If the rows cannot be given back to the items.
        """
        expected = sum(map(self.output_rows, sizes))
        scale, rest = divmod(shape[0], expected) if len(shape) else (0, 1)
        if rest or not self.allows(scale):
            raise BoundaryError(
                f"'{name}' returned a tensor that cannot be given back to its items: {where} has shape {list(shape)}, "
                f"expected dim 0 to be {self._expected(expected, len(sizes))}; return such tensors only, or give the "
                "module another item spec (its attribute item_spec, or the LightningModule's item_specs())"
            )
        return scale

    def _expected(self, rows: int, items: int) -> str:
        return f"a multiple of {rows} for its {items} items"


@dataclass(frozen=True, kw_only=True)
class Dim0Items(ItemSpec):
    """Every tensor argument has one entry an item; every result tensor as many rows for each item. The default."""

    def items(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallItems:
        for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and leaf.ndim:
                return _call_items(name, args, kwargs, [1] * leaf.shape[0], path, {})
        raise BoundaryError(
            f"'{name}' was called without a tensor to cut into items; pass one that has one entry an item along dim 0"
        )


@dataclass(frozen=True)
class PackedPatches(ItemSpec):
    """Images or videos of different size, their patches packed one after the other, beside a grid of their sizes.

    The form that Qwen-VL and its relatives use. An item's size is the number of its patches; its result is that many
    rows, or one for each square of ``merge`` x ``merge`` patches (tensors of both kinds may be in one result). All
    other tensors of a call have one entry an item.

    The grid is read on the host, once for each call. Keep it on the CPU (a ``transfer_batch_to_device`` that leaves
    it there): reading it from an accelerator waits until that has caught up.

    Args:
        patches: The argument that holds the patches, ``[sum of patches, ...]``: its keyword. A call that does not
            have the keyword has it as first positional argument.
        grid: The argument that holds ``(frames, rows, columns)`` in patches, ``[items, 3]``: its keyword, or the
            second positional argument.
        merge: Side of the squares of patches that become one row; 1 if none do.
        linear: Cost of a patch by itself.
        quadratic: Cost of a pair of patches. Attention within single frames or windows costs less than that.

    Example:
        >>> grid_thw = torch.tensor([[1, 4, 4], [2, 2, 2]])
        >>> PackedPatches().items("visual", (torch.zeros(24, 8),), {"grid_thw": grid_thw}).sizes
        (16, 8)
    """

    patches: str = "pixel_values"
    grid: str = "grid_thw"
    merge: int = 2

    def items(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallItems:
        patches_path, patches = _argument(name, args, kwargs, self.patches, 0)
        grid_path, grid = _argument(name, args, kwargs, self.grid, 1)
        if grid.ndim != 2 or grid.shape[1] != 3 or grid.is_floating_point():
            raise BoundaryError(
                f"'{name}': {_place(grid_path)} must hold (frames, rows, columns) of each item as integers "
                f"[items, 3], got shape {list(grid.shape)} of {grid.dtype}"
            )
        sizes = []
        for frames, rows, columns in grid.tolist():
            if min(frames, rows, columns) < 1 or rows % self.merge or columns % self.merge:
                raise BoundaryError(
                    f"'{name}': {_place(grid_path)} has the item {(frames, rows, columns)}, whose rows and columns "
                    f"must be multiples of the spatial merge factor {self.merge} (PackedPatches(merge=...))"
                )
            sizes.append(frames * rows * columns)
        if not patches.ndim or patches.shape[0] != sum(sizes):
            raise BoundaryError(
                f"'{name}': {_place(patches_path)} must have as many rows as {_place(grid_path)} has patches, "
                f"{sum(sizes)} for {len(sizes)} items, got shape {list(patches.shape)}"
            )
        return _call_items(name, args, kwargs, sizes, grid_path, {patches_path: TensorCut(packed=True)})

    def output_rows(self, size: int) -> int:
        return size // self.merge**2

    def allows(self, scale: int) -> bool:
        return scale in (1, self.merge**2)

    def _expected(self, rows: int, items: int) -> str:
        return f"{rows} (merged rows) or {rows * self.merge**2} (patches) for its {items} items"


@dataclass(frozen=True)
class PaddedAudio(ItemSpec):
    """Clips (or other sequences) that are padded to the longest of their batch, with their lengths.

    Every tensor of a call has one entry an item. Ranks pad to different lengths; :func:`resize` gives them one form
    to cross in, and cuts each rank's share down to its own longest clip. The module must accept any number of frames,
    and what it returns for a clip must not depend on the padding. One that wants a fixed number of frames needs no
    spec but :class:`Dim0Items`.

    An item's size is its length. Lengths on an accelerator are not read, because that would wait for it: the padded
    length then stands for all. Keep them on the CPU to have the items balanced by length.

    Args:
        features: The argument that is padded, ``[items, ..., frames]``: its keyword. A call that does not have the
            keyword has it as first positional argument.
        lengths: The argument that holds the valid frames, integers ``[items]``: its keyword, or the second positional
            argument. ``None`` if there is none.
        masks: Keywords of further arguments with frames along their last dim, where zero means padding.
        dim: The padded dim of the features.
        rows_dim: The dim of result tensors (those that have it) that is as long as the longest clip needs.
        linear: Cost of a frame by itself.
        quadratic: Cost of a pair of frames.
    """

    features: str = "features"
    lengths: str | None = "lengths"
    masks: tuple[str, ...] = ()
    dim: int = -1
    rows_dim: int = 1

    def items(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallItems:
        features_path, features = _argument(name, args, kwargs, self.features, 0)
        if features.ndim < 2 or not self.dim % features.ndim > 0:
            raise BoundaryError(
                f"'{name}': {_place(features_path)} must have items along dim 0 and frames along dim {self.dim} "
                f"(PaddedAudio(dim=...)), got shape {list(features.shape)}"
            )
        count, frames = features.shape[0], features.shape[self.dim]
        padded = {features_path: TensorCut(pad=self.dim % features.ndim)}
        for keyword in self.masks:
            path, mask = _argument(name, args, kwargs, keyword, None)
            if mask.ndim < 2 or mask.shape[-1] != frames:
                raise BoundaryError(
                    f"'{name}': {_place(path)} must have the {frames} frames of {_place(features_path)} along its last "
                    f"dim, got shape {list(mask.shape)}"
                )
            padded[path] = TensorCut(pad=mask.ndim - 1)
        sizes = [frames] * count
        if self.lengths is not None:
            path, lengths = _argument(name, args, kwargs, self.lengths, 1)
            if lengths.shape != (count,) or lengths.is_floating_point():
                raise BoundaryError(
                    f"'{name}': {_place(path)} must hold one integer for each of the {count} items of "
                    f"{_place(features_path)}, got shape {list(lengths.shape)} of {lengths.dtype}"
                )
            if lengths.device.type == "cpu":
                sizes = lengths.tolist()
                if sizes and not 0 <= min(sizes) <= max(sizes) <= frames:
                    raise BoundaryError(
                        f"'{name}': {_place(path)} must be from 0 to the {frames} frames that {_place(features_path)} "
                        f"has along dim {self.dim}, got {min(sizes)} to {max(sizes)}"
                    )
        return _call_items(name, args, kwargs, sizes, features_path, padded)

    @property
    def result_pad(self) -> int | None:
        return self.rows_dim


def find_spec(module: nn.Module, name: str, lightning_module: nn.Module) -> ItemSpec:
    """The item spec of a placed module.

    Looked for, in this order: what the LightningModule's ``item_specs()`` has under the layout's name, the module's
    dotted path, or its class (the most derived one); the module's attribute ``item_spec``; :class:`Dim0Items`.

    Args:
        module: The placed module.
        name: Of its layout.
        lightning_module: That holds it.

    Raises:
        BoundaryError: If what was found is not an :class:`ItemSpec`.

    Example:
        >>> class Model(LightningModule):
        ...     def item_specs(self):
        ...         return {"vision": PackedPatches(merge=2), MyAudioEncoder: PaddedAudio("input_features")}
    """
    hook = getattr(lightning_module, "item_specs", None)
    specs: Mapping[str | type, Any] = hook() if callable(hook) else {}
    paths = [path for path, child in lightning_module.named_modules(remove_duplicate=False) if child is module]
    for key in (name, *paths, *type(module).__mro__):
        if key in specs:
            return _checked(specs[key], f"item_specs()[{key.__name__ if isinstance(key, type) else repr(key)}]")
    own = getattr(module, "item_spec", None)
    return Dim0Items() if own is None else _checked(own, f"the attribute item_spec of '{name}'")


def _checked(spec: Any, where: str) -> ItemSpec:
    if not isinstance(spec, ItemSpec):
        raise BoundaryError(f"{where} must be an ItemSpec (such as PackedPatches()), got {spec!r}")
    return spec


def _call_items(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: Sequence[int],
    counted: Path,
    special: Mapping[Path, TensorCut],
) -> CallItems:
    """Cuts the tensors that are not special into one entry an item.

    Args:
        name: The placed module, for errors.
        args: Positional arguments.
        kwargs: Keyword arguments.
        sizes: Of the items.
        counted: The tensor from which they were counted, for errors.
        special: How the special ones are cut.
    """
    cuts: list[TensorCut | None] = []
    for path, tensor in tree_flatten_with_path((args, kwargs))[0]:
        if not isinstance(tensor, Tensor):
            continue
        cut = special.get(path, TensorCut() if tensor.ndim else None)
        if cut is not None and not cut.packed and tensor.shape[0] != len(sizes):
            raise BoundaryError(
                f"'{name}' was called with tensors of different numbers of items: {_place(counted)} has {len(sizes)}, "
                f"{_place(path)} has {tensor.shape[0]} along dim 0 (shape {list(tensor.shape)}); every tensor needs "
                "one entry an item, pass what all items share as a plain value, keep it in the module, or give the "
                "module an item spec that knows the tensor"
            )
        cuts.append(cut)
    return CallItems(tuple(sizes), tuple(cuts))


def _argument(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], keyword: str, position: int | None
) -> tuple[Path, Tensor]:
    """The tensor given under a keyword, or else at a position, and where it is."""
    path: Path
    if keyword in kwargs:
        path, value = (SequenceKey(1), MappingKey(keyword)), kwargs[keyword]
    elif position is not None and position < len(args):
        path, value = (SequenceKey(0), SequenceKey(position)), args[position]
    else:
        instead = "" if position is None else f" (or a positional argument [{position}] in its place)"
        raise BoundaryError(
            f"'{name}' was called without '{keyword}'{instead}, which its item spec names; "
            f"it got {len(args)} positional arguments and the keywords {list(kwargs)}"
        )
    if not isinstance(value, Tensor):
        raise BoundaryError(f"'{name}': {_place(path)} must be a tensor, got {type(value).__name__}")
    return path, value


def _place(path: Path) -> str:
    """A leaf of ``(args, kwargs)`` as a user would write it."""
    kind, *rest = path
    return ("argument " if kind.idx == 0 else "keyword argument ") + keystr(tuple(rest))

"""Activation checkpointing: a block keeps only its inputs, and runs again in the backward with the same masks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.errors import PlanError
from lightning_hetero.layout import ResolvedLayout, is_inside
from lightning_hetero.parallelize.plans import match
from lightning_hetero.rng import ModuleStreams, Replay


def resolve_recompute(
    module: nn.Module, layout: ResolvedLayout, blocks: Iterable[str], nested: Iterable[str] = ()
) -> list[str]:
    """Paths of the submodules that are recomputed, none of them inside another.

    Args:
        module: The placed module.
        layout: Its layout.
        blocks: Paths of its blocks, which ``"full"`` stands for: its FSDP2 units. One that contains a placed module is
            left out, since a call over a boundary is never repeated.
        nested: Paths, relative to the module, of placed modules inside it.

    Raises:
        PlanError: If a pattern matches nothing, or something that contains a placed module, or ``"full"`` finds no
            block.
    """
    asked = layout.config.activation_checkpointing
    key = f"layouts.{layout.name}.activation_checkpointing"
    nested = list(nested)
    if asked == "none":
        return []
    if asked == "full":
        paths = [path for path in blocks if not _contains(path, nested)]
        if not paths:
            raise PlanError(
                f"{key}: 'full' recomputes every block, but {type(module).__name__} ('{layout.path}') has none to "
                f"repeat; give a list of patterns of submodules, or name blocks in layouts.{layout.name}.fsdp_units"
            )
        return _outermost(paths)
    if isinstance(asked, str):
        raise PlanError(f"{key} must be 'none', 'full' or a list of patterns of submodules, got {asked!r}")
    candidates = [path for path, _ in module.named_modules() if path and not any(is_inside(path, n) for n in nested)]
    found: list[str] = []
    for pattern in asked:
        matches = match(pattern, candidates)
        if not matches:
            raise PlanError(
                f"{key}: pattern '{pattern}' matches no submodule of {type(module).__name__} ('{layout.path}')"
            )
        for path in matches:
            if _contains(path, nested):
                raise PlanError(
                    f"{key}: pattern '{pattern}' matches '{path}', which contains a placed module, and a call of a "
                    "placed module is never recomputed; name the blocks beside it"
                )
        found += matches
    return _outermost(found)


def apply_recompute(module: nn.Module, paths: Iterable[str], streams: ModuleStreams) -> None:
    """Makes submodules recompute their activations in the backward.

    Only ``forward`` is taken over (each gets a subclass of its class, as ``fully_shard`` does), so parameters keep
    their names, and hooks of tensor parallelism and FSDP2 run once. To be applied after the tensor plan and before
    FSDP2. A block that updates buffers in its forward (batch norm) updates them twice.

    Args:
        module: The placed module.
        paths: Of the submodules (:func:`resolve_recompute`).
        streams: The module's random streams; a recomputation draws from them what the forward drew.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for path in paths:
        block = module.get_submodule(path)
        cls = type(block)
        if issubclass(cls, RecomputedModule):
            continue
        if cls not in classes:
            classes[cls] = type(f"Recomputed{cls.__name__}", (RecomputedModule, cls), {"__module__": cls.__module__})
        block.__class__ = classes[cls]
        block._recompute_streams = streams  # type: ignore[assignment]


class RecomputedModule:
    """Mixin of a module's class: ``forward`` keeps only its inputs, and runs again when the backward needs more."""

    _recompute_streams: ModuleStreams

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            partial(super().forward, **kwargs),  # type: ignore[misc]
            *args,
            use_reentrant=False,
            # It would keep one stream, and the accelerator's only if a positional argument is there.
            preserve_rng_state=False,
            context_fn=self._recompute_contexts,
        )

    def _recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        streams = self._recompute_streams
        return nullcontext(), Replay(streams, streams.snapshot())


def _contains(path: str, nested: Iterable[str]) -> bool:
    return any(is_inside(other, path) for other in nested)


def _outermost(paths: Iterable[str]) -> list[str]:
    unique = list(dict.fromkeys(paths))
    return [path for path in unique if not any(is_inside(path, other) for other in unique if other != path)]

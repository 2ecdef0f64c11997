"""The step's schedule: microbatches, run one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from lightning_hetero.errors import HeteroError

IGNORE_INDEX = -100


def split_batch(module: Any, batch: Any, parts: int) -> list[Any]:
    """Cuts a batch into microbatches: by the LightningModule's ``split_batch(batch, n)``, else along dim 0.

    Args:
        module: The LightningModule.
        batch: Tensors and lists of one entry a sample, nested in dicts, tuples and dataclass-like outputs; anything
            else goes to every microbatch.
        parts: Number of microbatches. The first ones get one sample more where they do not divide.

    Returns:
        ``parts`` batches.

    Raises:
        HeteroError: If leaves disagree on the number of samples, or there are fewer samples than microbatches.
    """
    hook = getattr(module, "split_batch", None)
    if callable(hook):
        batches = list(hook(batch, parts))
        if len(batches) != parts:
            raise HeteroError(
                f"{type(module).__name__}.split_batch(batch, {parts}) returned {len(batches)} batches, expected {parts}"
            )
        return batches
    leaves, tree = tree_flatten_with_path(batch, is_leaf=_is_list_of_samples)
    samples: int | None = None
    first = ""
    for path, leaf in leaves:
        if (size := _samples(leaf)) is None:
            continue
        if samples is None:
            samples, first = size, keystr(path)
        if size != samples:
            raise HeteroError(
                f"strategy.microbatches={parts}: the batch cannot be cut along dim 0, batch{first} has {samples} "
                f"samples and batch{keystr(path)} has {size}; define split_batch(batch, n) in {type(module).__name__}"
            )
    if samples is None or samples < parts:
        raise HeteroError(
            f"strategy.microbatches={parts}: the batch has {samples or 'no'} samples; use a larger batch_size, fewer "
            f"microbatches, or drop_last, or define split_batch(batch, n) in {type(module).__name__}"
        )
    ends = [(k + 1) * (samples // parts) + min(k + 1, samples % parts) for k in range(parts)]
    starts = [0, *ends[:-1]]
    return [
        tree_unflatten([leaf if _samples(leaf) is None else leaf[start:stop] for _, leaf in leaves], tree)
        for start, stop in zip(starts, ends, strict=True)
    ]


def declared_tokens(module: Any, batch: Any) -> Tensor | int | None:
    """Tokens that a batch's loss is summed over, before it runs.

    Returns:
        The LightningModule's ``count_tokens(batch)``, else the labels that are not -100 in ``batch["labels"]``, else
        ``None``. Labels are counted where they lie, without waiting for a device.
    """
    hook = getattr(module, "count_tokens", None)
    if callable(hook):
        return hook(batch)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return (labels != IGNORE_INDEX).sum() if isinstance(labels, Tensor) else None


class TokenCount:
    """The tokens of a step: declared for the whole batch, and counted again while its microbatches run.

    Args:
        microbatches: Number of microbatches.
        declared: Tokens of this replica's batch.
        total: Tokens of all replicas' batches.
    """

    def __init__(self, microbatches: int, declared: Tensor, total: Tensor) -> None:
        self.microbatches = microbatches
        self.declared = declared
        self.total = total
        self.counted = torch.zeros_like(declared)

    def add(self, tokens: Tensor) -> Tensor:
        """Counts a microbatch's tokens.

        Returns:
            What to divide the sum of its losses by: the step's tokens over the number of microbatches, since the
            step takes the mean over these.
        """
        self.counted = self.counted + tokens
        return self.total / self.microbatches

    def check(self) -> None:
        """Checks at the step's end that what was counted is what was declared.

        Raises:
            HeteroError: On the CPU. On a device the check is an assertion there, which waits for nothing.
        """
        same = self.counted == self.declared
        if same.device.type != "cpu":
            torch._assert_async(same, "token_mean: the microbatches' tokens do not add up to count_tokens(batch)")
        elif not same:
            raise HeteroError(
                f"token_mean was given {float(self.counted):g} tokens over the step's {self.microbatches} "
                f"microbatches, but count_tokens(batch), or labels that are not -100, say {float(self.declared):g}; "
                "make count_tokens(batch) count what training_step passes to token_mean"
            )


def _is_list_of_samples(node: Any) -> bool:
    """A list has one entry a sample, as in a batch of texts or of images of different sizes."""
    return isinstance(node, list)


def _samples(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list) else None

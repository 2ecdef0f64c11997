"""Which random stream each part of a tensor-parallel module draws from, read from its plan."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from lightning_hetero.parallelize.plans import STYLES, Plan
from lightning_hetero.rng import ModuleStreams


def switch_streams(module: nn.Module, plan: Plan, streams: ModuleStreams) -> None:
    """Lets a tensor-parallel module draw from the stream that fits its activations, without its code knowing.

    What is drawn after a planned layer is drawn for that layer's output: from the sharded stream if the output is
    split over the tensor axis (after ``colwise``: attention dropout, dropout inside an MLP), from the shared one if
    every rank has it whole (after ``rowwise``, an embedding, a gathered head). Layers whose style leaves their
    activations alone change nothing. When the module returns, its shared stream is in use again.

    Args:
        module: The placed module.
        plan: Concrete paths to styles.
        streams: The module's streams.
    """
    outputs = {path: sharded for path, style in plan.items() if (sharded := output_is_sharded(style)) is not None}
    if not any(outputs.values()):
        return
    for path, sharded in outputs.items():
        _use_after(module.get_submodule(path), streams, sharded)
    _use_after(module, streams, sharded=False)


def output_is_sharded(style: str | ParallelStyle) -> bool | None:
    """Whether a layer of this style returns activations split over the tensor axis; ``None`` if it does not decide."""
    if isinstance(style, str):
        make = STYLES[style].make
        if make is None:
            return None
        style = make()
    if isinstance(style, SequenceParallel):
        return True
    placements = getattr(style, "output_layouts", None)
    return None if placements is None else any(placement.is_shard() for placement in placements)


def _use_after(module: nn.Module, streams: ModuleStreams, sharded: bool) -> None:
    module.register_forward_hook(lambda *_: streams.use(sharded=sharded))

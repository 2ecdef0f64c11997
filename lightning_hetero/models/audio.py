"""A small audio encoder that turns clips of any length into rows an LLM can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.boundary.specs import ItemSpec, PaddedAudio
from lightning_hetero.models.blocks import ENCODER_PLAN, MLP, EncoderBlock, init_encoder


@dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """The sizes of an `AudioEncoder`; its output width is set by the LLM that reads the rows.

    Args:
        mels: mel bands of a frame.
        width: width of the residual stream, even.
        depth: number of blocks.
        heads: attention heads; divides `width`.
        mlp_ratio: width of the MLP's hidden layer over `width`.
        dropout: probability of dropping an attention weight or an entry of a block's branch.
    """

    mels: int = 16
    width: int = 64
    depth: int = 2
    heads: int = 4
    mlp_ratio: float = 4.0
    dropout: float = 0.0


def sinusoidal_positions(length: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of positions 0 to `length` - 1 (Vaswani et al. 2017), [length, width].

    Computed in float32, or in float64 when that is `dtype`; no buffer has to survive the meta device.
    """
    compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.arange(length, device=device, dtype=compute_dtype)
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device, dtype=compute_dtype) / width)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)


def valid_rows(rows: Tensor, row_lengths: Tensor) -> Tensor:
    """What an `AudioEncoder` returned, without the padding: the rows of all clips, one after the other.

    Args:
        rows: [N, T, width].
        row_lengths: [N].

    Returns:
        [sum of row_lengths, width]. On an accelerator the size has to be read back, which waits for it.
    """
    positions = torch.arange(rows.shape[1], device=rows.device)
    return rows[positions < row_lengths.to(rows.device)[:, None]]


class AudioEncoder(nn.Module):
    """Two convolutions that halve the frames, pre-norm transformer blocks, and a projector to the LLM's width.

    What comes out for a clip depends on its valid frames only, not on how far it is padded or on what else is in the
    batch.

    Args:
        output_width: width of the returned rows.
        mels, width, depth, heads, mlp_ratio, dropout: see `AudioConfig`.

    Raises:
        ValueError: if the heads do not divide the width, or it is odd.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = ENCODER_PLAN
    """Module pattern -> tensor-parallel style. Modules that it does not name are replicated, with equal gradients on
    all tensor ranks."""

    fsdp_units: ClassVar[list[str]] = ["blocks.*"]
    """Patterns of the modules that become FSDP2 units of their own."""

    item_spec: ClassVar[ItemSpec] = PaddedAudio()
    """How a call is cut into clips."""

    def __init__(
        self,
        *,
        output_width: int,
        mels: int = 16,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}.")
        if width % 2:
            raise ValueError(f"width={width} is odd; sines and cosines take half of it each.")
        self.heads = heads
        self.conv1 = nn.Conv1d(mels, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, int(mlp_ratio * width), dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.projector = MLP(width, output_width, output_width)
        self.init_weights()

    @property
    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Projection pattern -> number of heads in it, which the tensor-parallel size must divide."""
        return {f"blocks.*.attn.{name}": self.heads for name in ("q_proj", "k_proj", "v_proj", "o_proj")}

    def init_weights(self) -> None:
        """Draws all weights from the default random stream; a no-op for parameters on the meta device."""
        init_encoder(self, len(self.blocks))

    @staticmethod
    def row_lengths(lengths: Tensor) -> Tensor:
        """Rows that clips of so many frames become: every second frame, the first included."""
        return (lengths + 1) // 2

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes clips.

        Args:
            features: [N, mels, frames] log-mel frames, anything behind a clip's length; N may be zero.
            lengths: [N] int64, valid frames of each clip, on any device.

        Returns:
            [N, T, output_width] rows, zero behind a clip's last, with T = `row_lengths(frames)`; and [N], the number
            of each clip's rows, on the device of the features.
        """
        lengths = lengths.to(features.device)
        frame = torch.arange(features.shape[-1], device=features.device)
        padding_N1T = (frame >= lengths[:, None]).unsqueeze(1)
        # Zeros behind the end are what a convolution sees behind the end of an unpadded clip too.
        x_NDT = F.gelu(self.conv1(features.masked_fill(padding_N1T, 0.0)))
        x_NDT = F.gelu(self.conv2(x_NDT.masked_fill(padding_N1T, 0.0)))

        x_NTD = x_NDT.transpose(1, 2)
        x_NTD = x_NTD + sinusoidal_positions(x_NTD.shape[1], x_NTD.shape[2], x_NTD.device, x_NTD.dtype)
        row_lengths = self.row_lengths(lengths)
        valid_NT = frame[: x_NTD.shape[1]] < row_lengths[:, None]
        # A clip without frames looks at its padding: not every attention kernel bears a softmax over nothing.
        keys_NT = valid_NT | (row_lengths == 0)[:, None]
        for block in self.blocks:
            x_NTD = block(x_NTD, keys_NT[:, None, None, :])
        rows_NTD = self.projector(self.norm(x_NTD))
        return rows_NTD.masked_fill(~valid_NT.unsqueeze(-1), 0.0), row_lengths

"""A small vision transformer that turns images into rows an LLM can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_hetero.models.blocks import ENCODER_PLAN, MLP, EncoderBlock, init_encoder


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The sizes of a `VisionEncoder`; its output width is set by the LLM that reads the rows.

    Args:
        image_size: height and width of an image, in pixels.
        in_channels: channels of an image.
        patch_size: height and width of a patch, in pixels; divides `image_size`.
        width: width of the residual stream.
        depth: number of blocks.
        heads: attention heads; divides `width`.
        mlp_ratio: width of the MLP's hidden layer over `width`.
        tokens_per_image: rows that an image becomes, a square number; the patch grid is averaged down to it.
            None keeps one row per patch.
        dropout: probability of dropping an attention weight or an entry of a block's branch.
    """

    image_size: int = 8
    in_channels: int = 1
    patch_size: int = 2
    width: int = 64
    depth: int = 3
    heads: int = 4
    mlp_ratio: float = 4.0
    tokens_per_image: int | None = None
    dropout: float = 0.0


class VisionEncoder(nn.Module):
    """Patches, pre-norm transformer blocks, optional pooling of the patch grid, and a projector to the LLM's width.

    Args:
        output_width: width of the returned rows.
        image_size, in_channels, patch_size, width, depth, heads, mlp_ratio, tokens_per_image, dropout: see
            `VisionConfig`.

    Raises:
        ValueError: if the patch size does not divide the image, the heads do not divide the width, or
            `tokens_per_image` is not the square of a divisor of the patch grid's side.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = ENCODER_PLAN
    """Module pattern -> tensor-parallel style. Modules that it does not name are replicated, with equal gradients on
    all tensor ranks."""

    fsdp_units: ClassVar[list[str]] = ["blocks.*"]
    """Patterns of the modules that become FSDP2 units of their own."""

    def __init__(
        self,
        *,
        output_width: int,
        image_size: int = 8,
        in_channels: int = 1,
        patch_size: int = 2,
        width: int = 64,
        depth: int = 3,
        heads: int = 4,
        mlp_ratio: float = 4.0,
        tokens_per_image: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patch_size={patch_size} does not divide image_size={image_size}.")
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}.")
        grid = image_size // patch_size
        pooled_grid = grid if tokens_per_image is None else isqrt(tokens_per_image)
        if tokens_per_image is not None and (
            tokens_per_image != pooled_grid**2 or tokens_per_image < 1 or grid % pooled_grid
        ):
            raise ValueError(
                f"tokens_per_image={tokens_per_image} is not the square of a divisor of the patch grid's side {grid}."
            )
        self.patch_size = patch_size
        self.heads = heads
        self.tokens_per_image = pooled_grid**2
        self.pooled_grid = pooled_grid
        self.pool = grid // pooled_grid

        self.patch_embed = nn.Linear(in_channels * patch_size**2, width)
        self.position_embed = nn.Parameter(torch.empty(grid**2, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, int(mlp_ratio * width), dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.projector = MLP(width, output_width, output_width)
        self.init_weights()

    @property
    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Projection pattern -> number of heads in it, which the tensor-parallel size must divide."""
        return {f"blocks.*.attn.{name}": self.heads for name in ("q_proj", "k_proj", "v_proj", "o_proj")}

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws all weights from the default random stream; a no-op for parameters on the meta device."""
        init_encoder(self, len(self.blocks))
        nn.init.normal_(self.position_embed, std=self.position_embed.shape[1] ** -0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Encodes images.

        Args:
            images: [N, C, H, W] floats; N may be zero.

        Returns:
            [N, tokens_per_image, output_width].
        """
        patch = self.patch_size
        x_NTD = images.unflatten(2, (-1, patch)).unflatten(4, (-1, patch))  # [N, C, rows, patch, columns, patch]
        x_NTD = x_NTD.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x_NTD = self.patch_embed(x_NTD) + self.position_embed
        for block in self.blocks:
            x_NTD = block(x_NTD)
        x_NTD = self.norm(x_NTD)
        if self.pool > 1:
            side = (self.pooled_grid, self.pool)
            x_NTD = x_NTD.unflatten(1, (*side, *side)).mean(dim=(2, 4)).flatten(1, 2)
        return self.projector(x_NTD)

"""A small vision transformer that turns images into rows an LLM can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class MLP(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, in_width: int, hidden_width: int, out_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_width, hidden_width)
        self.fc2 = nn.Linear(hidden_width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class VisionAttention(nn.Module):
    """Bidirectional multi-head attention.

    The number of heads is read from the projections' output, so the same code runs on a tensor-parallel rank that
    holds some of the heads.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.dropout = dropout
        self.q_proj = nn.Linear(width, width)
        # Without bias: softmax is blind to it, so its gradient would be rounding noise.
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x_NTD: Tensor) -> Tensor:
        q, k, v = (
            proj(x_NTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_NHTK = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.o_proj(out_NHTK.transpose(1, 2).flatten(2))


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = VisionAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, mlp_width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NTD: Tensor) -> Tensor:
        x_NTD = x_NTD + self.dropout(self.attn(self.attn_norm(x_NTD)))
        return x_NTD + self.dropout(self.mlp(self.mlp_norm(x_NTD)))


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

    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "blocks.*.attn.q_proj": "colwise",
        "blocks.*.attn.k_proj": "colwise",
        "blocks.*.attn.v_proj": "colwise",
        "blocks.*.attn.o_proj": "rowwise",
        "blocks.*.mlp.fc1": "colwise",
        "blocks.*.mlp.fc2": "rowwise",
        "projector.fc1": "colwise",
        "projector.fc2": "rowwise",
    }
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
        self.blocks = nn.ModuleList(VisionBlock(width, heads, int(mlp_ratio * width), dropout) for _ in range(depth))
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
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                branch_end = name.startswith("blocks.") and name.endswith(("o_proj", "fc2"))
                std = module.in_features**-0.5 * ((2 * len(self.blocks)) ** -0.5 if branch_end else 1.0)
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
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

"""What the reference encoders share: bidirectional pre-norm transformer blocks."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ENCODER_PLAN: Final[dict[str, str]] = {
    "blocks.*.attn.q_proj": "colwise",
    "blocks.*.attn.k_proj": "colwise",
    "blocks.*.attn.v_proj": "colwise",
    "blocks.*.attn.o_proj": "rowwise",
    "blocks.*.mlp.fc1": "colwise",
    "blocks.*.mlp.fc2": "rowwise",
    "projector.fc1": "colwise",
    "projector.fc2": "rowwise",
}
"""Tensor-parallel styles of an encoder that has `EncoderBlock`s in `blocks` and an `MLP` as its `projector`."""


class MLP(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, in_width: int, hidden_width: int, out_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_width, hidden_width)
        self.fc2 = nn.Linear(hidden_width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderAttention(nn.Module):
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

    def forward(self, x_NTD: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            proj(x_NTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.dropout if self.training else 0.0
        out_NHTK = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.o_proj(out_NHTK.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = EncoderAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, mlp_width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NTD: Tensor, mask: Tensor | None = None) -> Tensor:
        """Adds what attention and MLP make of the rows.

        Args:
            x_NTD: [N, T, D] residual stream.
            mask: bool, broadcastable to [N, heads, T, T], True where a row (dim 2) may look at another (dim 3).
        """
        x_NTD = x_NTD + self.dropout(self.attn(self.attn_norm(x_NTD), mask))
        return x_NTD + self.dropout(self.mlp(self.mlp_norm(x_NTD)))


@torch.no_grad()
def init_encoder(encoder: nn.Module, depth: int) -> None:
    """Draws the weights of an encoder's linears, convolutions and norms from the default random stream.

    Weights have the scale that keeps a row's variance; the ends of the branches of `depth` blocks are smaller, so that
    the residual stream keeps it too. A no-op for parameters on the meta device.
    """
    for name, module in encoder.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            branch_end = name.startswith("blocks.") and name.endswith(("o_proj", "fc2"))
            std = module.weight[0].numel() ** -0.5 * ((2 * depth) ** -0.5 if branch_end else 1.0)
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()

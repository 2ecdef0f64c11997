"""A small decoder-only LLM: RMSNorm, RoPE, grouped-query attention with query/key norm, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes of a `Decoder`.

    Args:
        vocab_size: rows of the embedding and of the head; a multiple of the tensor-parallel size is best.
        width: width of the residual stream.
        depth: number of blocks.
        heads: query heads; `kv_heads` divides it.
        kv_heads: key/value heads.
        head_dim: width of a head, even; None means `width // heads`.
        mlp_width: width of the SwiGLU hidden layer.
        tie_embeddings: whether the head uses the embedding's weight.
        rope_theta: base of the rotary frequencies.
        qk_norm: whether queries and keys are normalised per head.
        dropout: probability of dropping an attention weight or an entry of a block's branch.
    """

    vocab_size: int = 64
    width: int = 64
    depth: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    mlp_width: int = 192
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    qk_norm: bool = True
    dropout: float = 0.0


def rope_tables(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles of positions 0 to `length` - 1, each [length, head_dim / 2].

    Angles are computed in float32, or in float64 when that is `dtype`; no buffer has to survive the meta device.
    """
    compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.arange(length, device=device, dtype=compute_dtype)
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=compute_dtype) / head_dim)
    angles = torch.outer(positions, frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x_BHSK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head's width by the angles of its position."""
    first, second = x_BHSK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def merge_features(x_BSD: Tensor, features: Tensor, feature_mask: Tensor) -> Tensor:
    """Puts feature rows, in order, at the masked positions; out of place, so that both inputs keep their gradients.

    Args:
        x_BSD: token embeddings.
        features: [rows, D] or [items, tokens, D]; zero rows are legal.
        feature_mask: [B, S] bool with as many True entries as there are rows.

    Returns:
        [B, S, D].

    Raises:
        ValueError: if the widths differ, or, on CPU, the numbers of rows and of masked positions. (On other devices
            counting the positions would stall the step.)
    """
    rows_RD = features.flatten(0, -2)
    rows = rows_RD.shape[0]
    if rows_RD.shape[-1] != x_BSD.shape[-1]:
        raise ValueError(f"features have width {rows_RD.shape[-1]}, the embeddings have width {x_BSD.shape[-1]}.")
    if feature_mask.device.type == "cpu" and int(feature_mask.sum()) != rows:
        raise ValueError(f"feature_mask has {int(feature_mask.sum())} positions, but features have {rows} rows.")
    # One padding row after the last: what the unmasked positions look up, and what makes zero rows no special case.
    position = feature_mask.flatten().cumsum(0).view_as(feature_mask) - 1
    index_BS = torch.where(feature_mask, position, rows)
    rows_BSD = F.embedding(index_BS, F.pad(rows_RD, (0, 0, 0, 1)), padding_idx=rows)
    return torch.where(feature_mask.unsqueeze(-1), rows_BSD.to(x_BSD.dtype), x_BSD)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and per-head query/key norm.

    The numbers of heads are read from the projections' outputs, so the same code runs on a tensor-parallel rank that
    holds some of the heads.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool, dropout: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.dropout = dropout
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = apply_rope(self.q_norm(q), cos, sin)
        k = apply_rope(self.k_norm(k), cos, sin)
        out_BHSK = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.o_proj(out_BHSK.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden_width, bias=False)
        self.up_proj = nn.Linear(width, hidden_width, bias=False)
        self.down_proj = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderBlock(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, mlp_width: int, qk_norm: bool, dropout: float
    ) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, kv_heads, head_dim, qk_norm, dropout)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = SwiGLU(width, mlp_width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attn(self.attn_norm(x_BSD), cos, sin))
        return x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))


class Decoder(nn.Module):
    """A causal language model over token embeddings into which another module's rows can be merged.

    Args:
        vocab_size, width, depth, heads, kv_heads, head_dim, mlp_width, tie_embeddings, rope_theta, qk_norm, dropout:
            see `DecoderConfig`.

    Raises:
        ValueError: if the key/value heads do not divide the query heads, the head width is odd, or the heads do not
            divide the width and no `head_dim` is given.
    """

    fsdp_units: ClassVar[list[str]] = ["blocks.*"]
    """Patterns of the modules that become FSDP2 units of their own."""

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int | None = None,
        mlp_width: int = 192,
        tie_embeddings: bool = True,
        rope_theta: float = 10000.0,
        qk_norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}.")
        if head_dim is None and width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}; give head_dim.")
        head_dim = head_dim if head_dim is not None else width // heads
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd; rotary positions need an even one.")
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.qk_norm = qk_norm
        self.tie_embeddings = tie_embeddings
        self.rope_theta = rope_theta

        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, heads, kv_heads, head_dim, mlp_width, qk_norm, dropout) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.tie_weights()
        self.init_weights()

    @property
    def tensor_parallel_plan(self) -> dict[str, str]:
        """Module pattern -> tensor-parallel style.

        Modules that it does not name are replicated, with equal gradients on all tensor ranks. The query and key
        norms are replicated too, but a rank sees only its own heads: their gradients have to be summed.
        """
        plan = {
            "embed": "embedding_rowwise",
            "blocks.*.attn.q_proj": "colwise",
            "blocks.*.attn.k_proj": "colwise",
            "blocks.*.attn.v_proj": "colwise",
            "blocks.*.attn.o_proj": "rowwise",
            "blocks.*.mlp.gate_proj": "colwise",
            "blocks.*.mlp.up_proj": "colwise",
            "blocks.*.mlp.down_proj": "rowwise",
            "head": "colwise_gather_output",
        }
        if self.qk_norm:
            plan |= {f"blocks.*.attn.{name}": "replicated_with_grad_allreduce" for name in ("q_norm", "k_norm")}
        return plan

    @property
    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Projection pattern -> number of heads in it, which the tensor-parallel size must divide."""
        heads = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads, "o_proj": self.heads}
        return {f"blocks.*.attn.{name}": count for name, count in heads.items()}

    def tie_weights(self) -> None:
        """Makes the head use the embedding's weight, if so configured; to be called again after either is replaced."""
        if self.tie_embeddings:
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws all weights from the default random stream; a no-op for parameters on the meta device."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # The residual stream keeps its scale over the depth, and what a token is stays visible in it.
                branch_end = name.endswith(("o_proj", "down_proj"))
                std = module.in_features**-0.5 * ((2 * len(self.blocks)) ** -0.5 if branch_end else 1.0)
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        nn.init.normal_(self.embed.weight, std=self.embed.embedding_dim**-0.5)

    def forward(self, input_ids: Tensor, features: Tensor | None = None, feature_mask: Tensor | None = None) -> Tensor:
        """Predicts the next token at every position.

        Padding belongs at the right: attention is causal, so no other token sees it.

        Args:
            input_ids: [B, S] token ids.
            features: [rows, width] or [items, tokens, width], which take the places of the masked tokens in order.
            feature_mask: [B, S] bool, True at the placeholder tokens; given together with `features`.

        Returns:
            [B, S, vocab_size] logits.

        Raises:
            ValueError: if only one of `features` and `feature_mask` is given, or if they do not fit.
        """
        if (features is None) != (feature_mask is None):
            raise ValueError("features and feature_mask must be given together.")
        x_BSD = self.embed(input_ids)
        if features is not None and feature_mask is not None:
            x_BSD = merge_features(x_BSD, features, feature_mask)
        cos, sin = rope_tables(input_ids.shape[1], self.head_dim, self.rope_theta, x_BSD.device, x_BSD.dtype)
        for block in self.blocks:
            x_BSD = block(x_BSD, cos, sin)
        return self.head(self.norm(x_BSD))

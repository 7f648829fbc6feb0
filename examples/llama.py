"""A byte-level Llama in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Nothing in it knows about meshes. The attention reads its number of heads off the projections it gets, so it runs on
all heads of one device or on the heads that a tensor-parallel rank holds. The one thing that is not plain torch is the
norm's kernel, which runs fused on an accelerator that has it and as a reference elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hp_npu import rms_norm
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The sizes of a model."""

    dim: int = 256
    """Width of the residual stream."""
    layers: int = 4
    """How many blocks."""
    heads: int = 8
    """How many query heads."""
    kv_heads: int = 4
    """How many key and value heads; each serves ``heads / kv_heads`` query heads."""
    hidden: int = 704
    """Width inside the feed-forward network."""
    vocabulary: int = 256
    """How many tokens; the 256 bytes."""
    length: int = 128
    """Longest sequence."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


SIZES = {
    "tiny": LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, hidden=160, length=64),
    "small": LlamaConfig(),
    "medium": LlamaConfig(dim=512, layers=8, heads=8, kv_heads=4, hidden=1408, length=256),
}


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with our kernel; one weight for each feature."""

    def forward(self, x: Tensor) -> Tensor:
        """*x* with each token's features scaled to mean square one, times the weight."""
        return rms_norm(x, self.weight, 1e-6 if self.eps is None else self.eps)


def rotary_table(config: LlamaConfig) -> Tensor:
    """Cosines and sines of every position and frequency, ``[2, length, head_dim / 2]``."""
    frequencies = config.rope_base ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.outer(torch.arange(config.length).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """*x*, ``[batch, heads, length, head_dim]``, with each pair of features turned by its position's angle."""
    cos, sin = table[:, : x.shape[2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """*x*, ``[batch, length, dim]``, after attention; *table* from :func:`rotary_table`."""
        q, k, v = (self.heads_of(projected) for projected in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = rotate(q, table), rotate(k, table)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def heads_of(self, projected: Tensor) -> Tensor:
        """``[batch, length, features]`` as ``[batch, heads, length, head_dim]``, however many heads are here."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """*x*, ``[batch, length, dim]``, after the network."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """*x*, ``[batch, length, dim]``, after the block."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids ``[batch, length]`` in, logits ``[batch, length, vocabulary]`` out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.register_buffer("table", rotary_table(config), persistent=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of *tokens*."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.table)
        return self.output(self.norm(x))

"""The toy model's two kinds of attention."""

from __future__ import annotations

import torch
from torch import nn

from weightsync.testing.toy_layers import Absorbed, Linear, Ranks

__all__ = ["Attention", "LatentAttention"]

POSITIONS = 64
"""Longest sequence."""

Past = tuple[torch.Tensor, ...]
"""What an attention keeps of the tokens so far; empty before the first."""


class Attention(nn.Module):
    """Grouped heads over fused projections, with constants in every kind of place: a table that is
    saved in no checkpoint, slopes in a plain attribute, and a scale that a checkpoint brings."""

    cos_sin: torch.Tensor
    k_scale: torch.Tensor

    def __init__(self, ranks: Ranks, width: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self._heads, self._kv, self._dim = heads // ranks.size, kv_heads // ranks.size, dim
        self._first_head = ranks.rank * self._heads
        parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv_proj = Linear(ranks, width, parts, "rows", bias=True)
        self.o_proj = Linear(ranks, heads * dim, {"o_proj": width}, "columns")
        self.register_buffer("cos_sin", torch.zeros(POSITIONS, 2, dim // 2), persistent=False)
        self.register_buffer("k_scale", torch.zeros(()))
        self.slopes = torch.zeros(self._heads)

    def set_constants(self) -> None:
        """What comes with the code."""
        rate = 100.0 ** -(torch.arange(self._dim // 2) * 2 / self._dim)
        angle = torch.arange(POSITIONS)[:, None] * rate
        self.cos_sin.copy_(torch.stack([angle.cos(), angle.sin()], dim=1))
        self.slopes.copy_(0.5 ** (1 + self._first_head + torch.arange(self._heads)))

    def _turned(self, x: torch.Tensor, first: int) -> torch.Tensor:
        cos, sin = self.cos_sin[first : first + len(x), :, None].unbind(1)
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, x: torch.Tensor, past: Past) -> tuple[torch.Tensor, Past]:
        """(tokens, width) to the same, and what is kept of all tokens."""
        n, first = len(x), len(past[0]) if past else 0
        rows = [self._heads * self._dim, self._kv * self._dim, self._kv * self._dim]
        q, k, v = (t.view(n, -1, self._dim) for t in self.qkv_proj(x).split(rows, dim=-1))
        q, k = self._turned(q, first), self._turned(k, first) * self.k_scale
        v = v.float()
        if past:
            k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
        group = self._heads // self._kv
        keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self._dim**-0.5
        distance = torch.arange(first, first + n)[:, None] - torch.arange(len(k))
        scores = scores - self.slopes[:, None, None] * distance
        seen = torch.einsum("hqk,khd->qhd", _causal(scores, distance), values)
        return self.o_proj(seen.reshape(n, -1).to(x.dtype)), (k, v)


class LatentAttention(nn.Module):
    """Keys and values are a latent of few numbers; what would expand it is absorbed."""

    def __init__(self, ranks: Ranks, width: int, heads: int, dim: int, latent: int) -> None:
        super().__init__()
        self._dim = dim
        self.wq = Linear(ranks, width, {"wq": heads * dim}, "rows")
        self.kv_a_proj = Linear(ranks, width, {"kv_a_proj": latent}, "none")
        self.kv_b_proj = Absorbed(ranks, heads, dim, latent)
        self.o_proj = Linear(ranks, heads * dim, {"o_proj": width}, "columns")

    def forward(self, x: torch.Tensor, past: Past) -> tuple[torch.Tensor, Past]:
        """(tokens, width) to the same, and what is kept of all tokens."""
        n, first = len(x), len(past[0]) if past else 0
        latent = self.kv_a_proj(x)
        if past:
            latent = torch.cat([past[0], latent])
        q = self.wq(x).view(n, -1, self._dim).transpose(0, 1)
        scores = (q @ self.kv_b_proj.w_kc).float() @ latent.float().t()
        distance = torch.arange(first, first + n)[:, None] - torch.arange(len(latent))
        seen = _causal(scores, distance).to(x.dtype) @ latent @ self.kv_b_proj.w_vc
        return self.o_proj(seen.transpose(0, 1).reshape(n, -1)), (latent,)


def _causal(scores: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(distance < 0, float("-inf")).softmax(dim=-1)

"""Causal grouped-query attention in slow, readable float32, over keys and values that lie one after another.

One sequence at a time; T queries, L keys, Hq query heads, Hkv key-value heads of dim elements.
"""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """[T, Hq, dim]: the query at positions[t] sees keys 0..positions[t]. q [T, Hq, dim]; keys, values [L, Hkv, dim]."""
    group = q.shape[1] // keys.shape[1]
    scores = torch.einsum("thd,lhd->htl", q, keys.repeat_interleave(group, 1)) * scale
    hidden = torch.arange(len(keys), device=q.device) > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, values.repeat_interleave(group, 1))


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the leading elements of x [T, heads, dim]; cos_sin [T, rotary]: cos of rotary / 2 frequencies, then sin.

    Elements i and i + rotary / 2 are a pair.
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]], -1)


def head_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * scale over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale

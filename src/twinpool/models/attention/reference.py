"""Causal attention over contiguous keys and values, in float32: the truth the paged path is tested against."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first 2 · n dimensions, paired (i, i + n).

    x: [T, heads, dim]; cos, sin: float32 [T, n]; → x's dtype, rounded once.
    """
    n = cos.shape[-1]
    wide, cos, sin = x.float(), cos[:, None], sin[:, None]
    first, second, rest = wide[..., :n], wide[..., n : 2 * n], wide[..., 2 * n :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q: [T, Hq, D], the last T positions of k, v: [S, Hkv, D] → float32 [T, Hq, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    n_new, n_all = q.shape[0], k.shape[0]
    hidden = torch.ones(n_new, n_all, dtype=torch.bool, device=q.device).triu(n_all - n_new + 1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

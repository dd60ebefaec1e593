"""Kimi Delta Attention in slow, readable float32: the truth that ops are tested against, and what runs where nothing is compiled.

One sequence at a time; T tokens, H heads of d elements for queries, keys and values alike. The temporal state of a slot is
[H, d, d], values by keys. What is not exactly rounded is computed token by token (models/rows.py says why). The convolution is
that of gdn/reference.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twinpool.models.rows import by_token

QK_NORM_EPS = 1e-6


def decays(f: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, lower_bound: float | None = None) -> torch.Tensor:
    """[T, H, d]: exp(-rate softplus(f + bias)), or exp(bound sigmoid(rate (f + bias))) where a bound keeps it from zero.

    f [T, H d], rate = exp(A_log) [H], bias [H d]; one factor a channel of the keys.
    """

    def one(token: torch.Tensor) -> torch.Tensor:
        x = (token + bias).unflatten(0, (len(rate), -1))
        if lower_bound is None:
            return torch.exp(-rate[:, None] * F.softplus(x))
        return torch.exp(lower_bound * torch.sigmoid(rate[:, None] * x))

    return by_token(one, f)


def delta_rule(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [T, H, d], the new state [H, d, d]); q, k, v, decay [T, H, d], beta [T, H].

    Token by token: S = S diag(decay); S += beta (v - S k) k^T; o = S q; queries and keys are l2-normalised, queries scaled by
    d^-0.5. The state is rounded to state_dtype after each token.
    """
    q, k, v = qkv
    out = torch.empty_like(v)
    for t in range(len(v)):
        query, key = _unit(q[t])[:, None, :] * q.shape[-1] ** -0.5, _unit(k[t])[:, None, :]
        state = state * decay[t, :, None, :]
        delta = (v[t] - (state * key).sum(-1)) * beta[t, :, None]
        state = state + delta[:, :, None] * key
        out[t] = (state * query).sum(-1)
        state = state.to(state_dtype).float()
    return out, state


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[T, H, d]: each head of x over its rms, times weight [d] and sigmoid(gate); x, gate [T, H, d]."""

    def one(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * torch.sigmoid(gate)

    return by_token(one, x, gate)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + QK_NORM_EPS)

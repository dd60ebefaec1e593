"""Gated DeltaNet in slow, readable float32: the truth that ops are tested against, and what runs where nothing is compiled.

One sequence at a time; T tokens, C conv channels, Hk key heads of dk, Hv value heads of dv. State layout as in the slots
(reference 1.6): conv window [C, kernel - 1], temporal state [Hv, dv, dk]. What is not exactly rounded is computed token by token
(models/rows.py says why).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twinpool.models.rows import by_token

QK_NORM_EPS = 1e-6


def causal_conv(x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, C] before the activation, the new window [C, kernel - 1]) of x [T, C] after `window`; weight [C, kernel]."""
    taps = weight.shape[1] - 1
    seen = torch.cat([window.T, x])
    y = torch.stack([(seen[t : t + taps + 1].T * weight).sum(-1) for t in range(len(x))])
    return y, seen[len(x) :].T


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(decay exp(g), beta), both [T, Hv]: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)."""
    rate = torch.exp(a_log)
    return by_token(lambda token: torch.exp(-rate * F.softplus(token + dt_bias)), a), by_token(torch.sigmoid, b)


def delta_rule(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [T, Hv, dv], the new state [Hv, dv, dk]); q, k [T, Hk, dk], v [T, Hv, dv], decay and beta [T, Hv].

    Token by token: S *= decay; S += beta (v - S k) k^T; o = S q; queries and keys are l2-normalised, queries scaled by dk^-0.5.
    The state is rounded to state_dtype after each token.
    """
    q, k, v = qkv
    repeat = v.shape[1] // k.shape[1]
    q = by_token(_l2norm, q).repeat_interleave(repeat, 1) * q.shape[-1] ** -0.5
    k = by_token(_l2norm, k).repeat_interleave(repeat, 1)
    out = torch.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t, :, None, None]
        query, key = q[t, :, None, :], k[t, :, None, :]
        delta = (v[t] - (state * key).sum(-1)) * beta[t, :, None]
        state = state + delta[:, :, None] * key
        out[t] = (state * query).sum(-1)
        state = state.to(state_dtype).float()
    return out, state


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight * silu(gate) over the last axis; x, gate [T, ...]."""

    def one(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * F.silu(gate)

    return by_token(one, x, gate)


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + QK_NORM_EPS)

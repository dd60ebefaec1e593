"""Mamba2 in slow, readable float32: the truth that ops are tested against, and what runs where nothing is compiled.

One sequence at a time; T tokens, H heads of d elements, G groups of N elements (a group serves H / G heads in a row). State
layout as in the slots (reference 1.6): conv window [C, kernel - 1] over x | B | C, temporal state [H, d, N]. What is not exactly
rounded is computed token by token (models/rows.py says why). The convolution is that of gdn/reference.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twinpool.models.rows import by_token


def step_sizes(dt: torch.Tensor, bias: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
    """[T, H]: softplus(dt + bias), not below or above the limits; dt [T, H], bias [H]."""
    return by_token(lambda token: F.softplus(token + bias).clamp(*limits), dt)


def scan(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dt: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, H, d], the new state [H, d, N]); inputs x [T, H, d], B and C [T, G, N]; dt [T, H], rate = -exp(A_log) and skip [H].

    Token by token: S = exp(dt rate) S + dt x B^T; y = S C + skip x. The state is rounded to state_dtype after each token.
    """
    x, b, c = inputs
    repeat = x.shape[1] // b.shape[1]
    out = torch.empty_like(x)
    for t in range(len(x)):
        b_t, c_t = (part[t].repeat_interleave(repeat, 0)[:, None, :] for part in (b, c))
        state = state * torch.exp(dt[t] * rate)[:, None, None] + (x[t] * dt[t, :, None])[:, :, None] * b_t
        out[t] = (state * c_t).sum(-1) + x[t] * skip[:, None]
        state = state.to(state_dtype).float()
    return out, state


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    groups: int,
    eps: float,
    norm_first: bool = False,
) -> torch.Tensor:
    """[T, n]: x silu(gate), each of `groups` parts of a token over its rms, times weight [n]; x, gate [T, n].

    norm_first: the gate comes after the norm and the weight; without a weight there is no norm.
    """

    def one(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        opened = F.silu(gate)
        if weight is None:
            return x * opened
        parts = (x if norm_first else x * opened).unflatten(0, (groups, -1))
        normed: torch.Tensor = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten() * weight
        return normed * opened if norm_first else normed

    return by_token(one, x, gate)

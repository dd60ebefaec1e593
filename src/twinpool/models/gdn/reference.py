"""Gated DeltaNet, token by token in float32: the truth the fast path is tested against.

    S    state [Hv, dv, dk]            q, k  [T, Hk, dk]      v  [T, Hv, dv]
    a, b gates before activation [T, Hv]

    decay = exp(-exp(A_log) · softplus(a + dt_bias)),  beta = sigmoid(b)
    S ← decay · S;   S ← S + beta · (v - S k) kᵀ;   out = S q
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6


def causal_conv(x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution and silu.

    x: [T, C]; window: [C, kernel - 1], the inputs before x, oldest first; weight: [C, kernel]; all float32.
    Returns (float32 [T, C], all inputs [C, kernel - 1 + T], of which the last kernel - 1 are the next window).
    """
    inputs = torch.cat((window, x.T), dim=1)
    out = F.conv1d(inputs[None], weight[:, None], groups=weight.shape[0])[0]
    return F.silu(out).T, inputs


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(decay float32 [T, Hv], beta in b's dtype [T, Hv])."""
    return torch.exp(-a_log.float().exp() * F.softplus(a.float() + dt_bias.float())), torch.sigmoid(b)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The recurrence. state: [Hv, dv, dk], rounded to its own dtype after every token.

    Returns (float32 [T, Hv, dv], the state after each token).
    """
    heads = v.shape[1] // k.shape[1]
    q, k = (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k = q.repeat_interleave(heads, 1), k.repeat_interleave(heads, 1)
    out = torch.empty_like(v, dtype=torch.float32)
    states: list[torch.Tensor] = []
    for t in range(v.shape[0]):
        wide = state.float() * decay[t, :, None, None]
        missing = v[t].float() - torch.einsum("hvk,hk->hv", wide, k[t])
        wide = wide + (beta[t].float()[:, None] * missing)[:, :, None] * k[t][:, None, :]
        out[t] = torch.einsum("hvk,hk->hv", wide, q[t])
        state = wide.to(state.dtype)
        states.append(state)
    return out, states

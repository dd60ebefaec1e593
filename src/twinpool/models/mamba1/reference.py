"""Mamba1 in slow, readable float32: the truth that ops are tested against, and what runs where nothing is compiled.

One sequence at a time; T tokens, C channels with a state of N elements each. State layout as in the slots (reference 1.6): conv
window [C, kernel - 1], temporal state [C, 1, N]. What is not exactly rounded is computed token by token (models/rows.py says
why). The convolution is that of gdn/reference.py, step sizes and the gate those of mamba2/reference.py.
"""

from __future__ import annotations

import torch


def scan(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dt: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, C], the new state [C, N]); inputs x [T, C], B and C [T, N]; dt [T, C], rate = -exp(A_log) [C, N], skip (D) [C].

    Token by token: S = exp(dt rate) S + (dt x) B^T; y = S C + skip x. The state is rounded to state_dtype after each token.
    """
    x, b, c = inputs
    driven, out = dt * x, x * skip
    for t in range(len(x)):
        state = state * torch.exp(dt[t, :, None] * rate) + driven[t, :, None] * b[t]
        out[t] += (state * c[t]).sum(-1)
        state = state.to(state_dtype).float()
    return out, state

"""A Gated DeltaNet mixer that keeps its state in a slot. Holds the parameters of Qwen3.5's or Qwen3-Next's module."""

from __future__ import annotations

from typing import Any

import torch

from twinpool.models.blocks import GatedRmsNorm, Linear
from twinpool.models.gdn import ops
from twinpool.models.rows import PackedRows
from twinpool.models.step_batch import StateLayer


class GdnLayer:
    """One product gives q|k|v, z, b and a side by side; then convolution, delta rule, gated norm, output."""

    def __init__(self, module: Any) -> None:
        self._hk, self._hv = module.num_k_heads, module.num_v_heads
        self._dk, self._dv = module.head_k_dim, module.head_v_dim
        self._n_qkv = 2 * self._hk * self._dk + self._hv * self._dv
        self._n_z = self._hv * self._dv
        self._in = Linear(torch.cat(_input_weights(module)))
        self._conv_weight = module.conv1d.weight.detach().squeeze(1).float().contiguous()
        self._gate_weights = (module.A_log.detach().float().contiguous(), module.dt_bias.detach().float().contiguous())
        self._norm = GatedRmsNorm(module.norm.weight, module.norm.variance_epsilon)
        self._out = Linear(module.out_proj.weight)

    def __call__(self, x: torch.Tensor, rows: PackedRows, cache: StateLayer) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; reads and writes the rows' slots."""
        mixed = self._in(x)
        qkv, z, b, a = mixed.split((self._n_qkv, self._n_z, self._hv, self._hv), dim=1)
        qkv = ops.conv_silu(qkv, self._conv_weight, rows, cache)
        out = ops.delta_rule(
            qkv, (a, b), self._gate_weights, shape=(self._hk, self._hv, self._dk, self._dv), rows=rows, cache=cache
        )
        normed = self._norm(out.view(-1, self._dv), z.reshape(-1, self._dv))
        return self._out(normed.view(x.shape[0], -1))


def _input_weights(module: Any) -> tuple[torch.Tensor, ...]:
    """Weights of q|k|v, z, b, a, each [rows, hidden]. Qwen3-Next keeps them interleaved by key head: they are put in order here."""
    if hasattr(module, "in_proj_qkv"):
        return tuple(p.weight for p in (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a))
    hk, dk, dv = module.num_k_heads, module.head_k_dim, module.head_v_dim
    group = module.num_v_heads // hk
    hidden = module.in_proj_qkvz.weight.shape[1]
    qkvz = module.in_proj_qkvz.weight.view(hk, -1, hidden)
    q, k, v, z = (part.reshape(-1, hidden) for part in qkvz.split((dk, dk, group * dv, group * dv), dim=1))
    b, a = (part.reshape(-1, hidden) for part in module.in_proj_ba.weight.view(hk, -1, hidden).split((group, group), dim=1))
    return torch.cat((q, k, v)), z, b, a

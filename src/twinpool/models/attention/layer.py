"""Gated grouped-query attention over pages. Holds the parameters of Qwen3.5's or Qwen3-Next's module."""

from __future__ import annotations

from typing import Any

import torch

from twinpool.models.attention import ops
from twinpool.models.blocks import Linear, RmsNorm, sigmoid_mul
from twinpool.models.rows import PackedRows
from twinpool.models.step_batch import KvLayer


class AttentionLayer:
    """One product gives q (with its gate, head by head), k and v; norms, rotary embedding, attention, gate, output."""

    def __init__(self, module: Any, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._dim = module.head_dim
        self._kv_heads = module.k_proj.weight.shape[0] // self._dim
        self._heads = self._kv_heads * module.num_key_value_groups
        self._scale = module.scaling
        self._cos, self._sin = cos, sin
        projections = (module.q_proj, module.k_proj, module.v_proj)
        biases = [p.bias for p in projections]
        self._qkv = Linear(
            torch.cat([p.weight for p in projections]), None if biases[0] is None else torch.cat(biases)
        )
        self._q_norm = RmsNorm(module.q_norm.weight, module.q_norm.eps)
        self._k_norm = RmsNorm(module.k_norm.weight, module.k_norm.eps)
        self._out = Linear(module.o_proj.weight, module.o_proj.bias)

    def __call__(self, x: torch.Tensor, rows: PackedRows, cache: KvLayer) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; writes the step's keys and values to the rows' pages."""
        tokens, dim = x.shape[0], self._dim
        n_q, n_kv = 2 * self._heads * dim, self._kv_heads * dim
        q_gate, k, v = self._qkv(x).split((n_q, n_kv, n_kv), dim=1)
        # Each head's query is followed by its gate.
        q_gate = q_gate.reshape(tokens * self._heads, 2 * dim)
        q, gate = q_gate[:, :dim], q_gate[:, dim:]
        q = ops.rotate(self._q_norm(q).view(tokens, self._heads, dim), self._cos, self._sin, rows)
        k = self._k_norm(k.reshape(-1, dim)).view(tokens, self._kv_heads, dim)
        k = ops.rotate(k, self._cos, self._sin, rows)
        ops.write_kv(k, v.unflatten(1, (self._kv_heads, dim)), rows, cache)
        out = ops.attend(q, self._scale, rows, cache)
        return self._out(sigmoid_mul(out.view(-1, dim), gate).view(tokens, -1))

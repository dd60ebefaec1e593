"""The attention mixer that takes the place of transformers' own, holding the same parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from twinpool.models.attention.ops import AttentionKernel, AttentionShape, attend
from twinpool.models.blocks import Linear
from twinpool.models.bound import Step


class AttentionMixer(nn.Module):
    """hidden += o_proj(attention(qkv(x)) * sigmoid(gate(x))); qkv holds all projections of the input as one."""

    def __init__(self, *, qkv: Linear, kernel: AttentionKernel, o_proj: Linear, layer: int) -> None:
        super().__init__()
        self.qkv = qkv
        self.kernel = kernel
        self.o_proj = o_proj
        self.layer = layer

    def forward(self, x: torch.Tensor, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """x (normed), hidden: [T, hidden_size] of the model's dtype; returns hidden, changed in place."""
        out: torch.Tensor = self.o_proj(attend(self.kernel, step, self.layer, self.qkv(x)), residual=hidden)
        return out


def adopt_attention(module: Any, *, layer: int, table: torch.Tensor) -> AttentionMixer:
    """Our mixer with the weights of a Qwen3-Next or Qwen3.5 attention (per-head norms, gated output).

    `layer` counts attention layers; table: float32 [positions, rotary], cos then sin.
    """
    config = module.config
    shape = AttentionShape(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=module.head_dim,
        rotary=table.shape[1],
        scale=module.scaling,
        eps=module.q_norm.eps,
    )
    kernel = AttentionKernel(
        shape,
        query_scale=1.0 + module.q_norm.weight.float(),
        key_scale=1.0 + module.k_norm.weight.float(),
        table=table,
        dtype=module.q_proj.weight.dtype,
    )
    inputs = (module.q_proj, module.k_proj, module.v_proj)
    biases = None if module.q_proj.bias is None else [p.bias for p in inputs]
    o_bias = None if module.o_proj.bias is None else [module.o_proj.bias]
    return AttentionMixer(
        qkv=Linear([p.weight for p in inputs], biases),
        kernel=kernel,
        o_proj=Linear([module.o_proj.weight], o_bias),
        layer=layer,
    )

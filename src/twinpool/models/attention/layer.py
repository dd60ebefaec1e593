"""The attention mixer that takes the place of transformers' own, holding the same parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twinpool.models.attention.ops import AttentionKernel, AttentionShape, attend
from twinpool.models.blocks import Linear, adopt_linear, check_width
from twinpool.models.bound import Step


class AttentionMixer(nn.Module):
    """hidden += o_proj(attention(qkv(x)) * sigmoid(gate(x))), gated where the shape is; qkv is all projections of the input."""

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


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of every head's query and key: float32 [head_dim] factors, and their eps."""

    query_scale: torch.Tensor
    key_scale: torch.Tensor
    eps: float


def adopt_attention(
    module: Any,
    *,
    layer: int,
    table: torch.Tensor,
    out_proj: Any,
    norms: HeadNorms | None = None,
    gated: bool = False,
    scale: float | None = None,
) -> AttentionMixer:
    """Our mixer with the weights of a transformers attention: q_proj, k_proj, v_proj and `out_proj`, with biases if they have.

    `layer` counts attention layers; table: float32 [positions, rotary], cos then sin; gated: q_proj gives query and gate of each
    head; scale: factor on the scores, module.scaling by default. Raises ModelError for heads that are not as wide as the layer.
    """
    config, inputs = module.config, (module.q_proj, module.k_proj, module.v_proj)
    check_width(
        "attention", heads=config.num_attention_heads, head_dim=module.head_dim, columns=out_proj.weight.shape[1]
    )
    shape = AttentionShape(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=module.head_dim,
        rotary=table.shape[1],
        scale=module.scaling if scale is None else scale,
        eps=0.0 if norms is None else norms.eps,
        gated=gated,
    )
    kernel = AttentionKernel(
        shape,
        query_scale=None if norms is None else norms.query_scale,
        key_scale=None if norms is None else norms.key_scale,
        table=table,
        dtype=module.q_proj.weight.dtype,
    )
    return AttentionMixer(
        qkv=Linear([p.weight for p in inputs], None if module.q_proj.bias is None else [p.bias for p in inputs]),
        kernel=kernel,
        o_proj=adopt_linear(out_proj),
        layer=layer,
    )

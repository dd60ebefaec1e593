"""The Gated DeltaNet mixer that takes the place of transformers' own, holding the same parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from twinpool.models.blocks import Linear
from twinpool.models.bound import Step
from twinpool.models.gdn.ops import GdnKernel, GdnShape, mix


class GdnMixer(nn.Module):
    """hidden += out_proj(gated_norm(delta_rule(conv(in_proj(x))))).

    in_proj is all projections of the input as one: q | k | v | z | b | a.
    """

    def __init__(self, *, in_proj: Linear, kernel: GdnKernel, out_proj: Linear, layer: int) -> None:
        super().__init__()
        self.in_proj = in_proj
        self.kernel = kernel
        self.out_proj = out_proj
        self.layer = layer

    def forward(self, x: torch.Tensor, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """x (normed), hidden: [T, hidden_size] of the model's dtype; returns hidden, changed in place."""
        mixed = mix(self.kernel, step, self.layer, self.in_proj(x))
        out: torch.Tensor = self.out_proj(mixed, residual=hidden)
        return out


def adopt_gdn(module: Any, *, layer: int) -> GdnMixer:
    """Our mixer with the weights of a Qwen3-Next or Qwen3.5 GatedDeltaNet; `layer` counts linear layers."""
    kernel = adopt_kernel(module, norm=module.norm, eps=module.layer_norm_epsilon)
    if hasattr(module, "in_proj_qkvz"):
        weights = _separate(module.in_proj_qkvz.weight, module.in_proj_ba.weight, kernel.shape)
    else:
        weights = [p.weight for p in (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)]
    return GdnMixer(in_proj=Linear(weights), kernel=kernel, out_proj=Linear([module.out_proj.weight]), layer=layer)


def adopt_kernel(module: Any, *, norm: Any, eps: float, beta_scale: float = 1.0) -> GdnKernel:
    """Ours with what lies between the projections of a transformers gated delta net; norm: its gated norm, eps: of that."""
    shape = GdnShape(
        key_heads=module.num_k_heads,
        value_heads=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        kernel=module.conv_kernel_size,
        eps=eps,
        beta_scale=beta_scale,
    )
    return GdnKernel(
        shape,
        conv_weight=module.conv1d.weight.squeeze(1),
        a_log=module.A_log,
        dt_bias=module.dt_bias,
        norm_weight=norm.weight,
    )


def _separate(qkvz: torch.Tensor, ba: torch.Tensor, shape: GdnShape) -> list[torch.Tensor]:
    """Qwen3-Next keeps, for each key head, its q, k, v, z rows together, and its b, a rows: sort them into q, k, v, z, b, a."""
    group = shape.value_heads // shape.key_heads
    values = group * shape.value_dim
    q, k, v, z = qkvz.unflatten(0, (shape.key_heads, -1)).split([shape.key_dim, shape.key_dim, values, values], 1)
    b, a = ba.unflatten(0, (shape.key_heads, -1)).split([group, group], 1)
    return [part.flatten(0, 1) for part in (q, k, v, z, b, a)]

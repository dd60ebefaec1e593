"""The Kimi Delta Attention mixer that takes the place of transformers' own, holding the same parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from twinpool.models.blocks import Linear, adopt_linear
from twinpool.models.bound import Step
from twinpool.models.kda.ops import KdaKernel, KdaShape, mix


class KdaMixer(nn.Module):
    """hidden += out_proj(gated_norm(delta_rule(conv(q | k | v), beta, decay), gate)).

    in_proj is q | k | v | beta | decay | gate; decay_up and gate_up widen the last two where they come through a narrow matrix.
    """

    def __init__(
        self,
        *,
        in_proj: Linear,
        decay_up: Linear | None,
        gate_up: Linear | None,
        kernel: KdaKernel,
        out_proj: Linear,
        layer: int,
    ) -> None:
        super().__init__()
        self.in_proj = in_proj
        self.decay_up = decay_up
        self.gate_up = gate_up
        self.kernel = kernel
        self.out_proj = out_proj
        self.layer = layer
        inner = kernel.shape.inner
        self._sizes = [3 * inner + kernel.shape.heads, *(up.k if up else inner for up in (decay_up, gate_up))]

    def forward(self, x: torch.Tensor, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """x (normed), hidden: [T, hidden_size] of the model's dtype; returns hidden, changed in place."""
        opened, decay, gate = self.in_proj.forward(x).split(self._sizes, -1)
        if self.decay_up is not None:
            decay = self.decay_up.forward(decay)
        if self.gate_up is not None:
            gate = self.gate_up.forward(gate)
        mixed = mix(self.kernel, step, self.layer, opened, decay=decay, gate=gate)
        return self.out_proj.forward(mixed, hidden)


def adopt_kda(module: Any, *, layer: int, lower_bound: float | None) -> KdaMixer:
    """Our mixer with the weights of a Kimi, GLM-5-Next (narrow decay and gate) or Ling-3 (full ones) delta attention.

    `layer` counts linear layers; lower_bound: of the logarithm of a decay, None for decays without one.
    """
    forget = module.forget_gate
    narrow = hasattr(forget, "f_a_proj")
    shape = KdaShape(
        heads=module.num_heads,
        head_dim=module.head_dim,
        kernel=module.conv_kernel_size,
        eps=module.o_norm.variance_epsilon,
        lower_bound=lower_bound,
    )
    kernel = KdaKernel(
        shape,
        conv_weight=module.conv1d.weight.squeeze(1),
        a_log=forget.A_log,
        dt_bias=forget.dt_bias,
        norm_weight=module.o_norm.weight,
        # The convolution's weights may be float32 for themselves.
        dtype=module.q_proj.weight.dtype,
    )
    last = (forget.f_a_proj, module.g_a_proj) if narrow else (forget.f_proj, module.g_proj)
    inputs = (module.q_proj, module.k_proj, module.v_proj, module.b_proj, *last)
    return KdaMixer(
        in_proj=Linear([p.weight for p in inputs]),
        decay_up=adopt_linear(forget.f_b_proj) if narrow else None,
        gate_up=adopt_linear(module.g_b_proj) if narrow else None,
        kernel=kernel,
        out_proj=adopt_linear(module.o_proj),
        layer=layer,
    )

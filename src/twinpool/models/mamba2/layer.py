"""The Mamba2 mixer that takes the place of transformers' own, holding the same parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from twinpool.models.blocks import Linear, adopt_linear, check_width
from twinpool.models.bound import Step
from twinpool.models.group import Rms
from twinpool.models.mamba2.ops import Mamba2Kernel, Mamba2Shape, mix


class Mamba2Mixer(nn.Module):
    """hidden += out_proj(gated_norm(scan(conv(factors * in_proj(x))))); in_proj is z | x | B | C | dt.

    factors: of the model's dtype, one a column of in_proj; None where all are 1.
    """

    def __init__(
        self,
        *,
        in_proj: Linear,
        kernel: Mamba2Kernel,
        out_proj: Linear,
        layer: int,
        factors: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.in_proj = in_proj
        self.kernel = kernel
        self.out_proj = out_proj
        self.layer = layer
        self.factors = factors

    def norm_over_ranks(self, rms: Rms) -> None:
        """The gated norm is over the columns of all ranks, where there is one."""
        self.kernel.joint = rms

    def forward(self, x: torch.Tensor, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """x (normed), hidden: [T, hidden_size] of the model's dtype; returns hidden, changed in place."""
        proj = self.in_proj.forward(x)
        if self.factors is not None:
            proj.mul_(self.factors)
        return self.out_proj.forward(mix(self.kernel, step, self.layer, proj), hidden)


def adopt_mamba2(module: Any, *, layer: int, factors: torch.Tensor | None = None) -> Mamba2Mixer:
    """Our mixer with the weights of a transformers Mamba2 (Granite 4, Nemotron-H, Falcon-H1, Bamba, Zamba2).

    All name their parts alike; only Falcon-H1 may have no norm, or one before the gate, and factors, one a column of in_proj.
    `layer` counts linear layers. Raises ModelError for heads that are not as wide as the layer.
    """
    norm = None if isinstance(module.norm, nn.Identity) else module.norm
    check_width("Mamba", heads=module.num_heads, head_dim=module.head_dim, columns=module.out_proj.weight.shape[1])
    shape = Mamba2Shape(
        heads=module.num_heads,
        head_dim=module.head_dim,
        state_size=module.ssm_state_size,
        groups=module.n_groups,
        kernel=module.conv_kernel_size,
        eps=0.0 if norm is None else norm.variance_epsilon,
        dt_limits=tuple(module.time_step_limit),
        norm_first=getattr(norm, "norm_before_gate", False),
    )
    kernel = Mamba2Kernel(
        shape,
        conv_weight=module.conv1d.weight.squeeze(1),
        conv_bias=module.conv1d.bias,
        a_log=module.A_log,
        dt_bias=module.dt_bias,
        skip=module.D,
        norm_weight=None if norm is None else norm.weight,
    )
    return Mamba2Mixer(
        in_proj=adopt_linear(module.in_proj),
        kernel=kernel,
        out_proj=adopt_linear(module.out_proj),
        layer=layer,
        factors=factors,
    )

"""The Mamba1 mixer that takes the place of transformers' own, holding the same parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twinpool.models.blocks import Linear, RmsNorm, adopt_linear
from twinpool.models.bound import Step
from twinpool.models.group import Total
from twinpool.models.mamba1.ops import Mamba1Kernel, convolve, scan


@dataclass(frozen=True, slots=True)
class SelectionNorms:
    """Norms of the narrow step size, of B and of C."""

    dt: RmsNorm
    b: RmsNorm
    c: RmsNorm


class Mamba1Mixer(nn.Module):
    """hidden += out_proj(scan(u, dt_proj(dt), B, C) silu(z)), u = silu(conv(x)).

    in_proj is x | z; x_proj makes dt | B | C of u, each normed where there are norms.
    """

    def __init__(
        self,
        *,
        in_proj: Linear,
        x_proj: Linear,
        dt_proj: Linear,
        norms: SelectionNorms | None,
        kernel: Mamba1Kernel,
        out_proj: Linear,
        layer: int,
    ) -> None:
        super().__init__()
        self.in_proj, self.x_proj, self.dt_proj, self.out_proj = in_proj, x_proj, dt_proj, out_proj
        self.norms = norms
        self.kernel = kernel
        self.layer = layer
        self._total: Total | None = None

    def select_over_ranks(self, total: Total) -> None:
        """dt, B and C are sums over the channels of all ranks."""
        self._total = total

    def forward(self, x: torch.Tensor, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """x (normed), hidden: [T, hidden_size] of the model's dtype; returns hidden, changed in place."""
        mixed, gate = self.in_proj.forward(x).split(self.kernel.channels, -1)
        mixed = convolve(self.kernel, step, self.layer, mixed)
        size = self.kernel.state_size
        dt, b, c = self._select(mixed).split([self.dt_proj.k, size, size], -1)
        if self.norms is not None:
            dt, b, c = self.norms.dt.forward(dt), self.norms.b.forward(b), self.norms.c.forward(c)
        out = scan(self.kernel, step, self.layer, (mixed, self.dt_proj.forward(dt), b, c), gate)
        return self.out_proj.forward(out, hidden)

    def _select(self, mixed: torch.Tensor) -> torch.Tensor:
        """[T, dt | B | C] of the model's dtype, rounded once; mixed [T, channels], this rank's."""
        if self._total is None:
            return self.x_proj.forward(mixed)
        return self._total(self.x_proj.forward(mixed, wide=True)).to(mixed.dtype)


def adopt_mamba1(module: Any, *, layer: int, norms: SelectionNorms | None) -> Mamba1Mixer:
    """Our mixer with the weights of a transformers Mamba1 (Mamba, Falcon-Mamba, Jamba); `layer` counts linear layers."""
    kernel = Mamba1Kernel(
        conv_weight=module.conv1d.weight.squeeze(1),
        conv_bias=module.conv1d.bias,
        a_log=module.A_log,
        dt_bias=module.dt_proj.bias,
        skip=module.D,
    )
    return Mamba1Mixer(
        in_proj=adopt_linear(module.in_proj),
        x_proj=adopt_linear(module.x_proj),
        # Its bias is added in float32, with the softplus.
        dt_proj=Linear([module.dt_proj.weight]),
        norms=norms,
        kernel=kernel,
        out_proj=adopt_linear(module.out_proj),
        layer=layer,
    )

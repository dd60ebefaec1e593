"""The short-convolution mixer that takes the place of transformers' own, holding the same parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from twinpool.models.blocks import Linear, adopt_linear
from twinpool.models.bound import Step
from twinpool.models.shortconv.ops import ShortConvKernel, mix


class ShortConvMixer(nn.Module):
    """hidden += out_proj(C conv(B x)); in_proj is B | C | x."""

    def __init__(self, *, in_proj: Linear, kernel: ShortConvKernel, out_proj: Linear, layer: int) -> None:
        super().__init__()
        self.in_proj = in_proj
        self.kernel = kernel
        self.out_proj = out_proj
        self.layer = layer

    def forward(self, x: torch.Tensor, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """x (normed), hidden: [T, hidden_size] of the model's dtype; returns hidden, changed in place."""
        return self.out_proj.forward(mix(self.kernel, step, self.layer, self.in_proj.forward(x)), hidden)


def adopt_short_conv(module: Any, *, layer: int) -> ShortConvMixer:
    """Our mixer with the weights of an LFM2 short convolution; `layer` counts linear layers."""
    return ShortConvMixer(
        in_proj=adopt_linear(module.in_proj),
        kernel=ShortConvKernel(weight=module.conv.weight.squeeze(1), bias=module.conv.bias),
        out_proj=adopt_linear(module.out_proj),
        layer=layer,
    )

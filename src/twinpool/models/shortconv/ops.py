"""The gated short convolution between its projections over a packed step: compiled on the CPU, row by row in torch elsewhere."""

from __future__ import annotations

from functools import partial

import torch

from twinpool.models.bound import Step
from twinpool.models.conv import NativeConv
from twinpool.models.native import use_native
from twinpool.models.rows import by_rows
from twinpool.models.shortconv import reference


class ShortConvKernel:
    """A layer's constants, prepared once: weight [channels, kernel], bias [channels] or None."""

    def __init__(self, *, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.taps = weight.float().contiguous()
        self.bias = torch.zeros_like(self.taps[:, 0]) if bias is None else bias.float()
        self.conv: NativeConv | None = None
        if use_native(weight.device):
            self.conv = NativeConv(weight, bias, dtype=weight.dtype, silu=False)


def mix(kernel: ShortConvKernel, step: Step, layer: int, proj: torch.Tensor) -> torch.Tensor:
    """[T, channels] of the model's dtype, ready for the output projection; windows of linear layer `layer` move on in their slots.

    proj [T, 3 channels], rows contiguous: B | C | x.
    """
    if kernel.conv is None:
        return by_rows(step, layer, proj, partial(_row_torch, kernel))
    b, c, x = proj.chunk(3, -1)
    # Products are rounded exactly, wherever they stand in a tensor; so torch may make them.
    return c * kernel.conv(step, layer, b * x)


def _row_torch(kernel: ShortConvKernel, proj: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    del ssm  # there is no temporal state
    dtype = proj.dtype
    b, c, x = proj.float().chunk(3, -1)
    gated = (b * x).to(dtype).to(conv.dtype).float()
    y, window = reference.short_conv(gated, conv.float(), kernel.taps, kernel.bias)
    conv.copy_(window)
    return (c * y.to(dtype).float()).to(dtype)

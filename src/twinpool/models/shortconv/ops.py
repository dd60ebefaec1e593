"""The gated short convolution between its projections over a packed step: row by row in torch."""

from __future__ import annotations

from functools import partial

import torch

from twinpool.models.bound import Step
from twinpool.models.rows import by_rows
from twinpool.models.shortconv import reference


class ShortConvKernel:
    """A layer's constants, prepared once: weight [channels, kernel], bias [channels] or None."""

    def __init__(self, *, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.taps = weight.float().contiguous()
        self.bias = torch.zeros_like(self.taps[:, 0]) if bias is None else bias.float()


def mix(kernel: ShortConvKernel, step: Step, layer: int, proj: torch.Tensor) -> torch.Tensor:
    """[T, channels] of the model's dtype, ready for the output projection; windows of linear layer `layer` move on in their slots.

    proj [T, 3 channels]: B | C | x.
    """
    return by_rows(step, layer, proj, partial(_row_torch, kernel))


def _row_torch(kernel: ShortConvKernel, proj: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    del ssm  # there is no temporal state
    dtype = proj.dtype
    b, c, x = proj.float().chunk(3, -1)
    gated = (b * x).to(dtype).to(conv.dtype).float()
    y, window = reference.short_conv(gated, conv.float(), kernel.taps, kernel.bias)
    conv.copy_(window)
    return (c * y.to(dtype).float()).to(dtype)

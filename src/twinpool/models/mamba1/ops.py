"""The parts of a Mamba1 mixer that keep state, over a packed step: compiled on the CPU, row by row in torch elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from twinpool.models.bound import Step
from twinpool.models.conv import NativeConv
from twinpool.models.gdn.reference import causal_conv
from twinpool.models.mamba1 import reference
from twinpool.models.mamba2.reference import gated_norm, step_sizes
from twinpool.models.native import CODES, native, use_native
from twinpool.models.rows import by_rows, by_token

_ANY_STEP = (0.0, float("inf"))


class Mamba1Kernel:
    """A layer's constants, prepared once.

    conv_weight [C, kernel], conv_bias [C] or None, a_log [C, N], dt_bias and skip (D) [C], of C channels.
    """

    def __init__(
        self,
        *,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        self.channels, self.state_size = a_log.shape
        self.taps = conv_weight.float().contiguous()
        self.conv_bias = torch.zeros_like(self.taps[:, 0]) if conv_bias is None else conv_bias.float()
        self.rate = -torch.exp(a_log.float())
        self.dt_bias, self.skip = dt_bias.float().contiguous(), skip.float().contiguous()
        self.conv: NativeConv | None = None
        self.handle: Any = None
        if use_native(conv_weight.device):
            self.conv = NativeConv(conv_weight, conv_bias, dtype=conv_weight.dtype, silu=True)
            self.handle = native.Mamba1(
                channels=self.channels,
                state_size=self.state_size,
                dtype=CODES[conv_weight.dtype],
                rate=self.rate.data_ptr(),
                dt_bias=self.dt_bias.data_ptr(),
                skip=self.skip.data_ptr(),
            )


def convolve(kernel: Mamba1Kernel, step: Step, layer: int, x: torch.Tensor) -> torch.Tensor:
    """[T, C]: silu of the causal convolution of x [T, C], rows contiguous; windows of linear layer `layer` move on."""
    if kernel.conv is not None:
        return kernel.conv(step, layer, x)
    return by_rows(step, layer, x, partial(_conv_row, kernel))


def scan(
    kernel: Mamba1Kernel, step: Step, layer: int, inputs: tuple[torch.Tensor, ...], gate: torch.Tensor
) -> torch.Tensor:
    """[T, C] of the model's dtype, ready for the output projection: y silu(gate); temporal states of the layer move on.

    inputs: what `convolve` gave [T, C], dt before its bias [T, C], B and C [T, N]; rows of each and of gate contiguous. After
    `convolve` of the same step: the windows at checkpoints are its business.
    """
    if kernel.handle is None:
        y = by_rows(step, layer, torch.cat(inputs, -1), partial(_scan_row, kernel), window=False)
        return gated_norm(y, gate.float(), None, groups=1, eps=0.0).to(gate.dtype)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    columns = [(part.data_ptr(), part.stride(0)) for part in (*inputs, gate)]
    kernel.handle.scan(step.rows, step.memory.states[layer].ssm, columns, out.data_ptr())
    return out


def _conv_row(kernel: Mamba1Kernel, x: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    del ssm
    y, window = causal_conv(x.to(conv.dtype).float(), conv.float(), kernel.taps)
    conv.copy_(window)
    return by_token(F.silu, (y + kernel.conv_bias).to(x.dtype).float()).to(x.dtype)


def _scan_row(kernel: Mamba1Kernel, packed: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    """float32 [n, C]."""
    del conv
    channels, size = kernel.channels, kernel.state_size
    x, dt, b, c = packed.float().split([channels, channels, size, size], -1)
    sizes = step_sizes(dt, kernel.dt_bias, _ANY_STEP)
    before = ssm.squeeze(1).float()
    out, state = reference.scan((x, b, c), sizes, kernel.rate, kernel.skip, before, state_dtype=ssm.dtype)
    ssm.copy_(state[:, None])
    return out

"""A causal depthwise convolution over a packed step, compiled: what mixers other than Gated DeltaNet share."""

from __future__ import annotations

from typing import Any

import torch

from twinpool.models.bound import Step
from twinpool.models.native import CODES, native


class NativeConv:
    """weight [channels, kernel], bias [channels] or None, of any dtype; dtype: of activations; silu: after the convolution.

    Only where native.use_native says so.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, dtype: torch.dtype, silu: bool) -> None:
        self._taps = weight.float().T.contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self.channels = weight.shape[0]
        self._handle: Any = native.Conv(
            channels=self.channels,
            kernel=weight.shape[1],
            dtype=CODES[dtype],
            weight=self._taps.data_ptr(),
            bias=0 if self._bias is None else self._bias.data_ptr(),
            silu=silu,
        )

    def __call__(self, step: Step, layer: int, x: torch.Tensor) -> torch.Tensor:
        """[T, channels] of x [T, channels], rows contiguous; the windows of linear layer `layer` move on in their slots."""
        y = torch.empty((len(x), self.channels), dtype=x.dtype)
        self._handle.run(step.rows, step.memory.states[layer].conv, x.data_ptr(), x.stride(0), y.data_ptr())
        return y

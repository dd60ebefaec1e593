"""Kimi Delta Attention between its projections over a packed step: compiled on the CPU, row by row in torch elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from twinpool.models.bound import Step
from twinpool.models.gdn.reference import causal_conv
from twinpool.models.kda import reference
from twinpool.models.native import CODES, native, use_native
from twinpool.models.rows import by_rows, by_token


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaShape:
    """Heads and sizes of a layer; lower_bound: of the logarithm of a decay, None without; eps: of the gated norm."""

    heads: int
    head_dim: int
    kernel: int
    eps: float
    lower_bound: float | None = None

    @property
    def inner(self) -> int:
        """Columns of each of q, k, v, of the decay, of the gate and of the output."""
        return self.heads * self.head_dim


class KdaKernel:
    """A layer's constants, prepared once.

    conv_weight [3 inner, kernel] over q | k | v, a_log: one number a head, dt_bias [inner], norm_weight [head_dim], of any dtype;
    dtype: of activations.
    """

    def __init__(
        self,
        shape: KdaShape,
        *,
        conv_weight: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.shape = shape
        self.taps = conv_weight.float().T.contiguous()
        self.rate = torch.exp(a_log.float()).flatten()
        self.dt_bias, self.norm_weight = dt_bias.float().contiguous(), norm_weight.float().contiguous()
        self.handle: Any = None
        if use_native(conv_weight.device):
            self.handle = native.Kda(
                heads=shape.heads,
                dim=shape.head_dim,
                kernel=shape.kernel,
                eps=shape.eps,
                lower_bound=math.nan if shape.lower_bound is None else shape.lower_bound,
                dtype=CODES[dtype],
                conv_weight=self.taps.data_ptr(),
                rate=self.rate.data_ptr(),
                dt_bias=self.dt_bias.data_ptr(),
                norm_weight=self.norm_weight.data_ptr(),
            )


def mix(
    kernel: KdaKernel, step: Step, layer: int, opened: torch.Tensor, *, decay: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """[T, inner] of the model's dtype, ready for the output projection; states of linear layer `layer` move on in their slots.

    opened [T, 3 inner + heads]: q | k | v | beta; decay, gate [T, inner]; rows of each contiguous.
    """
    if kernel.handle is None:
        return by_rows(step, layer, torch.cat([opened, decay, gate], -1), partial(_row_torch, kernel))
    state = step.memory.states[layer]
    out = torch.empty((len(opened), kernel.shape.inner), dtype=opened.dtype)
    kernel.handle.run(
        step.rows,
        state.conv,
        state.ssm,
        opened=opened.data_ptr(),
        ld=opened.stride(0),
        decay=decay.data_ptr(),
        ldd=decay.stride(0),
        gate=gate.data_ptr(),
        ldg=gate.stride(0),
        out=out.data_ptr(),
    )
    return out


def _row_torch(kernel: KdaKernel, proj: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    shape, dtype = kernel.shape, proj.dtype
    x, b, f, gate = proj.split([3 * shape.inner, shape.heads, shape.inner, shape.inner], -1)
    # A slot keeps the window's tokens as rows, the other way round than Gated DeltaNet (reference 1.6).
    y, window = causal_conv(x.to(conv.dtype).float(), conv.float().T, kernel.taps.T)
    conv.copy_(window.T)
    mixed = by_token(F.silu, y.to(dtype).float()).to(dtype).float()
    q, k, v = (part.unflatten(-1, (shape.heads, shape.head_dim)) for part in mixed.chunk(3, -1))
    decay = reference.decays(f.float(), kernel.rate, kernel.dt_bias, shape.lower_bound)
    beta = by_token(torch.sigmoid, b.float()).to(dtype).float()
    out, state = reference.delta_rule((q, k, v), decay, beta, ssm.float(), state_dtype=ssm.dtype)
    ssm.copy_(state)
    gate = gate.float().unflatten(-1, (shape.heads, shape.head_dim))
    return reference.gated_norm(out.to(dtype).float(), gate, kernel.norm_weight, shape.eps).flatten(1).to(dtype)

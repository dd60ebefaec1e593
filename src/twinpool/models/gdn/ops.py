"""The gated delta rule over a packed step: compiled on the CPU, row by row in torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from twinpool.models.bound import Step
from twinpool.models.gdn import reference
from twinpool.models.native import CODES, native, use_native
from twinpool.models.rows import by_rows, by_token


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnShape:
    """Heads and sizes of a layer; eps: of the gated norm; beta_scale: factor on the strength of an update."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    beta_scale: float = 1.0

    @property
    def channels(self) -> int:
        """Columns that go through the convolution: q | k | v."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Columns of v, of the gate z and of the output."""
        return self.value_heads * self.value_dim


class GdnKernel:
    """A layer's constants, prepared once.

    conv_weight [channels, kernel], a_log and dt_bias [value_heads], norm_weight [value_dim], of the model's dtype.
    """

    def __init__(
        self,
        shape: GdnShape,
        *,
        conv_weight: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> None:
        self.shape = shape
        self.dtype = conv_weight.dtype
        self.taps = conv_weight.float().T.contiguous()
        self.a_log, self.dt_bias, self.norm_weight = (x.float().contiguous() for x in (a_log, dt_bias, norm_weight))
        self.rate = torch.exp(self.a_log)
        self.handle: Any = None
        if use_native(conv_weight.device):
            self.handle = native.Gdn(
                key_heads=shape.key_heads,
                value_heads=shape.value_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                kernel=shape.kernel,
                eps=shape.eps,
                beta_scale=shape.beta_scale,
                dtype=CODES[self.dtype],
                conv_weight=self.taps.data_ptr(),
                rate=self.rate.data_ptr(),
                dt_bias=self.dt_bias.data_ptr(),
                norm_weight=self.norm_weight.data_ptr(),
            )


def mix(kernel: GdnKernel, step: Step, layer: int, proj: torch.Tensor) -> torch.Tensor:
    """[T, values] of the model's dtype, ready for the output projection; states of linear layer `layer` move on in their slots.

    proj [T, >= channels + values + 2 value_heads], rows contiguous: q | k | v | z | b | a.
    """
    state = step.memory.states[layer]
    if kernel.handle is None:
        return by_rows(step, layer, proj, partial(_row_torch, kernel))
    out = torch.empty((len(proj), kernel.shape.values), dtype=proj.dtype)
    kernel.handle.run(step.rows, state.conv, state.ssm, proj.data_ptr(), proj.stride(0), out.data_ptr())
    return out


def _row_torch(kernel: GdnKernel, proj: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    shape, dtype = kernel.shape, proj.dtype
    sizes = [shape.channels, shape.values, shape.value_heads, shape.value_heads]
    x, z, b, a = proj[:, : sum(sizes)].split(sizes, -1)
    y, window = reference.causal_conv(x.to(conv.dtype).float(), conv.float(), kernel.taps.T)
    conv.copy_(window)
    mixed = by_token(F.silu, y.to(dtype).float()).to(dtype).float()
    keys = shape.key_heads * shape.key_dim
    q, k = (t.unflatten(-1, (shape.key_heads, shape.key_dim)) for t in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
    v = mixed[:, 2 * keys :].unflatten(-1, (shape.value_heads, shape.value_dim))
    decay, beta = reference.gates(a.float(), b.float(), kernel.a_log, kernel.dt_bias)
    beta = beta.to(dtype).float() * shape.beta_scale
    out, state = reference.delta_rule((q, k, v), decay, beta, ssm.float(), state_dtype=ssm.dtype)
    ssm.copy_(state)
    gate = z.float().unflatten(-1, (shape.value_heads, shape.value_dim))
    return reference.gated_norm(out.to(dtype).float(), gate, kernel.norm_weight, shape.eps).flatten(1).to(dtype)

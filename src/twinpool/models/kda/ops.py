"""Kimi Delta Attention between its projections over a packed step: row by row in torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from twinpool.models.bound import Step
from twinpool.models.gdn.reference import causal_conv
from twinpool.models.kda import reference
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

    conv_weight [3 inner, kernel] over q | k | v, a_log: one number a head, dt_bias [inner], norm_weight [head_dim].
    """

    def __init__(
        self,
        shape: KdaShape,
        *,
        conv_weight: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> None:
        self.shape = shape
        self.taps = conv_weight.float().contiguous()
        self.rate = torch.exp(a_log.float()).flatten()
        self.dt_bias, self.norm_weight = dt_bias.float().contiguous(), norm_weight.float()


def mix(kernel: KdaKernel, step: Step, layer: int, proj: torch.Tensor) -> torch.Tensor:
    """[T, inner] of the model's dtype, ready for the output projection; states of linear layer `layer` move on in their slots.

    proj [T, 5 inner + heads]: q | k | v | beta | decay | gate.
    """
    return by_rows(step, layer, proj, partial(_row_torch, kernel))


def _row_torch(kernel: KdaKernel, proj: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    shape, dtype = kernel.shape, proj.dtype
    x, b, f, gate = proj.split([3 * shape.inner, shape.heads, shape.inner, shape.inner], -1)
    # A slot keeps the window's tokens as rows, the other way round than Gated DeltaNet (reference 1.6).
    y, window = causal_conv(x.to(conv.dtype).float(), conv.float().T, kernel.taps)
    conv.copy_(window.T)
    mixed = by_token(F.silu, y.to(dtype).float()).to(dtype).float()
    q, k, v = (part.unflatten(-1, (shape.heads, shape.head_dim)) for part in mixed.chunk(3, -1))
    decay = reference.decays(f.float(), kernel.rate, kernel.dt_bias, shape.lower_bound)
    beta = by_token(torch.sigmoid, b.float()).to(dtype).float()
    out, state = reference.delta_rule((q, k, v), decay, beta, ssm.float(), state_dtype=ssm.dtype)
    ssm.copy_(state)
    gate = gate.float().unflatten(-1, (shape.heads, shape.head_dim))
    return reference.gated_norm(out.to(dtype).float(), gate, kernel.norm_weight, shape.eps).flatten(1).to(dtype)

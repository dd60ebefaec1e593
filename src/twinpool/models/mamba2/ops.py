"""The Mamba2 mixer between its projections over a packed step: compiled on the CPU, row by row in torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from twinpool.models.bound import Step
from twinpool.models.conv import NativeConv
from twinpool.models.gdn.reference import causal_conv
from twinpool.models.group import Rms
from twinpool.models.mamba2 import reference
from twinpool.models.native import CODES, native, use_native
from twinpool.models.rows import by_rows, by_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """Heads and sizes of a layer.

    dt_limits: least and largest step size; eps: of the gated norm over each group; norm_first: the gate comes after the norm.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int
    eps: float
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    norm_first: bool = False

    @property
    def inner(self) -> int:
        """Columns of x, of the gate z and of the output."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns that go through the convolution: x | B | C."""
        return self.inner + 2 * self.groups * self.state_size


class Mamba2Kernel:
    """A layer's constants, prepared once.

    conv_weight [channels, kernel], conv_bias [channels] or None, a_log, dt_bias and skip (D) [heads], norm_weight [inner] or None
    for a gate without a norm. joint: set where the norm is over more columns than this
    rank has.
    """

    def __init__(
        self,
        shape: Mamba2Shape,
        *,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        norm_weight: torch.Tensor | None,
    ) -> None:
        self.shape = shape
        self.taps = conv_weight.float().contiguous()
        self.rate = -torch.exp(a_log.float())
        self.dt_bias, self.skip = dt_bias.float().contiguous(), skip.float().contiguous()
        self.conv_bias = torch.zeros_like(self.taps[:, 0]) if conv_bias is None else conv_bias.float()
        self.norm_weight = None if norm_weight is None else norm_weight.float().contiguous()
        self.joint: Rms | None = None
        self.conv: NativeConv | None = None
        self.handle: Any = None
        if use_native(conv_weight.device):
            self.conv = NativeConv(conv_weight, conv_bias, dtype=conv_weight.dtype, silu=True)
            self.handle = native.Mamba2(
                heads=shape.heads,
                head_dim=shape.head_dim,
                state_size=shape.state_size,
                groups=shape.groups,
                dtype=CODES[conv_weight.dtype],
                rate=self.rate.data_ptr(),
                dt_bias=self.dt_bias.data_ptr(),
                skip=self.skip.data_ptr(),
                dt_least=shape.dt_limits[0],
                dt_most=shape.dt_limits[1],
            )


def mix(kernel: Mamba2Kernel, step: Step, layer: int, proj: torch.Tensor) -> torch.Tensor:
    """[T, inner] of the model's dtype, ready for the output projection; states of linear layer `layer` move on in their slots.

    proj [T, 2 inner + 2 groups state_size + heads], rows contiguous: z | x | B | C | dt.
    """
    if kernel.conv is None:
        return by_rows(step, layer, proj, partial(_row_torch, kernel))
    shape, n = kernel.shape, len(proj)
    xbc, dt = proj[:, shape.inner :], proj[:, shape.inner + shape.channels :]
    mixed = kernel.conv(step, layer, xbc)
    scanned = torch.empty((n, shape.inner), dtype=torch.float32)
    ssm = step.memory.states[layer].ssm
    kernel.handle.scan(step.rows, ssm, mixed.data_ptr(), dt.data_ptr(), dt.stride(0), scanned.data_ptr())
    if kernel.joint is not None:
        return _joint_norm(kernel, kernel.joint, scanned, proj[:, : shape.inner].float(), _opened).to(proj.dtype)
    out = torch.empty((n, shape.inner), dtype=proj.dtype)
    native.grouped_gated_norm(
        x=scanned.data_ptr(),
        gate=proj.data_ptr(),
        ldg=proj.stride(0),
        y=out.data_ptr(),
        rows=n,
        dim=shape.inner,
        groups=shape.groups,
        weight=0 if kernel.norm_weight is None else kernel.norm_weight.data_ptr(),
        eps=shape.eps,
        norm_first=shape.norm_first,
        dtype=CODES[proj.dtype],
    )
    return out


def _opened(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x silu(gate), all float32 [T, n] and compiled."""
    rows, width = x.shape
    out = torch.empty_like(x)
    native.grouped_gated_norm(
        x=x.data_ptr(),
        gate=gate.data_ptr(),
        ldg=gate.stride(0),
        y=out.data_ptr(),
        rows=rows,
        dim=width,
        groups=1,
        weight=0,
        eps=0.0,
        norm_first=False,
        dtype=CODES[torch.float32],
    )
    return out


def _joint_norm(
    kernel: Mamba2Kernel, rms: Rms, x: torch.Tensor, gate: torch.Tensor, opened: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """float32 [T, inner]: x silu(gate), which is `opened`, over the rms of all ranks' columns, times the weight; or the gate last."""
    assert kernel.norm_weight is not None, "there is a norm"
    if kernel.shape.norm_first:
        return opened(x / rms(x, kernel.shape.eps) * kernel.norm_weight, gate)
    x = opened(x, gate)
    return x / rms(x, kernel.shape.eps) * kernel.norm_weight


def _row_torch(kernel: Mamba2Kernel, proj: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
    shape, dtype = kernel.shape, proj.dtype
    z, xbc, dt = proj.split([shape.inner, shape.channels, shape.heads], -1)
    y, window = causal_conv(xbc.to(conv.dtype).float(), conv.float(), kernel.taps)
    conv.copy_(window)
    mixed = by_token(F.silu, (y + kernel.conv_bias).to(dtype).float()).to(dtype).float()
    width = shape.groups * shape.state_size
    x, b, c = mixed.split([shape.inner, width, width], -1)
    parts = (
        x.unflatten(-1, (shape.heads, shape.head_dim)),
        b.unflatten(-1, (shape.groups, shape.state_size)),
        c.unflatten(-1, (shape.groups, shape.state_size)),
    )
    sizes = reference.step_sizes(dt.float(), kernel.dt_bias, shape.dt_limits)
    out, state = reference.scan(parts, sizes, kernel.rate, kernel.skip, ssm.float(), state_dtype=ssm.dtype)
    ssm.copy_(state)
    if kernel.joint is not None:
        gated = partial(reference.gated_norm, weight=None, groups=1, eps=0.0)
        return _joint_norm(kernel, kernel.joint, out.flatten(1), z.float(), gated).to(dtype)
    return reference.gated_norm(
        out.flatten(1), z.float(), kernel.norm_weight, groups=shape.groups, eps=shape.eps, norm_first=shape.norm_first
    ).to(dtype)

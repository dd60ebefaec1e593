"""Single layers over a little memory: random weights, pools filled with NaN, steps from (start, end, slot) rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from twinpool.models.attention.ops import AttentionKernel, AttentionShape
from twinpool.models.bound import BoundMemory, Step
from twinpool.models.gdn.ops import GdnKernel, GdnShape
from twinpool.models.step_batch import StepBatch

PAGE_SIZE = 4
N_SLOTS = 12
MAX_TOKENS = 1408  # of a sequence


@dataclass(frozen=True)
class Kv:
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class State:
    conv: torch.Tensor
    ssm: torch.Tensor


@dataclass(frozen=True)
class Pools:
    kv: tuple[Kv, ...] = ()
    states: tuple[State, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a sequence, which owns slot and pages number `sequence`; a checkpoint after `mark` of them."""

    sequence: int
    start: int
    end: int
    mark: int = 0
    copy_to: int = 0


TABLES = (
    np.random.default_rng(0)
    .permutation(np.arange(1, N_SLOTS * MAX_TOKENS // PAGE_SIZE + 1))
    .astype(np.int32)
    .reshape(N_SLOTS, -1)
)


def batch_of(*pieces: Piece) -> StepBatch:
    """The pieces as packed rows. Sequence i has slot i + 1."""

    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    lengths = [p.end - p.start for p in pieces]
    return StepBatch(
        positions=np.concatenate([np.arange(p.start, p.end) for p in pieces]),
        row_offsets=ints([0, *np.cumsum(lengths).tolist()]),
        starts=ints([p.start for p in pieces]),
        ends=ints([p.end for p in pieces]),
        slots=ints([p.sequence + 1 for p in pieces]),
        checkpoint_offsets=ints([p.mark for p in pieces]),
        checkpoint_slots=ints([p.copy_to for p in pieces]),
        pages=tuple(TABLES[p.sequence] for p in pieces),
    )


def step_of(pools: Pools, *pieces: Piece) -> Step:
    """A step ready for ops."""
    return Step.of(batch_of(*pieces), BoundMemory.of(pools), device=torch.device("cpu"))


def gdn_kernel(shape: GdnShape, dtype: torch.dtype, seed: int = 0) -> GdnKernel:
    """A layer with random constants."""
    g = torch.Generator().manual_seed(seed)
    return GdnKernel(
        shape,
        conv_weight=torch.randn(shape.channels, shape.kernel, generator=g).mul(0.4).to(dtype),
        a_log=torch.log(torch.rand(shape.value_heads, generator=g) * 0.9 + 0.02).to(dtype),
        dt_bias=(torch.rand(shape.value_heads, generator=g) * 3 - 2.5).to(dtype),
        norm_weight=(1 + 0.1 * torch.randn(shape.value_dim, generator=g)).to(dtype),
    )


def gdn_pools(shape: GdnShape, *, conv: torch.dtype, ssm: torch.dtype) -> Pools:
    """Slots of NaN but 1..N_SLOTS - 2, which are zero; the parts of a slot lie apart, as in the arena."""
    states = shape.value_heads, shape.value_dim, shape.key_dim
    room = torch.full((N_SLOTS, shape.value_heads * shape.value_dim * shape.key_dim + 32), torch.nan, dtype=ssm)
    ssm_view = room.as_strided((N_SLOTS, *states), (room.shape[1], states[1] * states[2], states[2], 1), 16)
    conv_view = torch.full((N_SLOTS, shape.channels, shape.kernel - 1), torch.nan, dtype=conv)
    for view in (ssm_view, conv_view):
        view[1 : N_SLOTS - 1] = 0
    return Pools(states=(State(conv_view, ssm_view),))


def attention_kernel(shape: AttentionShape, dtype: torch.dtype) -> AttentionKernel:
    """A layer with random norms (where the shape has an eps) and a plain rotary table."""
    g = torch.Generator().manual_seed(1)
    angles = torch.arange(MAX_TOKENS)[:, None] * 100.0 ** -(torch.arange(shape.rotary // 2) / max(1, shape.rotary // 2))
    scales = [1 + 0.1 * torch.randn(shape.dim, generator=g) if shape.eps else None for _ in range(2)]
    return AttentionKernel(
        shape,
        query_scale=scales[0],
        key_scale=scales[1],
        table=torch.cat([angles.cos(), angles.sin()], -1).contiguous(),
        dtype=dtype,
    )


def attention_pools(shape: AttentionShape, kv: torch.dtype) -> Pools:
    """Pages of NaN."""
    size = (N_SLOTS * MAX_TOKENS // PAGE_SIZE + 1, PAGE_SIZE, shape.kv_heads, shape.dim)
    return Pools(kv=(Kv(torch.full(size, torch.nan, dtype=kv), torch.full(size, torch.nan, dtype=kv)),))

"""Attention over pages: against its reference, and against itself cut, batched and on more threads."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.reference.layers import PAGE_SIZE, TABLES, Piece, Pools, attention_kernel, attention_pools, step_of
from twinpool.models.attention.cache import FP8
from twinpool.models.attention.ops import AttentionKernel, AttentionShape, attend
from twinpool.models.native import native, set_threads

pytestmark = pytest.mark.skipif(native is None, reason="the kernels are not compiled")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = {
    "256": AttentionShape(heads=4, kv_heads=1, dim=256, rotary=64, scale=256**-0.5, eps=1e-6, gated=True),
    "64": AttentionShape(heads=4, kv_heads=2, dim=64, rotary=32, scale=0.125, eps=1e-6, gated=True),
    "odd": AttentionShape(heads=3, kv_heads=3, dim=22, rotary=10, scale=0.3, eps=1e-5, gated=True),
    "plain": AttentionShape(heads=4, kv_heads=2, dim=32, rotary=32, scale=0.2),
    "no positions": AttentionShape(heads=2, kv_heads=1, dim=16, rotary=0, scale=0.25),
    "norms, no gate": AttentionShape(heads=4, kv_heads=4, dim=16, rotary=16, scale=0.25, eps=1e-5),
}


def inputs(shape: AttentionShape, n: int, dtype: torch.dtype, seed: int = 2) -> torch.Tensor:
    width = shape.query_columns + 2 * shape.kv_heads * shape.dim
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_torch(kernel: AttentionKernel, pools: Pools, x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The same by the reference, through the fallback."""
    slow = AttentionKernel.__new__(AttentionKernel)
    slow.__dict__.update(kernel.__dict__, handle=None)
    return attend(slow, step_of(pools, piece), 0, x)


def cached(pools: Pools, sequence: int, n: int) -> list[torch.Tensor]:
    """Keys and values of a sequence's first n tokens."""
    pages = torch.from_numpy(TABLES[sequence].astype("int64"))[torch.arange(n) // PAGE_SIZE]
    return [view[pages, torch.arange(n) % PAGE_SIZE] for view in (pools.kv[0].keys, pools.kv[0].values)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200])
def test_output_and_cache_equal_the_reference(name: str, length: int) -> None:
    shape = SHAPES[name]
    kernel, x = attention_kernel(shape, F32), inputs(shape, length, F32)
    ours, theirs = attention_pools(shape, F32), attention_pools(shape, F32)
    piece = Piece(0, 0, length)
    torch.testing.assert_close(
        attend(kernel, step_of(ours, piece), 0, x), in_torch(kernel, theirs, x, piece), atol=1e-5, rtol=1e-5
    )
    for a, b in zip(cached(ours, 0, length), cached(theirs, 0, length), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_long_context_crosses_segments() -> None:
    shape = SHAPES["64"]
    kernel, x = attention_kernel(shape, F32), inputs(shape, 1100, F32)
    ours, theirs = attention_pools(shape, F32), attention_pools(shape, F32)
    out = in_torch(kernel, theirs, x, Piece(0, 0, 1100))
    torch.testing.assert_close(attend(kernel, step_of(ours, Piece(0, 0, 1100)), 0, x), out, atol=1e-5, rtol=1e-5)
    again = attend(kernel, step_of(ours, Piece(0, 1099, 1100)), 0, x[1099:])
    whole = attend(kernel, step_of(ours, Piece(0, 900, 1100)), 0, x[900:])
    assert torch.equal(again, whole[-1:])


@pytest.mark.parametrize(("dtype", "kv"), [(BF16, BF16), (BF16, F32), (F16, F16), (F32, BF16)])
def test_low_precision_stays_near_the_reference(dtype: torch.dtype, kv: torch.dtype) -> None:
    shape = SHAPES["256"]
    kernel, x = attention_kernel(shape, dtype), inputs(shape, 130, dtype)
    ours, theirs = attention_pools(shape, kv), attention_pools(shape, kv)
    piece = Piece(0, 0, 130)
    a, b = attend(kernel, step_of(ours, piece), 0, x).float(), in_torch(kernel, theirs, x, piece).float()
    assert (a - b).norm() < 0.01 * b.norm()


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(SHAPES)),
    dtypes=st.sampled_from([(F32, F32), (BF16, BF16), (F16, F32), (F32, BF16), (F32, FP8), (BF16, FP8), (F16, FP8)]),
    length=st.integers(3, 150),
    data=st.data(),
)
def test_the_same_bits_cut_anywhere(name, dtypes, length, data) -> None:
    shape, (dtype, kv) = SHAPES[name], dtypes
    cut = data.draw(st.integers(1, length - 2))
    kernel, x = attention_kernel(shape, dtype), inputs(shape, length, dtype)
    whole, parts = attention_pools(shape, kv), attention_pools(shape, kv)
    out = attend(kernel, step_of(whole, Piece(0, 0, length)), 0, x)
    bounds = (0, cut, cut + 1, length)  # the middle one is a decode step
    pieces = [attend(kernel, step_of(parts, Piece(0, a, b)), 0, x[a:b]) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(pieces), out)
    assert out.isfinite().all()
    assert all(map(torch.equal, map(bits, cached(whole, 0, length)), map(bits, cached(parts, 0, length))))


@pytest.mark.parametrize(("dtype", "kv"), [(F32, F32), (BF16, BF16), (F16, F16), (F32, FP8), (BF16, FP8)])
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_alone_in_a_batch_of_eight_and_on_any_threads(
    name: str, dtype: torch.dtype, kv: torch.dtype
) -> None:
    shape = SHAPES[name]
    kernel = attention_kernel(shape, dtype)
    lengths = (1, 65, 3, 1, 17, 130, 1, 64)
    x = [inputs(shape, n, dtype, seed=n + i) for i, n in enumerate(lengths)]
    together, alone = attention_pools(shape, kv), attention_pools(shape, kv)
    out = attend(kernel, step_of(together, *(Piece(i, 0, n) for i, n in enumerate(lengths))), 0, torch.cat(x))
    set_threads(1)
    singles = [attend(kernel, step_of(alone, Piece(i, 0, n)), 0, x[i]) for i, n in enumerate(lengths)]
    assert torch.equal(out, torch.cat(singles))
    # The pools were NaN: what is finite was written, and nothing else was read.
    assert out.isfinite().all()
    assert together.kv[0].keys[0].isnan().all()

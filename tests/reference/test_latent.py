"""Attention over a latent: heads that meet it as it lies are heads over expanded keys and values; compiled and torch agree."""

from __future__ import annotations

import pytest
import torch

from tests.reference.layers import MAX_TOKENS, N_SLOTS, PAGE_SIZE, TABLES, Kv, Piece, Pools, step_of
from twinpool.models.attention.latent import LatentKernel, LatentShape, attend, rotate_pairs
from twinpool.models.native import native

SHAPE = LatentShape(heads=3, rank=20, plain=8, rotary=4, value_dim=6, scale=0.3)


def pools(dtype: torch.dtype) -> Pools:
    view = torch.full((N_SLOTS * MAX_TOKENS // PAGE_SIZE + 1, PAGE_SIZE, 1, SHAPE.width), float("nan"), dtype=dtype)
    return Pools(kv=(Kv(view, view),))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def run(*, compiled: bool, dtype: torch.dtype, memory: Pools) -> torch.Tensor:
    """A prefill of 90 tokens and one of 7, then a decode of the first."""
    kernel = LatentKernel(SHAPE, dtype=dtype, device=torch.device("cpu"))
    if not compiled:
        kernel.handle = None
    queries, latents = random(98, SHAPE.heads, SHAPE.width, dtype=dtype), random(98, SHAPE.width, dtype=dtype)
    first = attend(kernel, step_of(memory, Piece(0, 0, 90), Piece(1, 0, 7)), 0, queries[:97], latents[:97])
    return torch.cat([first, attend(kernel, step_of(memory, Piece(0, 90, 91)), 0, queries[97:], latents[97:])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_attention_over_expanded_heads(dtype: torch.dtype) -> None:
    memory = pools(dtype)
    keys, values = random(SHAPE.heads, SHAPE.plain, SHAPE.rank), random(SHAPE.heads, SHAPE.value_dim, SHAPE.rank)
    plain, turned = random(5, SHAPE.heads, SHAPE.plain), random(5, SHAPE.heads, SHAPE.rotary)
    row = random(5, SHAPE.width).to(dtype).float()
    expanded = torch.cat(
        [
            torch.einsum("hkr,tr->thk", keys, row[:, : SHAPE.rank]),
            row[:, None, SHAPE.rank :].expand(5, SHAPE.heads, -1),
        ],
        -1,
    )
    scores = torch.einsum("thk,lhk->htl", torch.cat([plain, turned], -1), expanded) * SHAPE.scale
    weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")).softmax(-1)
    expected = torch.einsum("htl,hvr,lr->thv", weights, values, row[:, : SHAPE.rank])
    absorbed = torch.cat([torch.einsum("hkr,thk->thr", keys, plain), turned], -1)
    kernel = LatentKernel(SHAPE, dtype=torch.float32, device=torch.device("cpu"))
    out = attend(kernel, step_of(memory, Piece(0, 0, 5)), 0, absorbed.contiguous(), row)
    torch.testing.assert_close(
        torch.einsum("hvr,thr->thv", values, out[..., : SHAPE.rank]), expected, atol=1e-4, rtol=1e-4
    )
    kept = memory.kv[0].keys[TABLES[0][:2]].flatten(0, 2)[:5]
    assert torch.equal(kept.float(), row)


@pytest.mark.skipif(native is None, reason="the kernels are not compiled")
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("fp8", [False, True])
def test_compiled_and_torch_agree(dtype: torch.dtype, atol: float, fp8: bool) -> None:
    kept = torch.float8_e4m3fn if fp8 else dtype
    ours, torchs = (run(compiled=compiled, dtype=dtype, memory=pools(kept)) for compiled in (True, False))
    torch.testing.assert_close(ours, torchs, atol=atol, rtol=1e-2)


def test_pairs_are_neighbours() -> None:
    cos_sin = torch.tensor([[0.0, 1.0, 1.0, 0.0]])  # the first pair by a right angle, the second not at all
    out = rotate_pairs(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), cos_sin)
    assert out.tolist() == [[[-2.0, 3.0, 1.0, 4.0]]]

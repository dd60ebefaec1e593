"""Linear layers, norms, MLP and mixture of experts: right, and to the last bit independent of rows and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from twinpool.models.blocks import Linear, Mlp, Moe, Router, ZeroCentredNorm, gated_product
from twinpool.models.native import native, set_threads

pytestmark = pytest.mark.skipif(native is None, reason="the kernels are not compiled")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = ((1, 1), (5, 7), (16, 32), (50, 33), (64, 48), (97, 130), (200, 64))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(1)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_linear_is_the_product_for_any_number_of_rows(n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias = randn(n, k, dtype=dtype) / k**0.5, randn(n, dtype=dtype, seed=1)
    layer = Linear([weight[: n // 2], weight[n // 2 :]], [bias[: n // 2], bias[n // 2 :]])
    x = randn(300, k, dtype=dtype, seed=2)
    expected = F.linear(x.double(), weight.double(), bias.double())
    whole = layer(x)
    assert ((whole.double() - expected).abs() <= TOLERANCE[dtype] * (1 + expected.abs())).all()
    wide = layer(x, wide=True)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), whole)
    for rows in (*range(1, 15), 64, 252, 253):
        assert torch.equal(layer(x[:rows]), whole[:rows])
    set_threads(1)
    assert torch.equal(layer(x), whole)


def test_linear_adds_in_place_after_rounding_and_takes_strided_rows() -> None:
    layer = Linear([randn(20, 24, dtype=torch.bfloat16)])
    x = randn(9, 30, dtype=torch.bfloat16, seed=3)[:, :24]
    residual = randn(9, 20, dtype=torch.bfloat16, seed=4)
    expected = residual + layer(x.contiguous())
    assert layer(x, residual=residual) is residual
    assert torch.equal(residual, expected)


def test_padding_is_not_read_from_the_neighbouring_row() -> None:
    layer = Linear([randn(4, 7, dtype=torch.bfloat16)])
    x = torch.full((3, 8), torch.nan, dtype=torch.bfloat16)
    x[:, :7] = 1
    assert layer(x[:, :7]).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 768])
def test_norm_and_gated_product(width: int, dtype: torch.dtype) -> None:
    x, weight = randn(40, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.double())
    norm = ZeroCentredNorm(weight, 1e-6)
    torch.testing.assert_close(norm(x).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(torch.cat([norm(row[None]) for row in x]), norm(x))
    both = torch.cat([x, 2 * x], -1)
    expected = F.silu(wide) * 2 * wide
    torch.testing.assert_close(
        gated_product(both).double(), expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype]
    )


def make_moe(dtype: torch.dtype, *, hidden: int = 24, width: int = 10, experts: int = 6) -> Moe:
    def mlp(seed: int) -> Mlp:
        gate_up, down = (
            randn(2 * width, hidden, dtype=dtype, seed=seed),
            randn(hidden, width, dtype=dtype, seed=seed + 1),
        )
        return Mlp(gate_up=Linear([gate_up / 4]), down=Linear([down / 4]))

    return Moe(
        router=Router(linear=Linear([randn(experts, hidden, dtype=dtype, seed=7)]), top_k=2, normalise=True),
        experts=[mlp(10 * i) for i in range(experts)],
        shared=mlp(500),
        shared_gate=Linear([randn(1, hidden, dtype=dtype, seed=8)]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_agree_with_torch_and_do_not_depend_on_mates(dtype: torch.dtype) -> None:
    moe, x = make_moe(dtype), randn(33, 24, dtype=dtype, seed=9)
    whole = moe(x, torch.zeros_like(x))
    expected = moe._forward_torch(x, torch.zeros_like(x))
    assert (whole - expected).float().norm() < 2 * TOLERANCE[dtype] * expected.float().norm()
    single = [moe(x[i : i + 1], torch.zeros_like(x[:1])) for i in range(len(x))]
    assert torch.equal(torch.cat(single), whole)
    set_threads(1)
    assert torch.equal(moe(x, torch.zeros_like(x)), whole)


def test_a_row_of_nan_spoils_only_itself() -> None:
    x = randn(5, 24, dtype=torch.bfloat16)
    clean = make_moe(torch.bfloat16)(x, torch.zeros_like(x))
    x[2] = torch.nan
    spoiled = make_moe(torch.bfloat16)(x, torch.zeros_like(x))
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(spoiled[others], clean[others])
    assert not spoiled[2].isfinite().any()

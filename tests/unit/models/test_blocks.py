"""Linear layers, norms, MLP and mixture of experts: right, and to the last bit independent of rows and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from twinpool.errors import ModelError
from twinpool.models.blocks import (
    Linear,
    Mlp,
    Moe,
    PreNormLayer,
    RmsNorm,
    Router,
    ZeroCentredNorm,
    gated_product,
    squared_relu,
)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_product_within_a_limit(dtype: torch.dtype) -> None:
    # 0.7 is in no low precision: torch rounds it to the dtype before it compares.
    opened = torch.cat([randn(9, 66, dtype=dtype), torch.full((1, 66), torch.nan, dtype=dtype)])
    gate, up = opened.chunk(2, -1)
    limited = torch.cat([gate.clamp(max=0.7), up.clamp(-0.7, 0.7)], -1)
    assert torch.equal(gated_product(opened, 0.7)[:9], gated_product(limited)[:9])
    assert not torch.equal(gated_product(opened)[:9], gated_product(limited)[:9])
    assert gated_product(opened, 0.7)[9].isnan().all()


def test_squared_relu() -> None:
    x = torch.tensor([[-1.0, 0.0, 2.0, torch.nan]])
    torch.testing.assert_close(squared_relu(x), torch.tensor([[0.0, 0.0, 4.0, torch.nan]]), equal_nan=True)


def make_moe(
    dtype: torch.dtype, *, hidden: int = 24, width: int = 10, experts: int = 6, router_dtype: torch.dtype | None = None
) -> Moe:
    def mlp(seed: int) -> Mlp:
        gate_up, down = (
            randn(2 * width, hidden, dtype=dtype, seed=seed),
            randn(hidden, width, dtype=dtype, seed=seed + 1),
        )
        return Mlp(gate_up=Linear([gate_up / 4]), down=Linear([down / 4]))

    return Moe(
        router=Router(
            linear=Linear([randn(experts, hidden, dtype=router_dtype or dtype, seed=7)]), top_k=2, normalise=True
        ),
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_router_may_be_float32(dtype: torch.dtype) -> None:
    """The compiled form chooses by the unrounded logits: a rounded router sends some of these tokens elsewhere."""
    moe, x = make_moe(dtype, router_dtype=torch.float32), randn(2000, 24, dtype=dtype, seed=9)
    whole, expected = moe(x, torch.zeros_like(x)).float(), moe._forward_torch(x, torch.zeros_like(x)).float()
    assert ((whole - expected).norm(dim=-1) < 4 * TOLERANCE[dtype] * (1 + expected.norm(dim=-1))).all()
    if dtype == torch.bfloat16:
        rounded = make_moe(dtype)(x, torch.zeros_like(x)).float()
        assert not ((rounded - expected).norm(dim=-1) < 4 * TOLERANCE[dtype] * (1 + expected.norm(dim=-1))).all()


ROUTERS = {
    "softmax, not normalised": {"normalise": False},
    "sigmoid, bias, scale": {"normalise": True, "sigmoid": True, "biased": True, "epsilon": 1e-6, "scale": 1.5},
    "softmax, bias": {"normalise": False, "biased": True},
    "groups": {"normalise": True, "sigmoid": True, "biased": True, "groups": 3, "top_groups": 2, "epsilon": 1e-20},
    "pairs": {"normalise": True, "groups": 2, "top_groups": 1},
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("squared_relu", [False, True])
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
@pytest.mark.parametrize("latent", [False, True])
def test_every_way_of_choosing_agrees_with_torch(name: str, squared_relu: bool, shared: str, latent: bool) -> None:
    options = dict(ROUTERS[name])
    bias = randn(6, seed=77) / 5 if options.pop("biased", False) else None

    def mlp(seed: int, width: int) -> Mlp:
        opens, down = randn(10 if squared_relu else 20, width, seed=seed) / 4, randn(width, 10, seed=seed + 1) / 4
        return Mlp(gate_up=Linear([opens]), down=Linear([down]), squared_relu=squared_relu, limit=0.5)

    moe = Moe(
        router=Router(linear=Linear([randn(6, 24, seed=7) / 3]), top_k=2, bias=bias, **options),
        experts=[mlp(10 * i, 9 if latent else 24) for i in range(6)],
        shared=None if shared == "none" else mlp(500, 24),
        shared_gate=Linear([randn(1, 24, seed=8)]) if shared == "gated" else None,
        narrow=Linear([randn(9, 24, seed=12) / 4]) if latent else None,
        widen=Linear([randn(24, 9, seed=13)]) if latent else None,
    )
    x = randn(33, 24, seed=9)
    whole = moe(x, torch.zeros_like(x))
    torch.testing.assert_close(whole, moe._forward_torch(x, torch.zeros_like(x)), atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.cat([moe(row[None], torch.zeros(1, 24)) for row in x]), whole)


def test_groups_close_what_would_be_chosen() -> None:
    # Logits are the input itself: expert 0 is best, but the pair (2, 3) has the larger sum.
    router = Router(linear=Linear([torch.eye(4)]), top_k=2, normalise=False, sigmoid=True, groups=2, top_groups=1)
    weights, chosen = router.choose(torch.tensor([[2.0, -4.0, 1.0, 0.5]]))
    assert chosen.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.5]]).sigmoid())


def test_factors_of_a_layer_round_twice() -> None:
    hidden, half = randn(3, 8, dtype=torch.bfloat16), randn(8, 8, dtype=torch.bfloat16, seed=1)

    class Mixer(torch.nn.Module):
        def forward(self, x: torch.Tensor, step: object, residual: torch.Tensor) -> torch.Tensor:
            return linear.forward(x, residual)

    linear, norm = Linear([half]), RmsNorm(torch.ones(8), 1e-6)
    layer = PreNormLayer(norm=norm, mixer=Mixer(), second_norm=norm, mlp=linear, multiplier=0.3)
    expected = hidden + linear(norm(hidden)) * 0.3
    expected = expected + linear(norm(expected)) * 0.3
    assert torch.equal(layer(hidden.clone(), None), expected)


def test_a_row_of_nan_spoils_only_itself() -> None:
    x = randn(5, 24, dtype=torch.bfloat16)
    clean = make_moe(torch.bfloat16)(x, torch.zeros_like(x))
    x[2] = torch.nan
    spoiled = make_moe(torch.bfloat16)(x, torch.zeros_like(x))
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(spoiled[others], clean[others])
    assert not spoiled[2].isfinite().any()


@pytest.mark.parametrize(
    ("top_k", "groups", "top_groups", "opened"), [(0, 1, 1, 6), (7, 1, 1, 6), (3, 3, 1, 2), (1, 4, 1, 0), (1, 3, 0, 0)]
)
def test_fewer_open_experts_than_a_token_needs(top_k: int, groups: int, top_groups: int, opened: int) -> None:
    message = rf"asks for {top_k} of 6 experts .* from {top_groups} of {groups} groups .*, which have {opened}\."
    with pytest.raises(ModelError, match=message):
        Router(linear=Linear([randn(6, 24)]), top_k=top_k, normalise=True, groups=groups, top_groups=top_groups)

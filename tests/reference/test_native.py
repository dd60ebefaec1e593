"""The compiled kernels one by one: against their formulas, and to the last bit whatever surrounds a value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

native = pytest.importorskip("twinpool._native")

from tests.reference import native_calls as calls  # noqa: E402
from tests.reference.native_calls import CODES, Cache, Heads, Packed, RuleInputs, Slots, close, same  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NO_MARK = (-1, 0)


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = native.threads()
    native.set_threads(request.param)
    torch.manual_seed(1)
    yield
    native.set_threads(before)


def both(run: Callable[[], Any]) -> list[Any]:
    """What run() returns with one thread and with two."""
    results = []
    for n in (1, 2):
        native.set_threads(n)
        results.append(run())
    return results


# ---- linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 2), (3, 5, 7), (8, 97, 64), (13, 70, 33), (300, 130, 96)])
def test_linear(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    weight, bias = (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)
    x = torch.randn(m, k + 3).to(dtype)[:, :k]
    handle = native.PackedLinear(weight.data_ptr(), CODES[dtype], n, k)
    assert (handle.n, handle.k, handle.dtype) == (n, k, CODES[dtype])
    assert handle.nbytes >= n * k * dtype.itemsize
    want = x.float() @ weight.float().T
    close(calls.linear(handle, x), want, dtype)
    close(calls.linear(handle, x, bias), want + bias.float(), dtype)
    wide = torch.full((m, n + 1), 7.0)
    handle.run_f32(x.data_ptr(), x.stride(0), wide.data_ptr(), n + 1, m)
    close(wide[:, :n], want, torch.float32)
    assert (wide[:, n] == 7).all(), "nothing is written behind a row"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(70, 33), (256, 128)])
def test_linear_rows_do_not_know_each_other(dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(517, k).to(dtype)
    handle = native.PackedLinear(weight.data_ptr(), CODES[dtype], n, k)
    whole, again = both(lambda: calls.linear(handle, x, bias))
    assert same(whole, again)
    for at, m in [
        (0, 1),
        (516, 1),
        (5, 2),
        (9, 3),
        (0, 4),
        (3, 5),
        (250, 6),
        (100, 7),
        (11, 8),
        (1, 9),
        (251, 15),
        (20, 260),
    ]:
        assert same(calls.linear(handle, x[at : at + m], bias), whole[at : at + m]), (at, m)


# ---- row by row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 64, 100])
@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm(dtype: torch.dtype, dim: int, zero_centered: bool) -> None:
    x, weight = torch.randn(33, dim + 2).to(dtype)[:, :dim], torch.randn(dim)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(x), dim, dtype=dtype)
        args = (
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            dim,
            len(x),
            dim,
            weight.data_ptr(),
            1e-6,
            zero_centered,
            CODES[dtype],
        )
        native.rms_norm(*args)
        return y

    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    want = normed * (1 + weight) if zero_centered else normed.to(dtype).float() * weight
    whole = run(x)
    close(whole, want, dtype)
    assert all(same(run(x[i : i + 1]), whole[i : i + 1]) for i in range(33))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 128])
def test_gates(dtype: torch.dtype, dim: int) -> None:
    x, wide, weight = torch.randn(9, dim).to(dtype), (3 * torch.randn(9, 2 * dim + 1)).to(dtype), torch.randn(dim)
    gate, up, code = wide[:, :dim].contiguous(), wide[:, dim : 2 * dim], CODES[dtype]
    y = torch.empty_like(x)
    native.rms_norm_gated(x.data_ptr(), gate.data_ptr(), y.data_ptr(), 9, dim, weight.data_ptr(), 1e-6, code)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    close(y, normed.to(dtype).float() * weight * F.silu(gate.float()), dtype, scale=2)
    native.silu_mul(wide.data_ptr(), wide.stride(0), up.data_ptr(), up.stride(0), y.data_ptr(), dim, 9, dim, code)
    close(y, F.silu(gate.float()).to(dtype).float() * up.float(), dtype)
    native.sigmoid_mul(x.data_ptr(), wide.data_ptr(), wide.stride(0), y.data_ptr(), 9, dim, code)
    close(y, x.float() * torch.sigmoid(gate.float()).to(dtype).float(), dtype)
    alone = torch.empty(1, dim, dtype=dtype)
    native.sigmoid_mul(x[4:].data_ptr(), wide[4:].data_ptr(), wide.stride(0), alone.data_ptr(), 1, dim, code)
    assert same(alone[0], y[4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (24, 10), (128, 64)])
def test_rope(dtype: torch.dtype, dim: int, rotary: int) -> None:
    half, positions = rotary // 2, torch.tensor([0, 3, 49, 7, 7])
    angles = torch.outer(torch.arange(50.0), 10000.0 ** (-torch.arange(half) / half))
    cosines, sines = angles.cos(), angles.sin()
    x = torch.randn(5, 3, dim).to(dtype)
    a, b, rest = x.float().split([half, half, dim - rotary], -1)
    c, s = cosines[positions][:, None], sines[positions][:, None]
    want = torch.cat([a * c - b * s, b * c + a * s, rest], -1)
    args = (x.stride(1), 3, dim, rotary)

    def rotate(y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        tables = (cosines.data_ptr(), sines.data_ptr(), CODES[dtype])
        native.rope(y.data_ptr(), y.stride(0), *args, at.data_ptr(), len(at), *tables)
        return y

    alone = [rotate(x[i : i + 1].clone(), positions[i : i + 1].clone()) for i in range(5)]
    close(rotate(x, positions), want, dtype)
    assert same(torch.cat(alone), x)


# ---- convolution and delta rule


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("conv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "kernel", "biased"), [(37, 4, True), (160, 4, False), (16, 2, True)])
def test_conv(dtype: torch.dtype, conv_dtype: torch.dtype, channels: int, kernel: int, biased: bool) -> None:
    weight, bias = torch.randn(channels, kernel), torch.randn(channels) if biased else None
    slots = Slots.of(5, (channels, kernel - 1), (1, 1, 1), conv_dtype, torch.float32)
    slots.conv[1:4] = torch.randn(3, channels, kernel - 1).to(conv_dtype)
    start = slots.conv.clone()
    packed = Packed([(0, 9, 2, 2, 4), (0, 1, 3, *NO_MARK), (0, 2, 1, *NO_MARK)])
    x = torch.randn(12, channels + 1).to(dtype)[:, :channels]
    y = calls.conv1d_silu(packed, x, weight, bias, slots)
    for (_, _, slot, *_), at, to in zip(packed.rows, packed.offsets[:-1], packed.offsets[1:], strict=True):
        want, window = calls.conv_formula(x[at:to], weight, bias, start[slot])
        close(y[at:to], want, dtype)
        assert same(slots.conv[slot], window.to(conv_dtype))
    assert same(slots.conv[4], calls.conv_formula(x[:2], weight, bias, start[2])[1].to(conv_dtype)), "checkpoint"
    assert slots.conv[0].isnan().all(), "slots of nobody stay as they were"
    whole = slots.conv[2].clone()
    slots.conv[2] = start[2]
    pieces = [
        calls.conv1d_silu(Packed([(0, b - a, 2, *NO_MARK)]), x[a:b], weight, bias, slots)
        for a, b in [(0, 1), (1, 3), (3, 9)]
    ]
    assert same(torch.cat(pieces), y[:9])
    assert same(slots.conv[2], whole)


SHAPES = [Heads(1, 1, 16, 16), Heads(2, 4, 12, 20), Heads(2, 4, 64, 64), Heads(1, 2, 128, 128)]


@pytest.mark.parametrize(("dtype", "ssm_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                                 (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)])  # fmt: skip
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_delta_rule(dtype: torch.dtype, ssm_dtype: torch.dtype, heads: Heads) -> None:
    slots = Slots.of(4, (1, 1), (heads.hv, heads.dv, heads.dk), torch.float32, ssm_dtype)
    slots.ssm[1:3] = (torch.randn(2, heads.hv, heads.dv, heads.dk) / 4).to(ssm_dtype)
    start = slots.ssm.clone()
    packed = Packed([(0, 11, 1, 5, 3), (0, 1, 2, *NO_MARK)])
    x = RuleInputs.random(heads, 12, dtype)
    out = calls.delta_rule(packed, heads, x, slots)
    scale = 1 if ssm_dtype == torch.float32 else 3
    for (_, _, slot, *_), at, to in zip(packed.rows, packed.offsets[:-1], packed.offsets[1:], strict=True):
        want, state = calls.rule_formula(heads, x.cut(at, to), start[slot])
        close(out[at:to], want, dtype, scale=scale)
        close(slots.ssm[slot], state, ssm_dtype, scale=scale)
    assert slots.ssm[0].isnan().all()
    end, copy = slots.ssm[1].clone(), slots.ssm[3].clone()
    for cuts in ([0, 5, 11], [0, 1, 2, 3, 11], [0, 10, 11]):
        slots.ssm[1] = start[1]
        pieces = []
        for a, b in itertools.pairwise(cuts):
            pieces.append(calls.delta_rule(Packed([(0, b - a, 1, *NO_MARK)]), heads, x.cut(a, b), slots))
            if b == 5:
                assert same(slots.ssm[1], copy), "a checkpoint is the state of a run that ends there"
        assert same(torch.cat(pieces), out[:11]), cuts
        assert same(slots.ssm[1], end), cuts


def test_delta_rule_batch_of_eight_and_threads() -> None:
    heads = Heads(2, 4, 64, 64)
    lengths = [1, 7, 1, 30, 2, 1, 64, 3]
    offsets = np.cumsum([0, *lengths])
    x = RuleInputs.random(heads, int(offsets[-1]), torch.bfloat16)

    def run(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        slots = Slots.of(9, (1, 1), (heads.hv, heads.dv, heads.dk), torch.float32, torch.float32)
        slots.ssm[[r + 1 for r in rows]] = 0
        packed = Packed([(0, lengths[r], r + 1, *NO_MARK) for r in rows])
        part = x.cut(int(offsets[rows[0]]), int(offsets[rows[-1] + 1]))
        return calls.delta_rule(packed, heads, part, slots), slots.ssm[[r + 1 for r in rows]].clone()

    (out, states), (again, states_again) = both(lambda: run(list(range(8))))
    assert same(out, again)
    assert same(states, states_again)
    for r in range(8):
        alone, state = run([r])
        assert same(alone, out[offsets[r] : offsets[r + 1]])
        assert same(state[0], states[r])


# ---- attention


def scattered(n_rows: int, tokens: int, page_size: int) -> list[np.ndarray]:
    """Page tables over disjoint pages from 1 on, in no order."""
    each = -(-tokens // page_size)
    return list(
        np.random.default_rng(2).permutation(np.arange(1, n_rows * each + 1)).astype(np.int32).reshape(n_rows, each)
    )


ATTENTION = [(4, 2, 16, 3), (6, 1, 24, 16), (8, 2, 64, 1), (2, 2, 20, 64)]


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
                                                (torch.float16, torch.float16), (torch.float32, torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), ATTENTION)
def test_attention(
    dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_size: int
) -> None:
    ends, starts = [150, 1, 70, 65], [0, 0, 69, 60]
    tables = scattered(4, 150, page_size)
    cache = Cache.of(4 * len(tables[0]) + 1, page_size, kv_heads, dim, kv_dtype)
    k, v = (torch.randn(4, 150, kv_heads, dim).to(dtype) for _ in range(2))
    q = torch.randn(4, 150, heads, dim + 4).to(dtype)[..., :dim]
    for r in range(4):
        calls.write_kv(Packed([(0, starts[r], 1, *NO_MARK)], [tables[r]]), cache, k[r, : starts[r]], v[r, : starts[r]])
    packed = Packed([(s, e - s, 1, *NO_MARK) for s, e in zip(starts, ends, strict=True)], tables)
    new_k, new_v, new_q = (
        torch.cat([t[r, s:e] for r, (s, e) in enumerate(zip(starts, ends, strict=True))]) for t in (k, v, q)
    )
    calls.write_kv(packed, cache, new_k, new_v)
    assert same(
        cache.raw[tables[2][69 // page_size], 69 % page_size, : kv_heads * dim], k[2, 69].to(kv_dtype).flatten()
    )
    out = calls.attention(packed, cache, new_q)
    for r, (s, e) in enumerate(zip(starts, ends, strict=True)):
        at = slice(int(packed.offsets[r]), int(packed.offsets[r + 1]))
        close(out[at], calls.attention_formula(q[r, s:e], k[r, :e], v[r, :e], kv_dtype), dtype)
        for a, b in [(s, s + 1), (e - 1, e), (s, (s + e + 1) // 2)]:
            alone = calls.attention(Packed([(a, b - a, 1, *NO_MARK)], [tables[r]]), cache, q[r, a:b])
            assert same(alone, out[at][a - s : b - s]), (r, a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_a_long_context(dtype: torch.dtype) -> None:
    tokens, tables = 2500, scattered(1, 2500, 16)
    cache = Cache.of(len(tables[0]) + 1, 16, 2, 32, dtype)
    k, v, q = (
        torch.randn(tokens, 2, 32).to(dtype),
        torch.randn(tokens, 2, 32).to(dtype),
        torch.randn(tokens, 4, 32).to(dtype),
    )
    whole = Packed([(0, tokens, 1, *NO_MARK)], tables)
    calls.write_kv(whole, cache, k, v)
    out, again = both(lambda: calls.attention(whole, cache, q))
    assert same(out, again)
    close(out, calls.attention_formula(q, k, v, dtype), dtype)
    for a, b in [(0, 1), (1023, 1026), (1100, 1101), (2047, 2049), (2499, 2500), (2300, 2500)]:
        for alone in both(lambda a=a, b=b: calls.attention(Packed([(a, b - a, 1, *NO_MARK)], tables), cache, q[a:b])):
            assert same(alone, out[a:b]), (a, b)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="dtype codes"):
        native.PackedLinear(torch.zeros(1).data_ptr(), 3, 1, 1)
    with pytest.raises(ValueError, match="checkpoint"):
        Packed([(0, 2, 1, 3, 1)])

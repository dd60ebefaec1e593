"""Keys and values in fp8: every code and every rounding, attention over them, and whole models whose every key and value is rounded."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.reference.layers import Piece, attention_kernel, attention_pools, step_of
from tests.reference.packed import Bench
from tests.reference.test_attention import SHAPES, bits, cached, in_torch, inputs
from tests.tiny_models import VOCAB, load_reference, tiny_checkpoint
from twinpool.models.attention import cache
from twinpool.models.attention.cache import FP8, can_keep, kept
from twinpool.models.attention.ops import AttentionShape, attend
from twinpool.models.native import native

compiled = pytest.mark.skipif(native is None, reason="the kernels are not compiled")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CODES = torch.arange(256, dtype=torch.uint8)
# Keys and values go into the pages as they are: no norm, nothing rotated.
BARE = AttentionShape(heads=1, kv_heads=1, dim=256, rotary=0, scale=0.1)


def stored(numbers: torch.Tensor) -> torch.Tensor:
    """The codes of numbers [n, 256] after the kernel has stored them, as keys and as values, which are equal."""
    pools, n = attention_pools(BARE, FP8), len(numbers)
    attend(attention_kernel(BARE, numbers.dtype), step_of(pools, Piece(0, 0, n)), 0, numbers.repeat(1, 3))
    keys, values = (part.view(torch.uint8).flatten(1) for part in cached(pools, 0, n))
    assert torch.equal(keys, values)
    return keys


def same_codes(ours: torch.Tensor, numbers: torch.Tensor) -> None:
    """ours are the codes of kept(numbers); all NaNs are alike."""
    nan = numbers.isnan()
    assert torch.equal(ours[~nan], kept(numbers, FP8).view(torch.uint8)[~nan])
    assert (ours[nan] & 0x7F == 0x7F).all()


@compiled
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_number_of_16_bits_is_stored_as_torch_casts_it(dtype: torch.dtype) -> None:
    numbers = torch.arange(1 << 16).int().to(torch.int16).view(dtype).view(-1, 256)
    same_codes(stored(numbers), numbers)


@compiled
def test_numbers_of_32_bits_are_stored_as_torch_casts_them() -> None:
    """Between every two neighbours of fp8: a little less than the middle, the middle, a little more; then anything."""
    finite = CODES[:127].view(FP8).float()
    middles = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([middles.nextafter(torch.tensor(0.0)), middles, middles.nextafter(torch.tensor(torch.inf))])
    g = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (256 * 1024,), generator=g).int().view(F32)
    numbers = torch.cat([finite, near, -finite, -near, bits])
    same_codes(
        stored(numbers[: len(numbers) // 256 * 256].view(-1, 256)), numbers[: len(numbers) // 256 * 256].view(-1, 256)
    )


def test_beyond_the_largest_number_it_saturates() -> None:
    numbers = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e30, torch.inf, -1e9, -torch.inf, torch.nan])
    assert kept(numbers, FP8).float().tolist()[:8] == [448.0] * 6 + [-448.0] * 2
    assert kept(numbers, FP8).float()[8].isnan()
    assert torch.equal(kept(numbers[:8], BF16), numbers[:8].to(BF16)), "other dtypes are cast"


@compiled
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_every_code_is_read_exactly(dtype: torch.dtype) -> None:
    """One token sees itself alone, so what comes out is its value; a query that is zero but for one element picks that of the key."""
    numbers = torch.where(CODES & 0x7F == 0x7F, 0, CODES).view(FP8).to(dtype)[None]
    kernel, pools = attention_kernel(BARE, dtype), attention_pools(BARE, FP8)
    out = attend(kernel, step_of(pools, Piece(0, 0, 1)), 0, torch.cat([numbers, numbers, numbers], -1))
    assert torch.equal(out, numbers)
    nan = torch.zeros(1, 256, dtype=dtype)
    nan[0, 77] = torch.nan
    for part in (1, 2):  # of a key and of a value
        x = torch.cat([nan if part == i else numbers for i in range(3)], -1)
        out = attend(kernel, step_of(pools, Piece(1, 0, 1)), 0, x)
        assert out.isnan().nonzero()[:, 1].tolist() == (list(range(256)) if part == 1 else [77])


@compiled
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim", [16, 22, 40, 64, 72, 96, 250, 256])
def test_keys_of_every_code_make_the_scores_that_torch_makes(dim: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(heads=2, kv_heads=1, dim=dim, rotary=0, scale=1 / 64)
    g, n = torch.Generator().manual_seed(dim), 131
    finite = CODES[CODES & 0x7F != 0x7F].view(FP8).float()
    x = torch.randn(n, 4 * dim, generator=g)
    x[:, 2 * dim :] = finite[torch.randint(0, len(finite), (n, 2 * dim), generator=g)]
    x = x.to(dtype)
    ours, theirs = attention_pools(shape, FP8), attention_pools(shape, FP8)
    kernel = attention_kernel(shape, dtype)
    out, expected = (f(p).float() for f, p in (
        (lambda p: attend(kernel, step_of(p, Piece(0, 0, n)), 0, x), ours),
        (lambda p: in_torch(kernel, p, x, Piece(0, 0, n)), theirs),
    ))  # fmt: skip
    assert all(map(torch.equal, *(map(bits, cached(p, 0, n)) for p in (ours, theirs))))
    assert (out - expected).norm() < (1e-5 if dtype == F32 else 0.01) * expected.norm()


@compiled
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("length", [1, 3, 63, 65, 200])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_output_and_cache_are_near_the_reference(name: str, length: int, dtype: torch.dtype) -> None:
    """Norms and rotation differ in their last bits, which now and then makes the neighbouring code."""
    shape = SHAPES[name]
    kernel, x = attention_kernel(shape, dtype), inputs(shape, length, dtype)
    ours, theirs = attention_pools(shape, FP8), attention_pools(shape, FP8)
    piece = Piece(0, 0, length)
    out, expected = attend(kernel, step_of(ours, piece), 0, x).float(), in_torch(kernel, theirs, x, piece).float()
    assert (out - expected).norm() < 0.01 * expected.norm()
    for a, b in zip(cached(ours, 0, length), cached(theirs, 0, length), strict=True):
        apart = (bits(a).int() - bits(b).int()).abs()
        assert apart.max() <= 1
        assert apart.float().mean() < 0.002


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5",
        "qwen3_next",
        "granite",
        "granite_rope",
        "lfm2",
        "nemotron",
        "bamba",
        "zamba",
        "zamba_rope",
        "jamba",
        "olmo",
    ],
)
def test_a_whole_model_is_transformers_with_its_keys_and_values_rounded(family: str, tmp_path, monkeypatch) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    tokens = torch.randint(0, VOCAB, (120,), generator=torch.Generator().manual_seed(3)).tolist()
    reference, sample = load_reference(folder), torch.tensor([tokens])
    modeling = sys.modules[type(reference).__module__]
    attention = modeling.eager_attention_forward

    def over_rounded(module, query, key, value, *args, **kwargs):
        return attention(module, query, *(kept(x, FP8).to(x.dtype) for x in (key, value)), *args, **kwargs)

    with torch.inference_mode():
        plain = reference(sample).logits[0, -1].float()
        monkeypatch.setattr(modeling, "eager_attention_forward", over_rounded)
        rounded = reference(sample).logits[0, -1].float()
    bench = Bench(folder, dtype="float32", kv_dtype="fp8_e4m3")
    ours = bench.logits(tokens, [120])[0]
    error, effect = ((x - rounded).abs().max() / rounded.abs().max() for x in (ours, plain))
    assert error < effect / 10
    assert effect > 1e-3, "rounding is seen"


def test_a_device_without_the_type_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert can_keep(FP8, cpu)
    assert can_keep(BF16, cpu)
    monkeypatch.setattr(cache, "kept", lambda x, dtype: x.div(2).to(dtype))
    assert not can_keep(FP8, cpu), "what is read is not what was written"

    def missing(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise TypeError("Trying to convert Float8_e4m3fn to the backend, which does not have support for that dtype.")

    monkeypatch.setattr(cache, "kept", missing)
    assert not can_keep(FP8, cpu)

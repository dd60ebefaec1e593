"""Whole adopted models against unmodified transformers on tiny random weights: one pass, any cut, decode, batches."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.reference.packed import Bench
from tests.tiny_models import FAMILIES, VOCAB, load_reference, tiny_checkpoint
from twinpool.models.native import native

LENGTH = 150
TOKENS = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def bench(family, cache_dir) -> Bench:
    return Bench(tiny_checkpoint(family, cache_dir), dtype="float32")


@pytest.fixture(scope="module")
def truth(family, cache_dir) -> torch.Tensor:
    model = load_reference(tiny_checkpoint(family, cache_dir))
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].float()


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 2e-4) -> None:
    assert torch.isfinite(ours).all()
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < tolerance, float(error)


def test_one_pass(bench, truth) -> None:
    close(bench.logits(TOKENS, [LENGTH]), truth[-1:])


def test_token_by_token(bench, truth) -> None:
    close(bench.logits(TOKENS, list(range(1, LENGTH + 1))), truth)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6))
def test_any_cut(bench, truth, cuts) -> None:
    cuts = [*sorted(cuts), LENGTH]
    close(bench.logits(TOKENS, cuts), truth[[cut - 1 for cut in cuts]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_near(family, cache_dir, dtype) -> None:
    folder = tiny_checkpoint(family, cache_dir, dtype=dtype)
    with torch.inference_mode():
        theirs = load_reference(folder)(torch.tensor([TOKENS])).logits[0].float()
    ours = Bench(folder, dtype=dtype).logits(TOKENS, [LENGTH])
    assert torch.nn.functional.cosine_similarity(ours[0], theirs[-1], dim=0) > 0.97


@pytest.mark.skipif(native is None, reason="without the compiled kernels results agree to rounding only")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ssm_dtype", DTYPES)
def test_the_same_bits_whatever_the_cut_the_batch_and_the_threads(family, cache_dir, dtype, ssm_dtype) -> None:
    bench = Bench(tiny_checkpoint(family, cache_dir, dtype=dtype), dtype=dtype, ssm_dtype=ssm_dtype)
    native.set_threads(2)
    whole = bench.logits(TOKENS, [LENGTH])
    state = bench.state(1)
    for cuts in ([1, 2, 3, 64, 65, LENGTH], [37, LENGTH], [*range(100, LENGTH + 1)]):
        bench.clear()
        assert torch.equal(bench.logits(TOKENS, cuts)[-1:], whole)
        assert all(map(torch.equal, bench.state(1), state))
    bench.clear()
    native.set_threads(1)
    others = [TOKENS[i + 1 :] + TOKENS[: i + 1] for i in range(7)]
    rows = [bench.row(i + 1, other[: 20 * (i + 1)], 0) for i, other in enumerate(others)]
    checkpoint = bench.row(0, TOKENS[:99], 0, checkpoint_at=64, checkpoint_slot=12)
    bench.run(*rows[:3], checkpoint, *rows[3:])
    batched = bench.run(*(bench.row(i + 1, [5], 20 * (i + 1)) for i in range(3)), bench.row(0, TOKENS[99:], 99))
    native.set_threads(2)
    assert torch.equal(batched[-1:], whole)
    kept = bench.state(12)
    bench.clear()
    bench.logits(TOKENS, [64])
    assert all(map(torch.equal, bench.state(1), kept)), "a checkpoint is the state of a run that ended there"

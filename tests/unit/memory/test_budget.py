"""The division of memory: golden numbers of reference section 10, the refusals of 1.9, the invariants of 9.2 #1-7."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twinpool.errors import MemoryRefusal
from twinpool.memory.budget import MemoryRequest, plan_memory
from twinpool.units import GIB, MIB

QWEN3_NEXT = {"conv_bytes": 1_769_472, "ssm_bytes": 75_497_472, "kv_bytes_per_token": 24_576}
KIMI_LINEAR = {"conv_bytes": 1_474_560, "ssm_bytes": 41_943_040, "kv_bytes_per_token": 8_064}
SYNTHETIC = {"conv_bytes": 0, "ssm_bytes": MIB, "kv_bytes_per_token": 4096, "page_size": 16}


def rest_of(rest_bytes: int, **values) -> MemoryRequest:
    """A request whose `rest` (reference 1.1, step 7) is exactly `rest_bytes`."""
    values.setdefault("slots_per_request", 5)
    return MemoryRequest(
        pre_load_bytes=2 * rest_bytes, available_bytes=rest_bytes, mem_fraction_static=1.0, context_len=262_144, **values
    )


@pytest.mark.parametrize(
    ("model", "values", "n_slots", "tokens", "n_running"),
    [
        (QWEN3_NEXT, {"slots_per_request": 3}, 130, 461_949, 43),
        (QWEN3_NEXT, {"slots_per_request": 4}, 130, 461_949, 32),
        (QWEN3_NEXT, {}, 130, 461_949, 26),
        (QWEN3_NEXT, {"draft_tokens": 4, "max_running_requests": 48}, 70, 461_949, 14),
        (QWEN3_NEXT, {"draft_tokens": 4, "max_running_requests": 8}, 70, 537_405, 8),
        (KIMI_LINEAR, {}, 233, 1_403_164, 46),
        (KIMI_LINEAR, {"page_size": 64}, 233, 1_403_136, 46),
    ],
)
def test_golden_twenty_gib(model, values, n_slots, tokens, n_running) -> None:
    ledger = plan_memory(rest_of(20 * GIB, **{**model, **values}))
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens, ledger.max_running_requests) == (n_slots, tokens, n_running)


@pytest.mark.parametrize(
    ("ratio", "slots", "drafts", "asked", "n_slots", "tokens"),
    [(0.9, 3, 0, None, 484, 137_984), (1.0, 5, 0, None, 511, 131_072), (1.0, 5, 4, 64, 281, 131_584)],
)
def test_golden_synthetic(ratio, slots, drafts, asked, n_slots, tokens) -> None:
    request = rest_of(
        GIB, **SYNTHETIC, mamba_full_memory_ratio=ratio, slots_per_request=slots, draft_tokens=drafts, max_running_requests=asked
    )
    ledger = plan_memory(request)
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens) == (n_slots, tokens)


def test_a_pin_beats_the_ratio_and_divides_by_workers() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, max_mamba_cache_size=80, dp=4))
    assert ledger.max_mamba_cache_size == 20
    assert ledger.kv_tokens == (GIB - 21 * MIB) // 4096 // 16 * 16


def test_radix_off_takes_one_slot_a_request() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, radix_cache=False, max_running_requests=12, slots_per_request=1))
    assert (ledger.max_mamba_cache_size, ledger.max_running_requests) == (12, 12)
    assert ledger.kv_tokens == (GIB - 13 * MIB) // 4096 // 16 * 16


def test_pipeline_charges_the_largest_stage() -> None:
    whole = plan_memory(rest_of(GIB, **SYNTHETIC))
    half = plan_memory(rest_of(GIB, **SYNTHETIC, stage_share=Fraction(1, 2)))
    assert half.slot_bytes * 2 == whole.slot_bytes
    assert half.max_mamba_cache_size == 2 * whole.max_mamba_cache_size + 1


def test_states_cap_the_running_requests_with_the_known_sentence() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, max_mamba_cache_size=47, max_running_requests=32))
    assert ledger.max_running_requests == 9
    assert ledger.warnings == (
        "max_running_requests is capped to 9 by the mamba state cache (max_mamba_cache_size=47, 5 state slots per request). To raise it: "
        "increase --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size with --mamba-ssm-dtype bfloat16.",
    )


def test_kv_caps_the_running_requests_with_the_known_sentence() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, max_mamba_cache_size=500, max_running_requests=100, max_total_tokens=64))
    assert ledger.max_running_requests == 32
    assert ledger.warnings == (
        "max_running_requests was reduced from the requested 100 to 32 (per dp worker) due to the available KV cache capacity.",
    )


def test_a_cap_above_what_fits_is_said() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, max_total_tokens=10**9))
    assert ledger.warnings[0].startswith("max_total_tokens=1000000000 is larger than the profiled value 137984")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"max_mamba_cache_size": 5000}, r"^Loaded weights leave no GPU memory .* above 0\.500 .* --max-mamba-cache-size 1022 would fit\.$"),
        ({"ssm_bytes": GIB}, r"Computed max_mamba_cache_size=-1 \(total_rest_memory=1.00 GB, mamba_cache_per_req=1024.00 MB\)"),
        ({"max_mamba_cache_size": 4}, r"max_mamba_cache_size=4, mamba_ratio=5, .*--max-mamba-cache-size 5 is the least\.$"),
        ({"ssm_bytes": 150 * MIB}, r"mamba_ratio=5, .*--mamba-full-memory-ratio 7\.\d+ would fit them\.$"),
        ({"max_total_tokens": 8}, r"^Not enough memory\. .*--max-total-tokens 8 is less than one page of 16 tokens\.$"),
    ],
)  # fmt: skip
def test_refusals_say_what_would_fit(values, sentence) -> None:
    with pytest.raises(MemoryRefusal, match=sentence):
        plan_memory(rest_of(GIB, **{**SYNTHETIC, **values}))


def test_what_the_pin_advice_names_does_fit() -> None:
    plan_memory(rest_of(GIB, **SYNTHETIC, max_mamba_cache_size=1022))


REQUESTS = st.builds(
    rest_of,
    st.integers(64 * MIB, 8 * GIB),
    conv_bytes=st.integers(0, MIB), ssm_bytes=st.integers(1, 4 * MIB), kv_bytes_per_token=st.integers(1, 65536),
    page_size=st.sampled_from([1, 16, 64]), slots_per_request=st.sampled_from([1, 3, 4, 5]),
    mamba_full_memory_ratio=st.floats(0.05, 8), draft_tokens=st.sampled_from([0, 0, 4]),
    max_mamba_cache_size=st.none() | st.integers(1, 200), max_running_requests=st.none() | st.integers(1, 300), dp=st.sampled_from([1, 2]),
)  # fmt: skip


def planned(request: MemoryRequest):
    try:
        return plan_memory(request)
    except MemoryRefusal:
        return None


@given(REQUESTS)
def test_the_lines_are_the_whole(request_) -> None:
    ledger = planned(request_)
    if ledger is not None:
        assert sum(line.size_bytes for line in ledger.lines) == ledger.total_bytes
        assert all(line.size_bytes >= 0 for line in ledger.lines)


@given(REQUESTS, st.integers(0, GIB))
def test_more_memory_never_lowers_capacity(request_, more) -> None:
    ledger = planned(request_)
    if ledger is not None:
        larger = plan_memory(replace(request_, available_bytes=request_.available_bytes + more, pre_load_bytes=request_.pre_load_bytes + more))
        assert larger.max_mamba_cache_size >= ledger.max_mamba_cache_size
        assert larger.max_running_requests >= ledger.max_running_requests
        if request_.draft_tokens == 0 and request_.max_mamba_cache_size is not None:
            assert larger.kv_tokens >= ledger.kv_tokens


@given(REQUESTS)
def test_the_ratio_is_used_up_to_one_slot(request_) -> None:
    request_ = replace(request_, draft_tokens=0, max_mamba_cache_size=None)
    ledger = planned(request_)
    if ledger is not None:
        ratio = Fraction(request_.mamba_full_memory_ratio).limit_denominator(10**9)
        budget = request_.available_bytes * ratio / (1 + ratio)
        slots = ledger.max_mamba_cache_size
        assert (slots + 1) * ledger.slot_bytes <= budget < (slots + 2) * ledger.slot_bytes

"""The division of memory: golden numbers of reference section 10, cases of 1.3 to 1.5, refusals of 1.9."""

from __future__ import annotations

import pytest

from twinpool.errors import ConfigError, MemoryRefusal
from twinpool.memory.budget import Ledger, MemoryRequest, plan_memory
from twinpool.units import GIB, MIB

QWEN3_NEXT = {"conv_bytes": 1_769_472, "ssm_bytes": 75_497_472, "kv_bytes_per_token": 24_576}
KIMI_LINEAR = {"conv_bytes": 1_474_560, "ssm_bytes": 41_943_040, "kv_bytes_per_token": 8_064}
LFM2 = {"conv_bytes": 81_920, "ssm_bytes": 0, "kv_bytes_per_token": 12_288}
SYNTHETIC = {"conv_bytes": 0, "ssm_bytes": MIB, "kv_bytes_per_token": 4096, "page_size": 16}


def rest_of(rest_bytes: int, **values) -> MemoryRequest:
    """A request whose `rest` (reference 1.1, step 7) is exactly `rest_bytes`: weights take two more, slack one."""
    base = {
        "pre_load_bytes": 4 * rest_bytes, "available_bytes": 2 * rest_bytes, "mem_fraction_static": 0.75,
        "context_len": 262_144, "slots_per_request": 5,
    }  # fmt: skip
    return MemoryRequest(**{**base, **values})


def top_lines(ledger: Ledger) -> dict[str, int]:
    return {line.name: line.bytes for line in ledger.lines if not line.part_of}


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
    assert ledger.budget_bytes == 20 * GIB
    assert ledger.n_pages == tokens // ledger.page_size


@pytest.mark.parametrize(
    ("ratio", "slots", "drafts", "asked", "n_slots", "tokens"),
    [(0.9, 3, 0, None, 484, 137_984), (1.0, 5, 0, None, 511, 131_072), (1.0, 5, 4, 64, 281, 131_584)],
)
def test_golden_synthetic(ratio, slots, drafts, asked, n_slots, tokens) -> None:
    ledger = plan_memory(
        rest_of(GIB, **SYNTHETIC, ratio=ratio, slots_per_request=slots, draft_tokens=drafts, max_running_requests=asked)
    )
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens) == (n_slots, tokens)


def test_short_convolution_states_are_almost_free() -> None:
    ledger = plan_memory(rest_of(GIB, **LFM2, max_mamba_cache_size=100))
    assert ledger.slot_bytes == 81_920
    assert ledger.kv_tokens == (GIB - 101 * 81_920) // 12_288


def test_the_lines_of_a_division() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, slots_per_request=3, origins={"mamba_full_memory_ratio": "flag"}))
    assert top_lines(ledger) == {
        "weights": 2 * GIB, "slack": GIB, "conv states": 0, "ssm states": 484 * MIB, "padding slot": MIB,
        "KV pool": 137_984 * 4096, "unused": 0,
    }  # fmt: skip
    assert ledger.whole_bytes == sum(top_lines(ledger).values()) == 4 * GIB
    assert ledger.line("ssm states").origin == "flag"
    assert (ledger.line("KV padding page").bytes, ledger.line("KV padding page").part_of) == (16 * 4096, "slack")
    assert ledger.line("arena rounding").bytes == 0
    assert ledger.kv_pool_bytes == (137_984 + 16) * 4096
    assert ledger.ssm_pool_bytes == 485 * MIB


def test_slots_are_rounded_up_to_pages_out_of_slack() -> None:
    ledger = plan_memory(rest_of(20 * GIB, **QWEN3_NEXT, page_size=64))
    page = 64 * 24_576
    assert ledger.line("arena rounding").bytes == 131 * (50 * page - 77_266_944)
    assert ledger.line("arena rounding").part_of == "slack"
    assert not any("rounding" in warning for warning in ledger.warnings)


def test_a_slack_too_small_for_rounding_is_said() -> None:
    request = rest_of(GIB, **SYNTHETIC, mem_fraction_static=1.0)
    assert "Padding and rounding" in plan_memory(request).warnings[-1]


def test_a_pin_beats_the_ratio_and_divides_by_workers() -> None:  # 9.2 #1, #4
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, max_mamba_cache_size=80, max_running_requests=10, dp=4))
    assert (ledger.max_mamba_cache_size, ledger.max_running_requests) == (20, 2)
    assert ledger.kv_tokens * 4096 == GIB - 21 * MIB


def test_a_pin_with_drafts_reserves_rows_for_running_requests() -> None:  # 9.2 #1
    values = {"max_mamba_cache_size": 40, "max_running_requests": 6, "draft_tokens": 4}
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, **values))
    assert ledger.draft_rows == 6
    assert top_lines(ledger)["draft scratch"] == (6 + 1) * 4 * MIB == ledger.draft_ssm_bytes
    assert ledger.kv_tokens * 4096 == GIB - 41 * MIB - 28 * MIB
    more = plan_memory(rest_of(GIB, **SYNTHETIC, **{**values, "max_running_requests": 100}))
    assert more.draft_rows == 40 // 5


def test_no_states_per_draft_step_no_reservation_but_the_ring() -> None:  # 9.2 #2
    values = {"max_mamba_cache_size": 40, "max_running_requests": 6, "draft_tokens": 4, "reserve_draft_states": False}
    assert plan_memory(rest_of(GIB, **SYNTHETIC, **values)).kv_tokens * 4096 == GIB - 41 * MIB
    ring = plan_memory(rest_of(GIB, **SYNTHETIC, **values, fixed_bytes=7 * MIB))
    assert ring.kv_tokens * 4096 == GIB - 48 * MIB
    assert top_lines(ring)["replay rings"] == 7 * MIB


def test_radix_off_takes_one_slot_a_request() -> None:
    off = {**SYNTHETIC, "radix_cache": False, "slots_per_request": 1}
    ledger = plan_memory(rest_of(GIB, **off, max_running_requests=12))
    assert (ledger.max_mamba_cache_size, ledger.max_running_requests) == (12, 12)
    assert ledger.kv_tokens * 4096 == GIB - 13 * MIB
    drafts = plan_memory(rest_of(GIB, **off, max_running_requests=12, draft_tokens=4))
    assert drafts.kv_tokens * 4096 == GIB - 13 * MIB - 13 * 4 * MIB
    assert plan_memory(rest_of(GIB, **off)).max_mamba_cache_size == 484  # number of requests unknown: by ratio


def test_pipeline_charges_the_largest_stage() -> None:  # 9.2 #3
    model = {**SYNTHETIC, "conv_bytes": 600, "ssm_bytes": 6000}
    ledger = plan_memory(rest_of(GIB, **model, max_mamba_cache_size=50, stage_share=(3, 5)))
    assert ledger.slot_bytes == 3960
    assert ledger.conv_pool_bytes == 51 * 360
    assert top_lines(ledger)["conv states"] + top_lines(ledger)["ssm states"] == 50 * 3960


def test_an_engine_that_forgets_the_padding_slot() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, ratio=1.0, charge_padding_slot=False))
    assert ledger.max_mamba_cache_size == 512
    assert ledger.line("padding slot").part_of == "slack"
    assert sum(top_lines(ledger).values()) == ledger.whole_bytes


def test_side_states_are_charged_with_each_slot() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, ratio=1.0, extra_slot_bytes=MIB))
    assert ledger.max_mamba_cache_size == 255
    assert top_lines(ledger)["side states"] == 256 * MIB == ledger.extra_pool_bytes


def test_slack_is_at_least_the_activation_reserve() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, activation_reserve_bytes=GIB + 256 * MIB))
    assert top_lines(ledger)["slack"] == GIB + 256 * MIB
    assert ledger.budget_bytes == 768 * MIB


def test_multimodal_reserve_comes_first() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, multimodal_bytes=256 * MIB))
    assert ledger.budget_bytes == 768 * MIB
    assert top_lines(ledger)["multimodal reserve"] == 256 * MIB


def test_memory_that_came_back_during_the_load_is_not_a_negative_weight() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, pre_load_bytes=2 * GIB, available_bytes=3 * GIB))
    assert top_lines(ledger)["weights"] == 0
    assert sum(top_lines(ledger).values()) == ledger.whole_bytes == 3 * GIB


def test_context_parallel_ranks_expose_more_logical_tokens() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, dcp=2))
    assert ledger.logical_tokens == 2 * ledger.kv_tokens


@pytest.mark.parametrize(
    ("tokens", "context_len", "expected"),
    [(4096, 2**20, 2048), (40_960, 4096, 4096), (16_384, 2_800, 2995)],  # clamped below, above, by tokens / context
)
def test_estimate_of_running_requests(tokens, context_len, expected) -> None:
    values = {"max_mamba_cache_size": 50_000, "slots_per_request": 1, "context_len": context_len, "page_size": 1}
    model = {"conv_bytes": 0, "ssm_bytes": 1, "kv_bytes_per_token": 16, "max_total_tokens": tokens}
    assert plan_memory(rest_of(GIB, **model, **values)).max_running_requests == min(expected, tokens // 2)


def test_a_model_without_attention_keeps_a_context_of_tokens() -> None:
    pure = {"conv_bytes": 0, "ssm_bytes": MIB, "kv_bytes_per_token": 0, "max_mamba_cache_size": 20}
    assert plan_memory(rest_of(GIB, **pure, one_arena=False)).kv_tokens == 262_144
    assert plan_memory(rest_of(GIB, **pure)).kv_tokens == 20 * 262_144, "ours: one for each slot"
    assert plan_memory(rest_of(GIB, **pure | {"max_mamba_cache_size": 500})).kv_tokens == 1 << 24
    assert plan_memory(rest_of(GIB, **pure, max_total_tokens=999)).kv_tokens == 999


def test_a_model_without_states_gives_all_to_kv() -> None:
    ledger = plan_memory(rest_of(GIB, conv_bytes=0, ssm_bytes=0, kv_bytes_per_token=4096))
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens) == (0, GIB // 4096)
    assert "ssm states" not in top_lines(ledger)


def test_w1_states_cap_the_running_requests() -> None:  # 9.2 #5
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, max_mamba_cache_size=47, max_running_requests=32))
    assert ledger.max_running_requests == 9
    assert ledger.warnings == (
        "max_running_requests is capped to 9 by the mamba state cache (max_mamba_cache_size=47, 5 state slots per "
        "request). To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size "
        "with --mamba-ssm-dtype bfloat16.",
    )


def test_w2_kv_caps_the_running_requests() -> None:
    values = {"max_mamba_cache_size": 500, "max_running_requests": 100, "max_total_tokens": 64}
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, **values))
    assert ledger.max_running_requests == 32
    assert ledger.warnings == (
        "max_running_requests was reduced from the requested 100 to 32 (per dp worker) due to the available KV cache "
        "capacity.",
    )


def test_a_token_cap_above_what_fits_is_said() -> None:
    ledger = plan_memory(rest_of(GIB, **SYNTHETIC, slots_per_request=3, max_total_tokens=10**9))
    assert ledger.warnings[0] == (
        "max_total_tokens=1000000000 is larger than the profiled value 137984. Use the profiled value instead."
    )


def refusal(**values) -> str:
    with pytest.raises(MemoryRefusal) as caught:
        plan_memory(rest_of(GIB, **{**SYNTHETIC, **values}))
    return str(caught.value)


def test_e1_names_the_pin_that_fits() -> None:
    assert refusal(max_mamba_cache_size=5000, dp=2) == (
        "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.75. "
        "Raise --mem-fraction-static above 0.500 (minimum viable = 1 - available/pre = 0.5000). "
        "If using speculative decoding, draft weights are now counted. "
        "--max-mamba-cache-size 5000 needs 2.44 GiB for 2500 state slots and the padding slot, and 1.00 GiB are left "
        "for both pools; at most --max-mamba-cache-size 2044 fits."
    )
    plan_memory(rest_of(GIB, **SYNTHETIC, max_mamba_cache_size=2044, dp=2))
    assert refusal(max_mamba_cache_size=2048, dp=2)


def test_e1_rounds_the_suggested_fraction_up() -> None:
    text = refusal(pre_load_bytes=3 * GIB, available_bytes=GIB, mem_fraction_static=0.99, max_mamba_cache_size=2000)
    assert "above 0.667 (minimum viable = 1 - available/pre = 0.6667)" in text


def test_e1_without_radix_cache_names_the_requests_that_fit() -> None:
    text = refusal(radix_cache=False, slots_per_request=1, max_running_requests=1200)
    assert text.endswith("at most --max-running-requests 1022 fits.")
    plan_memory(rest_of(GIB, **SYNTHETIC, radix_cache=False, slots_per_request=1, max_running_requests=1022))


def test_e2_names_the_ratio_that_works() -> None:
    assert refusal(ssm_bytes=100 * MIB, ratio=0.1) == (
        "Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed max_mamba_cache_size=-1 "
        "(total_rest_memory=1.00 GB, mamba_cache_per_req=100.00 MB). Try: (1) reduce --max-running-requests, (2) "
        "increase --mem-fraction-static, (3) reduce --speculative-num-draft-tokens, or (4) use GPUs with more memory. "
        "One request needs 5 state slots, 600.00 MiB with the padding slot, out of 1.00 GiB for both pools; "
        "raise --mamba-full-memory-ratio from 0.1 to 1.416."
    )
    assert plan_memory(rest_of(GIB, **{**SYNTHETIC, "ssm_bytes": 100 * MIB, "ratio": 1.416})).max_running_requests == 1
    assert "from 1.415 to 1.416" in refusal(ssm_bytes=100 * MIB, ratio=1.415)


def test_e2_asks_for_memory_when_no_ratio_works() -> None:
    big = {**SYNTHETIC, "ssm_bytes": 200 * MIB}
    assert refusal(**big).endswith(
        "One request needs 1.17 GiB in both pools and 1.00 GiB are left for them; "
        "use --mem-fraction-static 0.793 or more with --max-mamba-cache-size 5."
    )
    assert plan_memory(rest_of(GIB, **big, mem_fraction_static=0.793, max_mamba_cache_size=5)).max_running_requests == 1
    with pytest.raises(MemoryRefusal):
        plan_memory(rest_of(GIB, **big, mem_fraction_static=0.792, max_mamba_cache_size=5))
    assert refusal(ssm_bytes=600 * MIB).endswith(
        "One request needs 3.52 GiB in both pools and 1.00 GiB are left for them; no --mem-fraction-static leaves that "
        "much: use a device with more memory, or shrink a state with --mamba-ssm-dtype bfloat16."
    )


def test_e3_names_the_least_pin() -> None:
    assert refusal(max_mamba_cache_size=9, dp=2) == (
        "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. max_mamba_cache_size=4, "
        "mamba_ratio=5, resulting max_num_reqs=0. Try: (1) reduce --max-running-requests, (2) increase "
        "--mem-fraction-static, or (3) use GPUs with more memory. "
        "--max-mamba-cache-size 9 gives 4 state slots per dp worker and one request needs 5; use at least 10."
    )
    assert plan_memory(rest_of(GIB, **SYNTHETIC, max_mamba_cache_size=10, dp=2)).max_running_requests == 1


def test_e3_when_kv_holds_less_than_two_tokens() -> None:
    text = refusal(page_size=1, max_total_tokens=1)
    assert text.startswith("Hybrid (mamba/linear-attention) state cache is too small to serve any requests.")
    assert text.endswith("--max-total-tokens 1 is less than a request needs; use at least 2.")


def test_e4_is_less_than_a_page() -> None:
    assert refusal(max_total_tokens=8) == (
        "Not enough memory. Please try to increase --mem-fraction-static. "
        "Current value: mem_fraction_static=0.75. --max-total-tokens 8 is less than a request needs; use at least 16."
    )
    text = refusal(page_size=512, max_mamba_cache_size=1022)
    assert text.endswith("at most --max-mamba-cache-size 1021 fits.")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"page_size": 0}, "page_size=0"),
        ({"ssm_bytes": -1}, "ssm_bytes=-1"),
        ({"max_mamba_cache_size": 0}, "--max-mamba-cache-size 0 must be at least 1"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static is 1.5"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static is nan"),
        ({"ratio": 0.0}, "--mamba-full-memory-ratio 0.0"),
        ({"ratio": float("inf")}, "--mamba-full-memory-ratio inf"),
        ({"draft_tokens": 4}, "--speculative-num-draft-tokens 4 needs --max-running-requests"),
        ({"stage_share": (0, 5)}, r"stage_share=\(0, 5\)"),
    ],
)
def test_impossible_input_is_refused_by_name(values, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan_memory(rest_of(GIB, **{**SYNTHETIC, **values}))

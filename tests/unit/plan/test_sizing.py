"""Forward plans against the golden numbers of the reference (section 10), and what parallel sizes do to them (1.8)."""

from __future__ import annotations

import pytest

from tests.unit.plan.plans import builtin, machine, manual, plan
from twinpool.config.engines import SGLANG, SGLANG_UNPADDED, TWINPOOL
from twinpool.errors import ConfigError, ModelError
from twinpool.units import GIB, MIB

# Flags that give S: with the extra buffer, overlapping, lazy, without overlap; and with no buffer at all.
S5 = {"mamba_radix_cache_strategy": "extra_buffer"}
S4 = {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
S3 = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
QWEN, KIMI, LFM = "Qwen3-Next-80B-A3B", "Kimi-Linear-48B-A3B", "LFM2-1.2B"


@pytest.mark.parametrize(
    ("model", "flags", "slot_bytes", "kv_bytes", "te"),
    [
        (QWEN, {}, 77_266_944, 24_576, 3144.0),
        (QWEN, {"mamba_ssm_dtype": "bfloat16"}, 39_518_208, 24_576, 1608.0),
        (QWEN, {"tp_size": 2}, 38_633_472, 12_288, 3144.0),
        (KIMI, {}, 43_417_600, 8_064, 5384.1),
        (LFM, {}, 81_920, 12_288, 6.67),
    ],
)
def test_constants_of_the_reference(
    model: str, flags: dict[str, object], slot_bytes: int, kv_bytes: int, te: float
) -> None:
    request = plan(builtin(model), machine(20 * GIB), **flags).request
    assert (request.stage_slot_bytes, request.kv_bytes_per_token) == (slot_bytes, kv_bytes)
    found = plan(builtin(model), machine(20 * GIB), **flags).token_equivalents
    assert found == pytest.approx(te, abs=0.05 if te > 10 else 0.005)


@pytest.mark.parametrize(("flags", "running"), [(S3, 43), (S4, 32), (S5, 26)])
def test_qwen3_next_without_drafts(flags: dict[str, object], running: int) -> None:
    ledger = plan(builtin(QWEN), machine(20 * GIB), mamba_full_memory_ratio=0.9, **flags).ledger
    assert ledger is not None
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens, ledger.max_running_requests) == (130, 461_949, running)


@pytest.mark.parametrize(("mrr", "tokens", "running"), [(48, 461_949, 14), (8, 537_405, 8)])
def test_qwen3_next_with_four_draft_tokens(mrr: int, tokens: int, running: int) -> None:
    # The golden numbers have no KV of a draft layer, so the model's own draft head is left out here.
    model = builtin(QWEN, draft_layers=0)
    ledger = plan(
        model, machine(20 * GIB), mamba_full_memory_ratio=0.9, speculative_num_draft_tokens=4, max_running_requests=mrr,
        **S5,
    ).ledger  # fmt: skip
    assert ledger is not None
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens, ledger.max_running_requests) == (70, tokens, running)
    assert ledger.max_mamba_cache_size // ledger.slots_per_request == 14


def test_the_draft_heads_kv_is_charged_beside_the_states() -> None:
    flags = {"speculative_num_draft_tokens": 4, "max_running_requests": 48, **S5}
    with_heads = plan(builtin(QWEN, draft_layers=1), machine(20 * GIB), **flags)
    assert with_heads.request.kv_bytes_per_token == 24_576 * 13 // 12
    assert with_heads.ledger is not None
    assert with_heads.ledger.max_mamba_cache_size == 70
    assert with_heads.ledger.kv_tokens == 461_949 * 12 // 13


@pytest.mark.parametrize(("page", "tokens"), [(1, 1_403_164), (64, 1_403_136)])
def test_kimi_linear(page: int, tokens: int) -> None:
    ledger = plan(builtin(KIMI), machine(20 * GIB), mamba_full_memory_ratio=0.9, page_size=page, **S5).ledger
    assert ledger is not None
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens, ledger.max_running_requests) == (233, tokens, 46)


@pytest.mark.parametrize(
    ("flags", "ratio", "slots", "tokens"),
    [
        (S5, 0.9, 484, 137_984),
        (S5, 1.0, 511, 131_072),
        ({**S5, "speculative_num_draft_tokens": 4, "max_running_requests": 64}, 1.0, 281, 131_584),
    ],
)
def test_synthetic_pages_of_sixteen(flags: dict[str, object], ratio: float, slots: int, tokens: int) -> None:
    # S is 3 in the first row of the reference, which no strategy allows with pages of 16; without drafts S moves nothing.
    sizing = plan(manual(MIB, 4096), machine(GIB), mamba_full_memory_ratio=ratio, page_size=16, **flags)
    assert sizing.ledger is not None
    assert (sizing.ledger.max_mamba_cache_size, sizing.ledger.kv_tokens) == (slots, tokens)


def test_the_padding_slot_is_charged_by_one_engine_and_not_by_the_other() -> None:
    padded, unpadded = (
        plan(manual(MIB, 4096), machine(GIB), rules=rules, mamba_full_memory_ratio=1.0).ledger
        for rules in (SGLANG, SGLANG_UNPADDED)
    )
    assert padded is not None
    assert unpadded is not None
    assert (padded.max_mamba_cache_size, unpadded.max_mamba_cache_size) == (511, 512)


def test_tensor_parallel_ranks_halve_the_slot_and_share_kv_heads_down_to_one() -> None:
    one, two, four = (plan(builtin(QWEN), machine(20 * GIB), tp_size=tp).request for tp in (1, 2, 4))
    assert one.stage_slot_bytes == 2 * two.stage_slot_bytes == 4 * four.stage_slot_bytes
    assert (one.kv_bytes_per_token, two.kv_bytes_per_token, four.kv_bytes_per_token) == (24_576, 12_288, 12_288)


def test_pipeline_stages_are_charged_as_the_largest_and_turn_overlap_off() -> None:
    sizing = plan(builtin(QWEN), machine(20 * GIB), pp_size=2)
    assert sizing.request.stage_share == (18, 36)
    assert sizing.request.stage_slot_bytes == 77_266_944 // 2
    assert sizing.request.kv_bytes_per_token == 12_288
    assert (sizing.resolved.overlap, sizing.resolved.strategy, sizing.request.slots_per_request) == (
        False,
        "no_buffer",
        3,
    )
    paged = plan(builtin(QWEN), machine(20 * GIB), pp_size=2, page_size=16)
    assert (paged.resolved.strategy, paged.request.slots_per_request) == ("extra_buffer", 4)


def test_workers_of_dp_attention_divide_slots_and_requests() -> None:
    flags = {"tp_size": 4, "dp_size": 4, "max_mamba_cache_size": 100, "max_running_requests": 18, **S5}
    ledger = plan(builtin(QWEN), machine(20 * GIB), enable_dp_attention=True, **flags).ledger
    assert ledger is not None
    assert (ledger.max_mamba_cache_size, ledger.max_running_requests) == (25, 4)
    assert ledger.slot_bytes == 77_266_944  # each worker keeps whole states on its one rank


def test_dp_without_dp_attention_divides_nothing() -> None:
    flags = {"dp_size": 4, "max_mamba_cache_size": 100, "max_running_requests": 18, **S5}
    ledger = plan(builtin(QWEN), machine(20 * GIB), **flags).ledger
    assert ledger is not None
    assert (ledger.max_mamba_cache_size, ledger.max_running_requests) == (100, 18)


def test_decode_context_parallel_ranks_multiply_logical_tokens_only() -> None:
    flags = {"tp_size": 8, "max_mamba_cache_size": 60, **S5}
    one, four = (plan(builtin(KIMI), machine(20 * GIB), dcp_size=dcp, **flags).ledger for dcp in (1, 4))
    assert one is not None
    assert four is not None
    assert one.max_mamba_cache_size == four.max_mamba_cache_size == 60
    assert four.kv_tokens == one.kv_tokens
    assert four.logical_tokens == 4 * one.logical_tokens


def test_the_skipped_decode_lock_saves_a_slot_a_request() -> None:
    assert plan(builtin(QWEN), machine(20 * GIB), skip_decode_lock=True, **S5).request.slots_per_request == 4
    assert plan(builtin(QWEN), machine(20 * GIB), skip_decode_lock=True, **S3).request.slots_per_request == 3


def test_a_prefill_worker_reserves_no_draft_states() -> None:
    flags = {"speculative_num_draft_tokens": 4, "max_running_requests": 48, **S5}
    model = builtin(QWEN, draft_layers=0)
    ledger = plan(model, machine(20 * GIB), disaggregation_mode="prefill", **flags).ledger
    assert ledger is not None
    assert (ledger.max_mamba_cache_size, ledger.draft_rows) == (130, 0)


def test_replay_rings_are_a_fixed_charge_for_each_request() -> None:
    sizing = plan(builtin(QWEN), machine(20 * GIB), enable_linear_replayssm=True, max_running_requests=16, **S3)
    # Per layer: 2 (Hv R dv c + Hk R dk c) + 4 Hv R with Hv 32, Hk 16, R 16, c 2; 36 layers; 16 + 1 rows.
    ring = 36 * (2 * (32 * 16 * 128 * 2 + 16 * 16 * 128 * 2) + 4 * 32 * 16)
    assert sizing.request.fixed_bytes == ring * 17
    with pytest.raises(ConfigError, match="--enable-linear-replayssm needs --max-running-requests"):
        plan(builtin(QWEN), machine(20 * GIB), enable_linear_replayssm=True, **S3)
    with pytest.raises(ConfigError, match="is for Gated DeltaNet and KDA layers"):
        plan(builtin("Falcon-H1-7B"), machine(20 * GIB), enable_linear_replayssm=True, max_running_requests=16, **S3)


def test_a_division_that_does_not_fit_is_a_refusal_and_no_exception() -> None:
    sizing = plan(builtin(QWEN), machine(GIB // 8))
    assert sizing.ledger is None
    assert sizing.refusal is not None
    assert sizing.refusal.startswith("Not enough GPU memory for hybrid")


def test_flags_that_do_not_suit_the_model_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="--tp-size 3 does not divide"):
        plan(builtin(QWEN), machine(20 * GIB), tp_size=3)
    with pytest.raises(ModelError, match="--pp-size 99 needs a layer for each stage"):
        plan(builtin(QWEN), machine(20 * GIB), pp_size=99)
    with pytest.raises(ConfigError, match="--dp-size 3 does not divide --tp-size 4"):
        plan(builtin(QWEN), machine(20 * GIB), tp_size=4, dp_size=3, enable_dp_attention=True)
    with pytest.raises(ConfigError, match=r"--context-length 300000 is longer than the model's 262144 tokens"):
        plan(builtin(QWEN), machine(20 * GIB), context_length=300_000)


def test_our_own_server_asks_for_the_number_of_requests_where_the_reference_assumes_one() -> None:
    assert plan(builtin(QWEN), machine(20 * GIB), speculative_num_draft_tokens=2).resolved.max_running_requests == 48
    with pytest.raises(ConfigError, match="needs --max-running-requests"):
        plan(builtin(QWEN), machine(20 * GIB), rules=TWINPOOL, speculative_num_draft_tokens=2)

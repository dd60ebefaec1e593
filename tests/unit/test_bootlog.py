"""Boot lines to the letter, and read back."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tests.unit.memory.test_budget import QWEN3_NEXT, rest_of
from twinpool import bootlog
from twinpool.memory.budget import plan_memory
from twinpool.units import GIB, to_gib


def ledger_of(rest_bytes: int = 20 * GIB, **values):
    return plan_memory(rest_of(rest_bytes, **{**QWEN3_NEXT, **values}))


def test_the_lines_operators_grep_for() -> None:
    ledger = ledger_of()
    assert bootlog.mamba_cache_line(ledger) == (
        "Mamba Cache is allocated. max_mamba_cache_size: 130, conv_state size: 0.22GB, ssm_state size: 9.21GB "
    )
    assert bootlog.kv_cache_line(ledger, dtype="bfloat16") == (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 461949, K size: 5.29 GB, V size: 5.29 GB"
    )
    line = bootlog.scheduler_line(
        ledger, chunked_prefill_size=2048, max_prefill_tokens=16384, context_len=262144, available_bytes=3 * GIB
    )
    assert line == (
        "max_total_num_tokens=461949, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=26, "
        "context_len=262144, available_cpu_mem=3.00 GB"
    )


def test_batch_lines() -> None:
    assert bootlog.prefill_line(
        n_new_seqs=1, n_new_tokens=64, n_cached_tokens=0, full_usage=0.0, mamba_usage=0.031, n_running=0, n_queued=2,
        n_pending_tokens=5, tokens_per_s=12.5,
    ) == (
        "Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: 0, full token usage: 0.00, mamba usage: 0.03, #running-req: 0, "
        "#queue-req: 2, #pending-token: 5, cuda graph: False, input throughput (token/s): 12.50"
    )  # fmt: skip
    assert bootlog.decode_line(
        n_running=3, n_full_tokens=99, full_usage=0.5, n_mamba=9, mamba_usage=0.25, tokens_per_s=40.0, n_queued=0
    ) == (
        "Decode batch, #running-req: 3, #full token: 99, full token usage: 0.50, mamba num: 9, mamba usage: 0.25, cuda graph: False, "
        "gen throughput (token/s): 40.00, #queue-req: 0"
    )
    assert bootlog.retract_line(
        n_requests=2, n_new_tokens_gained=30, n_slots_gained=6, ratio_before=0.7, ratio_after=0.98765
    ) == (
        "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 30, #mamba_num_gained: 6, "
        "#new_token_ratio: 0.7000 -> 0.9877"
    )


@given(
    st.integers(2 * GIB, 64 * GIB), st.sampled_from([0, 4]),
    st.sampled_from(["", "[2026-11-30 10:00:00 TP0] ", "\x1b[32mINFO\x1b[0m "]),
)  # fmt: skip
def test_parse_reads_what_was_written(rest_bytes, drafts, prefix) -> None:
    ledger = ledger_of(rest_bytes, draft_tokens=drafts, max_running_requests=48)
    lines = [
        "noise",
        bootlog.mamba_cache_line(ledger),
        bootlog.kv_cache_line(ledger, dtype="bfloat16"),
        bootlog.scheduler_line(
            ledger, chunked_prefill_size=None, max_prefill_tokens=16384, context_len=4096, available_bytes=GIB
        ),
    ]
    facts = bootlog.parse("\n".join(prefix + line for line in lines))
    assert facts.max_mamba_cache_size == ledger.max_mamba_cache_size
    assert facts.kv_tokens == ledger.kv_tokens
    assert facts.kv_gib is not None
    assert abs(facts.kv_gib - to_gib(ledger.kv_bytes)) <= 0.0101
    assert (facts.chunked_prefill_size, facts.context_len, facts.available_gib) == (-1, 4096, 1.0)
    assert facts.max_running_requests == ledger.max_running_requests
    assert (facts.draft_ssm_gib is not None) == bool(drafts)


def test_tables_name_every_byte() -> None:
    text = "\n".join(bootlog.ledger_table(ledger_of()))
    for word in ("weights", "slack", "state pool: conv", "state pool: ssm", "padding slot", "KV pool", "not used", "measured"):
        assert word in text

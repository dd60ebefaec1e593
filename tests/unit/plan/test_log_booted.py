"""The plan under a boot log has the log's own pools: slots, tokens and requests, whatever flags are missing; the advice departs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.plan.test_log_vectors import VECTORS, outcome_of
from tests.unit.plan.test_logged import PUBLIC, printed
from twinpool.cli.plan import USAGE
from twinpool.plan.command import read_command
from twinpool.plan.log_plan import LogOutcome, plan_log

MIXED = """\
[2026-10-10 10:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3.5-35B-A3B', tp_size=4, mem_fraction_static=0.8, {more}page_size={page})
[2026-10-10 10:00:01 TP0] Load weight begin. avail mem=138.40 GB
[2026-10-10 10:00:09 TP0] Load weight end. elapsed=8.00 s, type=Net, avail mem=120.85 GB, mem usage=17.55 GB.
[2026-10-10 10:00:10 TP0] Mamba Cache is allocated. max_mamba_cache_size: 565, conv_state size: 0.19GB, ssm_state size: 8.30GB \n\
[2026-10-10 10:00:10 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: 25.57 GB, V size: 25.57 GB
[2026-10-10 10:00:11 TP0] max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests={running}, context_len=262144, available_gpu_mem=20.00 GB
"""


def of(text: str, *words: str) -> LogOutcome:
    (boot,) = plan_log(read_command(["--boot-log", "-", *words], usage=USAGE), text)
    return boot


def mixed(*words: str, tokens: int = 2_680_896, running: int = 113, more: str = "", page: int = 64) -> LogOutcome:
    return of(MIXED.format(tokens=tokens, running=running, more=more, page=page), *words)


def pools(boot: LogOutcome) -> tuple[int, int, int]:
    """Slots, tokens and requests of the plan."""
    ledger = boot.outcome.sizing.ledger
    assert ledger is not None
    return ledger.max_mamba_cache_size, ledger.kv_tokens, ledger.max_running_requests


def test_the_plan_of_a_log_without_its_pin_has_the_logs_pools_and_says_what_it_assumes() -> None:
    boot = mixed()
    assert pools(boot) == (565, 2_680_896, 113)
    assert [note for note in boot.notes if "as if pinned" in note and "565 slots" in note]
    assert boot.outcome.sizing.resolved.origins["max_mamba_cache_size"] == "log"
    assert "--max-mamba-cache-size 565" in boot.outcome.launch_flags


def test_pools_that_flags_and_memory_explain_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = outcome_of(VECTORS["Qwen3.5-9B bf16"], monkeypatch)
    assert pools(boot) == (186, 327_310, 62)
    assert "max_mamba_cache_size" not in boot.outcome.sizing.flags.given


@pytest.mark.parametrize("name", [name for name, vector in VECTORS.items() if vector["kv_gb_log"] is not None])
def test_every_vector_is_planned_with_its_own_pools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = outcome_of(VECTORS[name], monkeypatch)
    facts = boot.ranks[0]
    running = facts.max_running_requests
    slots, tokens, requests = pools(boot)
    assert (slots, tokens, running or requests) == (facts.slots, facts.kv_tokens, requests)


@pytest.mark.parametrize(("form", "numbers"), [row[1:] for row in PUBLIC], ids=[row[0] for row in PUBLIC])
def test_every_public_log_is_planned_with_its_own_pools(form: str, numbers: dict[str, Any]) -> None:
    slots, tokens, requests = pools(of(printed(form, numbers)))
    assert (slots, tokens) == (numbers["slots"], numbers["kv_tokens"])
    assert requests == numbers.get("max_running_requests", requests)


def test_requests_that_the_log_holds_down_are_held_down_in_the_plan() -> None:
    assert pools(mixed(running=48)) == (565, 2_680_896, 48)


def test_slots_a_request_are_told_by_the_logs_number_of_requests() -> None:
    boot = mixed(running=188, page=1)
    assert pools(boot) == (565, 2_680_896, 188)
    assert "565 slots for 188 requests: S = 3, and the plan below is with no_buffer" in boot.notes


def test_what_the_pools_did_not_get_is_said() -> None:
    boot = mixed(tokens=2_000_000 // 64 * 64, more="max_mamba_cache_size=565, ")
    assert pools(boot)[1] == 2_000_000 // 64 * 64
    assert [note for note in boot.notes if "less than its free memory and flags leave" in note]


def test_advice_departs_from_the_pools_of_the_log() -> None:
    boot = mixed("--running", "16", "--tokens-per-request", "100000", "--idle-sessions", "20")
    assert boot.outcome.fit is not None
    assert (boot.outcome.fit.slots_available, boot.outcome.fit.tokens_available) == (565, 2_680_896)
    assert boot.outcome.advice is not None
    assert boot.outcome.advice.steps


def test_the_scheduler_line_fills_in_what_server_args_lack() -> None:
    drafts = mixed(running=40, more="speculative_algorithm='NEXTN', speculative_num_draft_tokens=4, ")
    assert drafts.outcome.sizing.resolved.max_running_requests == 40
    assert drafts.outcome.sizing.resolved.chunked_prefill_size == 8192
    assert drafts.outcome.sizing.resolved.origins["chunked_prefill_size"] == "log"


def test_drafts_without_a_number_of_requests_are_planned_as_the_engine_that_has_a_default() -> None:
    text = MIXED.format(tokens=2_680_896, running=113, more="speculative_num_draft_tokens=4, ", page=64)
    boot = of("\n".join(line for line in text.splitlines() if "max_running_requests" not in line))
    assert pools(boot)[:2] == (565, 2_680_896)
    assert boot.outcome.sizing.resolved.max_running_requests == 48


def test_a_fraction_is_shown_as_the_log_has_it_even_where_its_memory_is_missing() -> None:
    text = "\n".join(
        line
        for line in MIXED.format(tokens=2_680_896, running=113, more="", page=64).splitlines()
        if "Load" not in line
    )
    boot = of(text)
    assert pools(boot) == (565, 2_680_896, 113)
    resolved = boot.outcome.sizing.resolved
    assert (resolved.mem_fraction_static, resolved.origins["mem_fraction_static"]) == (0.8, "log")
    assert "--mem-fraction-static 0.8" in boot.outcome.launch_flags
    assert not [clamp for clamp in boot.outcome.clamps if "slack" in clamp]

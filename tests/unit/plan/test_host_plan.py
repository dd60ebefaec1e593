"""The host tier of a plan: sessions covered under one memory, under a quota, and split like the device's pools."""

from __future__ import annotations

from typing import Any

from tests.unit.plan.plans import machine, manual, plan
from twinpool.config.launch import LaunchLine
from twinpool.memory.host_cover import HostCover
from twinpool.plan.host import HostPlan, host_plan
from twinpool.plan.outcome import outcome
from twinpool.plan.report import host_text, report_text
from twinpool.plan.sizing import Sizing
from twinpool.plan.workload import Workload
from twinpool.units import GIB

# sglang#39436: what a state and a token of GLM-5.3-Flash take on one of four devices, and the share of 32 GB that 565 states were.
SLOT_BYTES, KV_BYTES, PAGE_TOKENS = 17_825_792 + 1_253_376, 7_915, 64
WORK = Workload(running=1, tokens_per_request=8_448, idle_sessions=200, checkpoints_per_session=3)


def sizing(**flags: Any) -> Sizing:
    """The report's device has its states and KV as 10.78 : 21.22."""
    given = {
        "page_size": PAGE_TOKENS, "mamba_full_memory_ratio": 10.78 / 21.22, "enable_hierarchical_cache": True, "hicache_size": 32.0,
    }  # fmt: skip
    return plan(manual(SLOT_BYTES, KV_BYTES), machine(60 * GIB), **{**given, **flags})


def found(work: Workload | None = WORK, **flags: Any) -> HostPlan:
    host = host_plan(sizing(**flags), work)
    assert host is not None
    return host


def test_the_split_of_the_report_covers_188_sessions_by_states_and_one_memory_covers_256() -> None:
    host = found()
    assert host.proportional == HostCover(8_448, by_kv=317, by_states=188, together=188)
    assert host.auto is not None
    assert host.auto.together > 200
    assert (host.quota, host.refusal, host.states) == (None, None, 3)
    assert host.total_bytes <= 32 * 10**9


def test_a_quota_is_a_row_of_its_own() -> None:
    host = found(hicache_mamba_size_gb=734 * SLOT_BYTES / 10**9 + 1e-6)
    assert host.quota is not None
    assert (host.quota.by_states, host.quota.by_kv) == (734 // 3, 267)
    assert "--hicache-mamba-size-gb, as given" in host_text(host)


def test_without_a_workload_sessions_are_those_at_which_the_device_balances() -> None:
    host, ledger = found(None), sizing().ledger
    assert ledger is not None
    assert (host.context_tokens, host.states) == (ledger.kv_tokens // ledger.max_mamba_cache_size, 1)


def test_workers_count_together_and_no_tier_is_none() -> None:
    one, two = found(), found(tp_size=2, dp_size=2, enable_dp_attention=True)
    assert one.auto is not None
    assert two.auto is not None
    assert two.auto.together == 2 * one.auto.together
    assert host_plan(sizing(enable_hierarchical_cache=False), WORK) is None


def test_the_report_shows_it_and_a_tier_that_is_too_small_is_refused() -> None:
    def text(**flags: Any) -> str:
        return report_text(outcome(sizing(**flags), LaunchLine(), WORK, machine_of=None))

    shown = text()
    assert "Host tier: 31.99 GB on each rank, write_through; sessions of 8,448 tokens with 3 checkpoints each" in shown
    assert "split like the device pools    317" in shown
    assert "Host tier refused at boot: " in text(hicache_size=0.001)

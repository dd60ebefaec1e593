"""What a workload needs of each pool, and which of them ends first: counted by hand on round numbers."""

from __future__ import annotations

import pytest

from tests.unit.plan.plans import builtin, machine, manual, plan
from twinpool.errors import ConfigError
from twinpool.plan.options import WorkloadOptions
from twinpool.plan.sizing import Sizing
from twinpool.plan.workload import (
    Workload,
    asked_running,
    balanced_ratio,
    fit,
    rounded_ratio,
    slots_needed,
    tokens_needed,
    workload_of,
)
from twinpool.units import GIB, MIB

S5 = {"mamba_radix_cache_strategy": "extra_buffer"}


def round_plan(**flags: object) -> Sizing:
    """A slot of 1 MiB, a token of 4 KiB, 1 GiB: 100 slots are pinned, so 923 MiB are KV, which is 236,288 tokens."""
    return plan(manual(MIB, 4096), machine(GIB), **{"max_mamba_cache_size": 100, **S5, **flags})


def test_needs_are_s_for_each_that_runs_and_one_for_each_checkpoint() -> None:
    work = Workload(running=10, tokens_per_request=1000, idle_sessions=7, checkpoints_per_session=3)
    sizing = round_plan()
    assert slots_needed(work, sizing) == 10 * 5 + 7 * 3
    assert tokens_needed(work, sizing) == 17 * 1000
    assert tokens_needed(work, round_plan(page_size=64)) == 17 * 1024


def test_without_a_prefix_cache_idle_sessions_need_nothing() -> None:
    sizing = round_plan(disable_radix_cache=True)
    work = Workload(running=10, tokens_per_request=1000, idle_sessions=7)
    assert (slots_needed(work, sizing), tokens_needed(work, sizing)) == (10, 10_000)
    found = fit(work, sizing)
    assert (found.idle, found.idle_by_states, found.idle_by_kv) == (0, 0, 0)


def test_workers_get_equal_shares_rounded_up() -> None:
    sizing = round_plan(tp_size=4, dp_size=4, enable_dp_attention=True, max_mamba_cache_size=400)
    work = Workload(running=10, tokens_per_request=1000, idle_sessions=5)
    assert slots_needed(work, sizing) == 3 * 5 + 2
    assert tokens_needed(work, sizing) == (3 + 2) * 1000
    assert asked_running(work, sizing) == 12
    found = fit(work, sizing)
    assert (found.slots_needed, found.slots_available, found.running_by_states) == (68, 400, 80)


@pytest.mark.parametrize(
    ("work", "running", "bound"),
    [
        (Workload(running=50, tokens_per_request=1000), 20, "states"),
        (Workload(running=50, tokens_per_request=23_628), 10, "kv"),
        (Workload(running=50, tokens_per_request=11_814), 20, "both"),
    ],
)
def test_the_pool_that_ends_first(work: Workload, running: int, bound: str) -> None:
    found = fit(work, round_plan())
    assert (found.running, found.running_bound) == (running, bound)


def test_what_was_asked_for_may_end_first() -> None:
    found = fit(Workload(running=8, tokens_per_request=1000), round_plan(max_running_requests=8))
    assert (found.running, found.running_bound, found.holds) == (8, "max_running_requests", True)


def test_idle_sessions_need_a_checkpoint_and_their_kv() -> None:
    found = fit(Workload(running=10, tokens_per_request=5000, idle_sessions=60), round_plan())
    assert (found.idle_by_states, found.idle_by_kv, found.idle, found.idle_bound) == (50, 37, 37, "kv")
    assert (found.slots_short, found.tokens_short) == (10, 70 * 5000 - 236_288)
    assert not found.holds


def test_a_model_without_kv_is_bound_by_states() -> None:
    sizing = plan(manual(MIB, 0), machine(GIB), max_mamba_cache_size=100, **S5)
    found = fit(Workload(running=30, tokens_per_request=1000, idle_sessions=2), sizing)
    assert (found.running, found.tokens_short, found.slots_short) == (20, 0, 52)
    assert balanced_ratio(sizing, 1000) is None


def test_a_refused_plan_fits_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^Loaded weights leave no GPU memory"):
        fit(Workload(running=1, tokens_per_request=10), round_plan(max_mamba_cache_size=5000))


def test_the_balanced_ratio_is_the_formula_of_the_reference() -> None:
    assert balanced_ratio(round_plan(), 1280) == 5 * 256 / 1280
    drafts = round_plan(speculative_num_draft_tokens=3, max_running_requests=4)
    assert balanced_ratio(drafts, 1280) == 8 * 256 / 1280
    ranks = plan(builtin("Kimi-Linear-48B-A3B"), machine(20 * GIB), tp_size=2, dcp_size=2, **S5)
    te = ranks.token_equivalents
    assert te is not None
    assert balanced_ratio(ranks, 10_000) == pytest.approx(5 * te * 2 / 10_000)


@pytest.mark.parametrize(
    ("ratio", "written"),
    [
        (0.9, 0.9),
        (1.1, 1.1),
        (0.29, 0.29),
        (0.9001, 0.901),
        (15.72, 15.8),
        (3144.0, 3150.0),
        (0.00123, 0.00123),
        (1e-9, 1e-9),
    ],
)
def test_ratios_are_written_with_three_digits_rounded_up(ratio: float, written: float) -> None:
    assert rounded_ratio(ratio) == written


def test_options_give_a_workload_or_none() -> None:
    sizing = round_plan(max_running_requests=8)
    assert workload_of(WorkloadOptions(), sizing) is None
    assert workload_of(WorkloadOptions(tokens_per_request=1000), sizing) == Workload(running=8, tokens_per_request=1000)
    given = WorkloadOptions(running=3, tokens_per_request=1000, idle_sessions=2, checkpoints_per_session=4)
    assert workload_of(given, sizing) == Workload(
        running=3, tokens_per_request=1000, idle_sessions=2, checkpoints_per_session=4
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (WorkloadOptions(idle_sessions=3), "--idle-sessions needs --tokens-per-request"),
        (WorkloadOptions(running=3), "--running needs --tokens-per-request"),
        (WorkloadOptions(tokens_per_request=100), r"--tokens-per-request needs --running \(or --max-running-requests\)"),
        (WorkloadOptions(running=1, tokens_per_request=262_145), "--tokens-per-request 262145 is longer than the context of 262144"),
    ],
)  # fmt: skip
def test_half_a_workload_is_one_sentence(options: WorkloadOptions, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        workload_of(options, round_plan())

"""The most that fits, on numbers that can be counted by hand; tests/property/test_plan.py has the laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.plan.plans import builtin, machine, manual, plan, round_plan
from twinpool.errors import ConfigError
from twinpool.plan import inverse
from twinpool.plan.inverse import Pin
from twinpool.plan.machine import Machine
from twinpool.plan.workload import Workload
from twinpool.units import GIB, MIB

S5 = {"mamba_radix_cache_strategy": "extra_buffer"}


def test_the_pin_leaves_the_rest_to_kv() -> None:
    # 10 * 5 + 7 slots and the padding slot: 58 MiB; 966 MiB are 247,296 tokens.
    work = Workload(running=10, tokens_per_request=1000, idle_sessions=7)
    assert inverse.pin_for(work, round_plan()) == Pin(slots=57, tokens=247_296)
    assert inverse.pin_for(replace(work, tokens_per_request=14_547), round_plan()) is None
    assert inverse.pin_for(replace(work, tokens_per_request=14_546), round_plan()) is not None


def test_drafts_are_charged_for_each_that_runs() -> None:
    # 10 * 5 + 1 slots and (10 + 1) * 3 draft states are 84 MiB.
    sizing = round_plan(speculative_num_draft_tokens=3, max_running_requests=40)
    assert inverse.pin_for(Workload(running=10, tokens_per_request=1000), sizing) == Pin(slots=50, tokens=940 * 256)


def test_most_running() -> None:
    # n * (5 + 1000 / 256) + 1 <= 1024 gives n = 114 (8.90625 * 114 = 1015.3).
    assert inverse.most_running(Workload(running=1, tokens_per_request=1000), round_plan()) == 114
    # Nothing is divided by a ratio: the best split does not depend on it.
    ratio = round_plan(mamba_full_memory_ratio=0.01)
    assert inverse.most_running(Workload(running=1, tokens_per_request=1000), ratio) == 114
    assert inverse.most_running(Workload(running=1, tokens_per_request=262_144), round_plan()) == 0


def test_a_request_needs_two_tokens_even_where_it_uses_one() -> None:
    # The engine halves the tokens before it counts requests (reference 1.5): n * 5 slots + 2 n tokens.
    sizing = round_plan(max_total_tokens=100)
    assert inverse.most_running(Workload(running=1, tokens_per_request=1), sizing) == 50


def test_most_idle() -> None:
    # 10 running take 50 + 1 slots and 10,000 tokens (39.0625); each idle session takes 1 + 3.90625 of what is left.
    assert inverse.most_idle(Workload(running=10, tokens_per_request=1000), round_plan()) == 190
    assert inverse.most_idle(Workload(running=500, tokens_per_request=1000), round_plan()) == 0
    no_cache = round_plan(disable_radix_cache=True)
    assert inverse.most_idle(Workload(running=10, tokens_per_request=1000), no_cache) == 0


def test_longest_context() -> None:
    assert inverse.longest_context(Workload(running=10, tokens_per_request=1), round_plan()) == 973 * 256 // 10
    assert inverse.longest_context(Workload(running=1, tokens_per_request=1), round_plan()) == 1018 * 256
    short = plan(manual(MIB, 4096, context_len=5000), machine(GIB), **S5)
    assert inverse.longest_context(Workload(running=1, tokens_per_request=1), short) == 5000


def test_sessions_per_gib() -> None:
    work = Workload(running=4, tokens_per_request=1024, checkpoints_per_session=2)
    assert inverse.sessions_per_gib(work, round_plan()) == 1024 / 6
    assert inverse.sessions_per_gib(work, round_plan(disable_radix_cache=True)) == 0


@pytest.mark.parametrize(("slots", "ratio"), [(511, 1.0), (484, 0.9), (1, 0.002), (1022, 1023.0), (1023, None)])
def test_ratio_for_slots(slots: int, ratio: float | None) -> None:
    assert inverse.ratio_for_slots(round_plan(max_mamba_cache_size=7), slots) == ratio


def test_no_ratio_counts_where_requests_decide() -> None:
    sizing = round_plan(disable_radix_cache=True, max_running_requests=30)
    assert inverse.ratio_for_slots(sizing, 30) is None


def test_fewest_ranks() -> None:
    sizing = plan(builtin("Qwen3-Next-80B-A3B"), machine(30 * GIB), **S5)

    def machine_of(ranks: int) -> Machine:
        if ranks < 2:
            raise ConfigError("The weights do not fit.")
        return machine(20 * GIB, ranks=ranks)

    small, large = Workload(running=8, tokens_per_request=8192), Workload(running=100, tokens_per_request=8192)
    assert inverse.fewest_ranks(small, sizing, machine_of=machine_of) == 2
    assert inverse.fewest_ranks(large, sizing, machine_of=machine_of) == 4
    # 16 heads: more ranks do not divide them.
    huge = Workload(running=5000, tokens_per_request=200_000)
    assert inverse.fewest_ranks(huge, sizing, machine_of=machine_of) is None

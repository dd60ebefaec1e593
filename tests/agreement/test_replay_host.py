"""Replay with a host tier plans what the live engine plans: the same pages, states and copies, and the same reuse by tier."""

from __future__ import annotations

import dataclasses

import pytest

from tests.agreement import test_replay_engine as base
from twinpool import LLM
from twinpool.clock import VirtualClock
from twinpool.memory.host_budget import host_arena
from twinpool.replay.run import Replay, Run
from twinpool.step import HostCopy, StepPlan
from twinpool.units import ceil_div
from twinpool.wiring import build_scheduler

SMALL = {
    "page_size": 16, "max_mamba_cache_size": 24, "max_total_tokens": 1600, "enable_hierarchical_cache": True, "hicache_size": 0.05,
}  # fmt: skip
OPTIONS = {
    "write_through": SMALL,
    "write_back": {**SMALL, "hicache_write_policy": "write_back"},
    "a quota": {**SMALL, "hicache_mamba_size_gb": 0.01},
}


def order_seen(order: object) -> object:
    """An order as a value, with its ids."""
    if isinstance(order, HostCopy):
        return order.to_host, order.pages.tolist(), order.host_pages.tolist(), order.slot, order.host_slot
    return dataclasses.astuple(order)  # type: ignore[call-overload]


def seen(plan: StepPlan, page_size: int) -> object:
    """A plan as a value, with its copies and the ids of the pages its rows use."""
    rows = [
        (row.rid, row.start, row.end, row.tokens is None, row.slot, row.checkpoint_at, row.checkpoint_slot, row.sample,
         row.pages[: ceil_div(row.end, page_size)].tolist())
        for row in plan.rows
    ]  # fmt: skip
    return plan.step, rows, [order_seen(order) for order in plan.orders], [one.rid for one in plan.joined], plan.left


def replayed(llm: LLM, told: base.Told, *, skip: bool) -> tuple[list[object], Run]:
    """The same conversations through replay, on a scheduler and an arena of its own over the engine's settings."""
    facts = llm.engine.facts
    talks = base.scripts()
    clock = VirtualClock()
    host = host_arena(facts.resolved, facts.ledger, memory=None)
    replay = Replay(
        scheduler=build_scheduler(facts.resolved, facts.ledger, clock=clock, host=host), clock=clock, tokens=base.SaidTokens(told),
        traffic=base.LoopTurns(base.said_sessions(talks, told), talks), cost=None, skip=skip,
    )  # fmt: skip
    plans: list[object] = []
    replay.observers.append(lambda plan, result: plans.append(seen(plan, facts.resolved.page_size)))
    return plans, replay.run()


@pytest.mark.parametrize("name", OPTIONS)
def test_replay_copies_what_the_engine_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "seen", seen)
    with LLM(**{"device_memory": "192MiB", "max_running_requests": 4, **OPTIONS[name]}) as llm:
        told = base.live(llm.engine, base.scripts())
        plans, run = replayed(llm, told, skip=False)
        _, fast = replayed(llm, told, skip=True)
        live_tier = llm.engine.scheduler.book.tree.tier
    assert plans == told.plans
    assert live_tier is not None
    assert live_tier.totals.loaded_states > 0
    for finished in (run, fast):
        tier = finished.scheduler.book.tree.tier
        assert tier is not None
        assert tier.totals == live_tier.totals
        assert (tier.arena.used_pages, tier.arena.used_slots) == (
            live_tier.arena.used_pages,
            live_tier.arena.used_slots,
        )
        for record in finished.recorder.records:
            *_, reuse, _ = told.requests[int(record.session), record.index]
            assert (record.reused, record.from_host, record.gaps) == (reuse.reused, reuse.from_host, reuse.gaps)
    assert fast.steps == run.steps

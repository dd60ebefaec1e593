"""Replay with a disk below the host plans what the live engine plans over a folder, and reuses the same tokens from each tier."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.agreement import test_replay_engine as base
from tests.agreement.test_replay_host import seen as seen_with_copies
from twinpool import LLM
from twinpool.clock import VirtualClock
from twinpool.engine.disk import DiskTier
from twinpool.memory.host_budget import host_arena
from twinpool.replay.disk import SimDisk
from twinpool.replay.disk_link import INSTANT
from twinpool.replay.run import Replay, Run
from twinpool.request import Int32Array
from twinpool.sched.storage import Lost
from twinpool.step import HostFill, StepPlan, StoreCopy
from twinpool.wiring import build_scheduler, disk_fingerprint, disk_limit_bytes

SMALL = {
    "page_size": 16, "max_mamba_cache_size": 20, "max_total_tokens": 1000, "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
}  # fmt: skip
OPTIONS = {
    "ample disk": {"hicache_size": 0.004},
    "a disk that evicts": {"hicache_size": 0.004, "hicache_storage_size": 0.008},
    "write_back": {"hicache_size": 0.004, "hicache_write_policy": "write_back"},
    "a host that holds little": {"hicache_size": 0.002},
    "serial": {"hicache_size": 0.004, "disable_overlap_schedule": True},
}
THRESHOLD_TOKENS = 32


def talks() -> list[base.Script]:
    """Conversations that go on after so long a pause that memory has others by then."""
    return [dataclasses.replace(one, pauses=tuple(pause + 100 for pause in one.pauses)) for one in base.scripts()]


def order_seen(order: object) -> object:
    """An order as a value; the disk's with their ids, and not with their bytes."""
    if isinstance(order, StoreCopy):
        return order.tokens.tolist(), order.start, order.end, order.pages.tolist(), order.slot
    if isinstance(order, HostFill):
        return order.host_pages.tolist(), order.host_slot
    return None


def seen(plan: StepPlan, page_size: int) -> object:
    """A plan as a value, with the ids of its pages and what it tells the disk."""
    others = tuple(order for order in plan.orders if order_seen(order) is None)
    plain = StepPlan(plan.step, plan.rows, others, plan.joined, plan.left, plan.repeat)
    return seen_with_copies(plain, page_size), [order_seen(order) for order in plan.orders]


class PromptDisk(DiskTier):
    """A disk that has always done what it was told when somebody asks: replay's own, where no step takes time."""

    def attach(self, llm: LLM) -> None:
        self.llm = llm
        self.threshold_tokens = THRESHOLD_TOKENS

    def settle(self) -> None:
        self.llm.engine._executor._thread.submit(lambda: None).result()
        self.writer.flush()

    def lost(self) -> Sequence[Lost]:
        self.settle()
        return super().lost()

    def look(self, rid: int, tokens: Int32Array, *, in_memory_tokens: int, kv_tokens: int) -> None:
        self.settle()
        super().look(rid, tokens, in_memory_tokens=in_memory_tokens, kv_tokens=kv_tokens)
        waiting = self._waiting.get(rid)
        while waiting is not None and waiting.fetch.poll() is None:
            time.sleep(0.001)


def replayed(llm: LLM, told: base.Told, *, skip: bool) -> tuple[list[object], Run]:
    """The same conversations through replay, over a disk without files."""
    facts, clock, said = llm.engine.facts, VirtualClock(), talks()
    host = host_arena(facts.resolved, facts.ledger, memory=None)
    fingerprint = disk_fingerprint(
        facts.resolved, model=facts.model_name, ranks=1, page_bytes=host.page_bytes, slot_bytes=host.slot_bytes
    )
    disk = SimDisk(
        clock=clock, limit_bytes=disk_limit_bytes(facts.resolved), fingerprint=fingerprint, link=INSTANT,
        policy=facts.resolved.hicache_storage_prefetch_policy, threshold_tokens=THRESHOLD_TOKENS,
    )  # fmt: skip
    replay = Replay(
        scheduler=build_scheduler(facts.resolved, facts.ledger, clock=clock, host=host, storage=disk), clock=clock,
        tokens=base.SaidTokens(told), traffic=base.LoopTurns(base.said_sessions(said, told), said), cost=None, disk=disk,
        skip=skip,
    )  # fmt: skip
    plans: list[object] = []
    replay.observers.append(lambda plan, result: plans.append(seen(plan, facts.resolved.page_size)))
    return plans, replay.run()


@pytest.mark.parametrize("name", OPTIONS)
def test_replay_reuses_what_the_engine_reuses(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(base, "seen", seen)
    monkeypatch.setattr("twinpool.engine.disk.DiskTier", PromptDisk)
    options = {"device_memory": "192MiB", "max_running_requests": 4, **SMALL, **OPTIONS[name]}
    with LLM(hicache_storage_path=str(tmp_path), **options) as llm:
        live_disk = llm.engine.scheduler.book.storage
        assert isinstance(live_disk, PromptDisk)
        live_disk.attach(llm)
        told = base.live(llm.engine, talks())
        live_disk.settle()
        plans, run = replayed(llm, told, skip=False)
        _, fast = replayed(llm, told, skip=True)
        live_tier = llm.engine.scheduler.book.tree.tier
        live_stats = live_disk.store.stats
    assert plans == told.plans
    from_storage = 0
    for finished in (run, fast):
        assert finished.disk is not None
        assert finished.disk.stats == live_stats
        assert finished.disk.fetched_tokens == live_disk.fetched_tokens
        assert finished.scheduler.book.tree.tier.totals == live_tier.totals
        for record in finished.recorder.records:
            *_, reuse, _ = told.requests[int(record.session), record.index]
            by_tier = (record.reused, record.from_host, record.from_storage, record.gaps)
            assert by_tier == (reuse.reused, reuse.from_host, reuse.from_storage, reuse.gaps)
            from_storage += record.from_storage
    assert fast.steps == run.steps
    assert from_storage > 0
    assert live_stats.evicted > 0 or name != "a disk that evicts"

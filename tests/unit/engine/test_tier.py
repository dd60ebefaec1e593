"""The host tier as the engine counts and checks it."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.engine.test_core import drain, make_engine
from tests.unit.engine.test_executor import PAGES, make_memory, next_is_plus_one, prefill
from twinpool.engine.core import Engine
from twinpool.engine.executor import TorchExecutor
from twinpool.memory.host import HostArena
from twinpool.prefix.host_view import HostView
from twinpool.request import SamplingParams
from twinpool.step import HostCopy, SlotOrder, StepPlan

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PAGE_BYTES, SLOT_BYTES = 8, 32


def small_engine(**world: object) -> Engine:
    """24 pages of one token and 4 slots on the device; 40 chunks of 4 pages or a state on the host."""
    arena = HostArena(total_bytes=40 * SLOT_BYTES, page_bytes=PAGE_BYTES, slot_bytes=SLOT_BYTES)
    settings = {"n_pages": 24, "n_slots": 4, "max_running": 1, "strategy": "no_buffer", "overlap": False, **world}
    return make_engine(host=arena, **settings)


def say(engine: Engine, first: int, *, length: int = 12) -> int:
    """One request to its end; returns the tokens it had from the host."""
    (request,) = engine.add([first] * length, GREEDY)
    drain(engine)
    return request.reuse.from_host


def test_counts_follow_the_copies() -> None:
    engine = small_engine()
    assert engine.snapshot().host is not None
    for first in (1, 2, 3, 4):
        say(engine, first)
    host = engine.snapshot().host
    assert host is not None
    assert host.total_bytes == 40 * SLOT_BYTES
    assert host.used_tokens == host.totals.saved_tokens - host.totals.evicted_tokens > 24
    assert host.used_states == host.totals.saved_states - host.totals.evicted_states >= 4
    assert host.used_tokens <= host.total_tokens <= 160
    assert host.used_states <= host.total_states <= 40
    assert host.loaded_bytes == host.totals.loaded_tokens == 0
    assert host.saved_bytes == host.totals.saved_tokens * PAGE_BYTES + host.totals.saved_states * SLOT_BYTES
    assert say(engine, 1) == 8  # the end of the first chunk
    host = engine.snapshot().host
    assert host is not None
    assert host.loaded_bytes == host.totals.loaded_tokens * PAGE_BYTES + host.totals.loaded_states * SLOT_BYTES > 0
    engine.check_idle(thorough=True)


def test_what_write_back_has_no_room_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def run(n_chunks: int) -> list[str]:
        caplog.clear()
        arena = HostArena(total_bytes=n_chunks * SLOT_BYTES, page_bytes=PAGE_BYTES, slot_bytes=SLOT_BYTES)
        engine = make_engine(
            n_pages=48,
            n_slots=16,
            max_running=1,
            strategy="no_buffer",
            overlap=False,
            host=arena,
            host_policy="write_back",
        )
        with caplog.at_level(logging.INFO, "twinpool.engine"):
            say(engine, 1)
            engine.scheduler.book.tree.evict(pages=48)
            say(engine, 2)
        return [line for line in caplog.messages if line.startswith("write_back: ")]

    # A state after 8, 12 and all 15 tokens; a chunk holds a state or the pages of 4 tokens, so 15 can never be held.
    assert run(4) == ["write_back: KV subtree dropped without backup due to host memory pressure, 1 node of 3 tokens"]
    assert run(40) == []


def test_a_flush_empties_the_host_and_keeps_the_totals() -> None:
    engine = small_engine()
    for first in (1, 2, 3, 4):
        say(engine, first)
    before = engine.snapshot().host
    assert engine.flush_cache()
    after = engine.snapshot().host
    assert before is not None
    assert after is not None
    assert (after.used_tokens, after.used_states) == (0, 0)
    assert (after.total_tokens, after.total_states) == (160, 40)
    gone = {"flushed_tokens": before.used_tokens, "flushed_states": before.used_states}
    assert after.totals == replace(before.totals, **gone)
    engine.check_idle(thorough=True)
    assert say(engine, 1) == 0
    assert engine.flush_cache()
    engine.check_idle(thorough=True)


def test_a_lost_page_and_a_lost_state_are_seen() -> None:
    engine = small_engine()
    say(engine, 1)
    tier = engine.scheduler.book.tree.tier
    assert tier is not None
    pages, slots = tier.arena.alloc(pages=1, slots=1)
    with pytest.raises(AssertionError, match=r"\[host\] pool memory leak detected! tokens in use=\d+, copied"):
        engine.check_idle()
    tier.arena.free(pages=pages)
    with pytest.raises(AssertionError, match=r"\[host\] pool memory leak detected! states in use="):
        engine.check_idle()
    tier.arena.free(slot=int(slots[0]))
    engine.check_idle(thorough=True)


def test_without_a_tier_there_is_nothing_to_say() -> None:
    engine = make_engine()
    assert engine.snapshot().host is None
    assert engine.view_host() is None
    engine.check_idle()


def test_the_view_is_of_what_is_there() -> None:
    engine = small_engine()
    assert engine.view_host() == HostView(0, 0, 0, 0)
    for first in (1, 2, 3, 4):
        say(engine, first)
    view, host = engine.view_host(), engine.snapshot().host
    assert view is not None
    assert host is not None
    assert view.kv_tokens == host.used_tokens
    assert view.sessions == view.resumable_sessions == 4
    assert view.resumable_share == 1.0


def test_seconds_of_copies_are_counted_by_direction() -> None:
    arena = HostArena(total_bytes=160, page_bytes=16, slot_bytes=16)
    executor = TorchExecutor(forward=next_is_plus_one, memory=make_memory(host=arena))
    copy = (PAGES[:1], np.zeros(1, np.int32), 1, 1)
    orders = (SlotOrder(1), HostCopy(True, *copy))
    plain, saved, both = (
        executor.submit(StepPlan(number, (prefill(1, 3, sample=False),), orders=given)).result()
        for number, given in enumerate((orders[:1], orders, (*orders, HostCopy(False, *copy))))
    )
    executor.settle(orders)  # nothing to do for a while: told with the step after it
    later = executor.submit(StepPlan(9, (prefill(1, 3, sample=False),))).result()
    executor.close()
    assert later.save_s > 0
    assert later.load_s == 0.0
    assert plain.save_s == plain.load_s == saved.load_s == 0.0
    assert saved.save_s > 0
    assert both.save_s > 0
    assert both.load_s > 0
    assert both.save_s + both.load_s <= both.duration_s

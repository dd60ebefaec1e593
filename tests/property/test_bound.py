"""Upper bounds: never below what a run reused, infinite where room is ample, monotone in capacity, and MIN the best there is."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, given, settings

from tests.replay_worlds import Turn, one_second_steps, run, session, trace, uneven_steps
from twinpool.replay.bound import Capacity, bounds_of, kv_pages, look, room_slots, state_pages
from twinpool.replay.bound_min import Stays, most_hits
from twinpool.replay.record import RequestRecord
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace
from twinpool.replay.traffic import ClosedTraffic

SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
MODES = [("extra_buffer", True), ("extra_buffer", False), ("extra_buffer_lazy", True), ("no_buffer", False)]
COSTS = {"even": one_second_steps(), "uneven": uneven_steps()}


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Conversations over a few shared openings that go on, start again, or go back to an earlier prompt."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    fresh, found = itertools.count(100), []
    for number in range(draw(st.integers(1, 6))):
        blocks = draw(st.sampled_from([[], [1], [1, 2, 3], [1, 2, 4, 5]]))
        at_s, turns = float(draw(st.integers(0, 3))), []
        for _ in range(draw(st.integers(1, 4))):
            kept = draw(st.sampled_from([100, 100, 100, 2]))
            blocks = [*blocks[:kept], *itertools.islice(fresh, draw(st.integers(1, 5)))]
            tokens = len(blocks) * block_size - draw(st.integers(0, block_size - 1))
            turns.append(
                Turn(blocks=blocks, input_tokens=tokens, output_tokens=draw(st.integers(0, 12)), arrival_s=at_s)
            )
            at_s += draw(st.sampled_from([0.0, 2.0, 40.0]))
        found.append(session(f"s{number}", *turns))
    return trace(*found, block_size=block_size)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Trace, list[RequestRecord], Capacity]:
    """Random traffic through pools that are too small for most of it."""
    recorded = draw(traces())
    strategy, overlap = draw(st.sampled_from(MODES))
    page_size = 1 if strategy == "no_buffer" else draw(st.sampled_from([1, 2, 4]))
    n_pages, n_running = draw(st.integers(32, 120)) // page_size, draw(st.integers(1, 4))
    n_slots = n_running * 3 + 1 + draw(st.integers(0, 6))
    closed = draw(st.booleans())
    cost = draw(st.sampled_from(["even", "uneven"] if closed else ["even", "uneven", "count"]))
    traffic = ClosedTraffic(
        recorded, alive=draw(st.integers(1, 4)), idle_cap_s=3.0, seed=draw(st.integers(0, 3)), start_anywhere=draw(st.booleans())
    )  # fmt: skip
    done = run(
        recorded, traffic=traffic if closed else None, cost=COSTS.get(cost), strategy=strategy, overlap=overlap, radix=True,
        page_size=page_size, n_pages=n_pages, n_slots=n_slots, max_running=n_running,
        chunk=draw(st.sampled_from([4, 8, 64, None])), track=draw(st.sampled_from([4, 8])),
        max_states_per_path=draw(st.sampled_from([-1, -1, 1])), schedule_conservativeness=draw(st.sampled_from([0.0, 1.0])),
    )  # fmt: skip
    return recorded, done.recorder.records, Capacity(page_size=page_size, pages=n_pages, slots=n_slots)


@SETTINGS
@given(done=runs())
def test_no_run_reuses_more(done) -> None:
    recorded, records, capacity = done
    counted = [one for one in records if not one.warm_up and one.finished_s is not None and not one.refusal]
    reused = sum(record.reused for record in counted)
    found = bounds_of(recorded, records, capacity, tokens=TokenSpace(recorded))
    assert reused <= found.clairvoyant_tokens <= found.infinite_tokens
    if found.limits == "neither":
        assert found.clairvoyant_tokens == found.infinite_tokens


@SETTINGS
@given(done=runs())
def test_no_request_reuses_more_than_an_endless_cache_has(done) -> None:
    recorded, records, capacity = done
    seen = look(recorded, records, page_size=capacity.page_size, tokens=TokenSpace(recorded))
    reused = sorted(one.reused for one in records if not one.warm_up and one.finished_s is not None and not one.refusal)
    # Both in ascending order: what holds for each request holds for each place.
    longest = sorted(int(pages) * capacity.page_size for pages in seen.longest_pages)
    assert len(reused) == len(longest)
    assert all(one <= most for one, most in zip(reused, longest, strict=True))


@SETTINGS
@given(done=runs())
def test_an_endless_cache_by_comparing_all_prompts(done) -> None:
    """Each token against each earlier request, where everything has a time of its own and so an order."""
    recorded, records, capacity = done
    tokens = TokenSpace(recorded)
    sessions = {session.id: session for session in recorded.sessions}
    served = [one for one in records if one.scheduled_s is not None]
    if len({one.scheduled_s for one in served}) < len(served):
        return
    earlier: list[list[int]] = []
    total = 0
    for record in sorted(served, key=lambda one: one.scheduled_s):
        content = tokens.content(sessions[record.session], record.index)
        prompt, size = content.prompt.tolist(), capacity.page_size
        whole = prompt + (content.answer.tolist() or prompt[:1])
        pages = [tuple(prompt[at : at + size]) for at in range(0, len(prompt) - size, size)]
        longest = 0
        for other in earlier:
            same = 0
            while same < len(pages) and tuple(other[same * size : (same + 1) * size]) == pages[same]:
                same += 1
            longest = max(longest, same)
        earlier.append(whole)
        if not record.warm_up and not record.refusal:
            total += longest * size
    assert bounds_of(recorded, records, capacity, tokens=tokens).infinite_tokens == total


@SETTINGS
@given(done=runs())
def test_ample_room_is_an_endless_cache(done) -> None:
    recorded, records, capacity = done
    ample = Capacity(page_size=capacity.page_size, pages=10_000, slots=10_000)
    found = bounds_of(recorded, records, ample, tokens=TokenSpace(recorded))
    assert (found.clairvoyant_tokens, found.limits) == (found.infinite_tokens, "neither")


@SETTINGS
@given(done=runs(), fewer_slots=st.integers(0, 8), fewer_pages=st.integers(0, 60))
def test_more_room_is_never_worse(done, fewer_slots, fewer_pages) -> None:
    recorded, records, capacity = done
    seen = look(recorded, records, page_size=capacity.page_size, tokens=TokenSpace(recorded))
    assert capacity.slots is not None
    slots = [room_slots(seen, records, capacity.slots - fewer) for fewer in (0, fewer_slots)]
    assert state_pages(seen, slots[1]) <= state_pages(seen, slots[0])
    assert kv_pages(seen, room_pages=capacity.pages - fewer_pages) <= kv_pages(seen, room_pages=capacity.pages)


@SETTINGS
@given(
    spans=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=9),
    room=st.lists(st.integers(0, 4), min_size=7, max_size=7),
)
def test_min_is_the_best_of_all_choices(spans, room) -> None:
    """Against every subset of the stays, with as much room as there may be at each moment."""
    first = np.array([begin for begin, _ in spans], np.int64)
    last = np.array([end for _, end in spans], np.int64)
    moments = np.arange(7)[:, None]
    there = (first <= moments) & (moments <= last)
    best = 0
    for chosen in itertools.product([0, 1], repeat=len(spans)):
        if np.all(there @ np.array(chosen, np.int64) <= room):
            best = max(best, sum(chosen))
    assert most_hits(Stays(first, last, np.ones(len(spans), np.int64)), np.array(room, np.int64)) == best


@SETTINGS
@given(
    stays=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 4)), max_size=6),
    room=st.lists(st.integers(0, 9), min_size=7, max_size=7),
)
def test_many_units_are_single_ones_together(stays, room) -> None:
    first, last, units = np.array(stays, np.int64).reshape(-1, 3).T
    together = most_hits(Stays(first, last, units), np.array(room, np.int64))
    single = Stays(np.repeat(first, units), np.repeat(last, units), np.ones(int(units.sum()), np.int64))
    assert most_hits(single, np.array(room, np.int64)) == together

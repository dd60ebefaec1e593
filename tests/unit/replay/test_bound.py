"""Upper bounds on worlds small enough to know the best that could have been done."""

from __future__ import annotations

import numpy as np

from tests.replay_worlds import Turn, numbers, one_second_steps, run, session, trace
from twinpool.replay.bound import Bounds, Capacity, bounds_of
from twinpool.replay.bound_min import Stays, most_hits
from twinpool.replay.bound_prefixes import Prefixes, page_keys
from twinpool.replay.record import RequestRecord
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace

AMPLE = Capacity(page_size=1, pages=1000, slots=1000)


def _stays(*stays: tuple[int, int, int]) -> Stays:
    return Stays(*(np.array(column, np.int64) for column in zip(*stays, strict=True)))


def _room(*room: int) -> np.ndarray:
    return np.array(room, np.int64)


def test_what_stays_longest_is_dropped() -> None:
    stays = _stays((0, 3, 1), (1, 2, 1), (3, 4, 1))
    assert most_hits(stays, _room(1, 1, 1, 1, 1)) == 2
    assert most_hits(stays, _room(2, 2, 2, 2, 2)) == 3
    assert most_hits(stays, _room(0, 0, 0, 0, 0)) == 0


def test_a_part_of_many_units_stays() -> None:
    assert most_hits(_stays((0, 2, 5), (1, 1, 4)), _room(7, 7, 7)) == 7
    assert most_hits(_stays((0, 2, 5), (1, 1, 4)), _room(7, 3, 7)) == 3


def test_what_needs_no_room_is_always_hit() -> None:
    assert most_hits(_stays((3, 2, 6)), _room(0, 0, 0)) == 6


def test_room_below_nothing_is_nothing() -> None:
    assert most_hits(_stays((0, 1, 2)), _room(3, -1)) == 0


def test_no_stays() -> None:
    assert most_hits(Stays(*(np.empty(0, np.int64),) * 3), _room(1)) == 0


def test_keys_tell_prefixes_not_pages() -> None:
    first = page_keys(np.array([0, 1, 2, 3], np.int32), np.array([8], np.int32), page_size=2, block_size=2)
    second = page_keys(np.array([4, 5, 2, 3], np.int32), np.array([], np.int32), page_size=2, block_size=2)
    third = page_keys(np.array([0, 1, 2], np.int32), np.array([3, 9], np.int32), page_size=2, block_size=4)
    assert len(first) == len(second) == len(third) == 2
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first.tolist() == third.tolist()


def test_pages_seen_and_held() -> None:
    prefixes = Prefixes()
    keys = np.array([11, 12, 13, 14, 15], np.uint64)
    other = np.array([11, 12, 23, 24], np.uint64)
    seen, first = prefixes.add(keys, n_prompt_pages=4, ends_s=2.0)
    assert seen == []
    seen, second = prefixes.add(other, n_prompt_pages=3, ends_s=5.0)
    assert seen == [(0, 2, 2.0)]
    assert prefixes.add(keys, n_prompt_pages=5, ends_s=1.0)[0] == [(0, 2, 5.0), (2, 5, 2.0)]
    prefixes.hold(first)
    prefixes.hold(second)
    assert prefixes.held_pages == 5  # 11 12 13 14, 23
    prefixes.let_go(first)
    assert prefixes.held_pages == 3
    prefixes.let_go(second)
    assert prefixes.held_pages == 0


def _record(name: str, index: int, start_s: float, *, end_s: float | None = None, **fields: object) -> RequestRecord:
    """A request admitted at start_s that has its first token half a second before its end, by default a second later."""
    end_s = start_s + 1 if end_s is None else end_s
    values: dict[str, object] = {
        "session": name, "index": index, "warm_up": False, "input_tokens": 6, "output_tokens": 1, "arrival_s": start_s,
        "scheduled_s": start_s, "first_token_s": end_s - 0.5, "finished_s": end_s,
    }  # fmt: skip
    return RequestRecord(**{**values, **fields})


def _two_turns(*names: str) -> Trace:
    """Sessions of two requests with the same five blocks and one of their own; six tokens each."""
    return trace(
        *(
            session(
                name,
                *(Turn(blocks=[*numbers(5, first=100 * (k + 1)), 90 + 10 * k + i], input_tokens=6) for i in range(2)),
            )
            for k, name in enumerate(names)
        )
    )


def _bounds(recorded: Trace, records: list[RequestRecord], capacity: Capacity = AMPLE) -> Bounds:
    return bounds_of(recorded, records, capacity, tokens=TokenSpace(recorded))


def test_endless_cache() -> None:
    recorded = _two_turns("a", "b")
    order = [
        _record(name, index, float(at)) for at, (index, name) in enumerate([(0, "a"), (0, "b"), (1, "a"), (1, "b")])
    ]
    found = _bounds(recorded, order)
    assert (found.infinite_tokens, found.clairvoyant_tokens, found.limits) == (10, 10, "neither")
    assert found.infinite_token_share == 10 / 24
    whole_pages = _bounds(recorded, order, Capacity(page_size=2, pages=1000, slots=1000))
    assert whole_pages.infinite_tokens == 8


def test_three_slots() -> None:
    """Four sessions take turns one after the other; each second turn resumes from one checkpoint that must wait three others out."""
    recorded = _two_turns("a", "b", "c", "d")
    order = [
        _record(name, index, 2.0 * at) for at, (index, name) in enumerate([(i, n) for i in (0, 1) for n in "abcd"])
    ]
    assert _bounds(recorded, order).clairvoyant_tokens == 20
    for slots, sessions in ((3, 3), (2, 2), (1, 1), (0, 0)):
        found = _bounds(recorded, order, Capacity(page_size=1, pages=1000, slots=slots))
        assert (found.clairvoyant_tokens, found.limits) == (5 * sessions, "states")
    assert _bounds(recorded, order, Capacity(page_size=1, pages=1000, slots=None)).limits == "neither"


def test_eleven_pages() -> None:
    """Two sessions' five pages fit into eleven and leave one for a third; the fourth finds nothing."""
    recorded = _two_turns("a", "b", "c", "d")
    order = [
        _record(name, index, 2.0 * at) for at, (index, name) in enumerate([(i, n) for i in (0, 1) for n in "abcd"])
    ]
    found = _bounds(recorded, order, Capacity(page_size=1, pages=11, slots=1000))
    assert (found.clairvoyant_tokens, found.limits) == (11, "kv")
    found = _bounds(recorded, order, Capacity(page_size=1, pages=11, slots=1))
    assert (found.clairvoyant_tokens, found.limits) == (5, "states")


def test_a_running_request_takes_its_slot_and_its_prompt() -> None:
    """c runs from before b's second turn until after it: of three slots two are left, of eleven pages five."""
    recorded = _two_turns("a", "b", "c")
    order = [
        _record("a", 0, 0.0), _record("b", 0, 2.0), _record("c", 0, 4.0, end_s=20.0, first_token_s=5.0),
        _record("b", 1, 6.0), _record("a", 1, 8.0),
    ]  # fmt: skip
    assert _bounds(recorded, order).clairvoyant_tokens == 10
    assert _bounds(recorded, order, Capacity(page_size=1, pages=1000, slots=3)).clairvoyant_tokens == 10
    assert _bounds(recorded, order, Capacity(page_size=1, pages=1000, slots=2)).clairvoyant_tokens == 5
    assert _bounds(recorded, order, Capacity(page_size=1, pages=11, slots=1000)).clairvoyant_tokens == 5


def test_a_retracted_request_holds_nothing_for_sure() -> None:
    recorded = _two_turns("a", "c")
    order = [
        _record("a", 0, 0.0),
        _record("c", 0, 2.0, end_s=20.0, first_token_s=3.0, retractions=1),
        _record("a", 1, 6.0),
    ]
    assert _bounds(recorded, order, Capacity(page_size=1, pages=5, slots=1)).clairvoyant_tokens == 5


def test_what_is_still_being_computed_needs_no_room_before() -> None:
    """The first turn ends when the second one starts: nothing was kept in between."""
    recorded = _two_turns("a")
    order = [_record("a", 0, 0.0, end_s=4.0), _record("a", 1, 4.0)]
    assert _bounds(recorded, order, Capacity(page_size=1, pages=0, slots=0)).clairvoyant_tokens == 5


def test_warm_up_and_refused_requests_fill_the_cache_and_count_nowhere() -> None:
    recorded = _two_turns("a", "b", "c")
    order = [
        _record("a", 0, 0.0, warm_up=True), _record("b", 0, 2.0, refusal="out of memory"),
        _record("c", 0, 3.0, scheduled_s=None, first_token_s=None, finished_s=None, refusal="never fits"),
        _record("a", 1, 4.0), _record("b", 1, 6.0), _record("c", 1, 8.0),
    ]  # fmt: skip
    found = _bounds(recorded, order)
    assert (found.infinite_tokens, found.infinite_token_share) == (10, 10 / 18)


def test_answers_are_cached() -> None:
    """The second prompt repeats the first one and what was answered to it."""
    recorded = trace(
        session("a", Turn(blocks=[1, 2], input_tokens=2, output_tokens=3), Turn(blocks=numbers(9), input_tokens=9)),
        session(
            "b", Turn(blocks=[1, 2], input_tokens=2, output_tokens=3), Turn(blocks=[1, 2, 3, 4, 5, 6], input_tokens=6)
        ),
    )
    order = [_record("a", 0, 0.0, input_tokens=2), _record("b", 0, 2.0, input_tokens=2), _record("b", 1, 4.0)]
    assert _bounds(recorded, order).infinite_tokens == 1 + 5  # never the last token of a prompt


def test_nothing_ran() -> None:
    found = _bounds(_two_turns("a"), [])
    assert (found.infinite_tokens, found.clairvoyant_token_share, found.limits) == (0, 0.0, "neither")


def test_a_run_in_small_pools() -> None:
    """Round robin of three sessions, the worst case of least recent use: it reuses nothing where foresight would."""
    recorded = trace(
        *(
            session(
                f"s{k}",
                *(
                    Turn(
                        blocks=numbers(8, first=100 * k),
                        input_tokens=8,
                        output_tokens=1,
                        arrival_s=100.0 * i + 10.0 * k,
                    )
                    for i in range(6)
                ),
            )
            for k in range(3)
        )
    )
    done = run(
        recorded, cost=one_second_steps(), n_pages=20, n_slots=12, page_size=1, strategy="no_buffer", overlap=False, radix=True,
        chunk=None, max_running=1,
    )  # fmt: skip
    reused = sum(record.reused for record in done.recorder.records)
    found = _bounds(recorded, done.recorder.records, Capacity(page_size=1, pages=20, slots=12))
    assert found.infinite_tokens == 15 * 7
    assert reused < found.clairvoyant_tokens < found.infinite_tokens
    assert found.limits == "kv"

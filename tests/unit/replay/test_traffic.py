"""When requests arrive: recorded times, and the closed loop's sessions, pauses, sub-agents and starting points."""

from __future__ import annotations

import pytest

from tests.replay_worlds import Turn, session, trace
from twinpool.errors import ConfigError
from twinpool.replay.trace import Session, Trace
from twinpool.replay.traffic import ClosedTraffic, OpenTraffic, Traffic, parents, trees

STEPS = 60


def talk(name: str, *turns: tuple[float, float | None], parent: str | None = None) -> Session:
    """A session of (arrival, think time) turns whose answers took one second in the recording."""
    return session(
        name,
        *(
            Turn(blocks=[1], input_tokens=1, arrival_s=arrival_s, think_s=think_s, api_time_s=1.0)
            for arrival_s, think_s in turns
        ),
        parent=parent,
        namespace=name.split("/")[0],
    )


def serve(traffic: Traffic, *, answer_s: float = 1.0) -> list[tuple[float, str, int]]:
    """Arrivals by (due, session, index) of a server that answers everybody in the same time; `!` marks a warm-up."""
    found = []
    running: list[tuple[float, object]] = []
    now_s = 0.0
    for _ in range(STEPS):
        for arrival in traffic.due(now_s):
            found.append((arrival.due_s, arrival.session.id + "!" * arrival.warm_up, arrival.index))
            running.append((now_s + answer_s, arrival))
        moments = [end_s for end_s, _ in running] + ([traffic.next_s] if traffic.next_s is not None else [])
        if not moments:
            return found
        now_s = min(moments)
        for ended in [one for one in running if one[0] <= now_s]:
            running.remove(ended)
            traffic.finished(ended[1], now_s)
    raise AssertionError("the traffic did not end")


def closed(recorded: Trace, **changes: object) -> ClosedTraffic:
    options = {"alive": 1, "idle_cap_s": 100.0, "seed": 0, "start_anywhere": False, **changes}
    return ClosedTraffic(recorded, **options)


def test_recorded_times_are_kept_and_divided_by_the_speed() -> None:
    recorded = trace(talk("a", (0.0, None), (6.0, None)), talk("b", (4.0, None)))
    assert serve(OpenTraffic(recorded, speed=2.0)) == [(0.0, "a", 0), (2.0, "b", 0), (3.0, "a", 1)]


def test_requests_of_one_moment_keep_the_order_of_the_trace() -> None:
    recorded = trace(talk("b", (1.0, None)), talk("a", (1.0, None)))
    assert [name for _, name, _ in serve(OpenTraffic(recorded, speed=1.0))] == ["b", "a"]


def test_sessions_with_clocks_of_their_own_have_no_arrival_times() -> None:
    recorded = trace(talk("a", (0.0, None)), talk("b", (0.0, None)), clock="session")
    with pytest.raises(ConfigError, match=r"use --sessions N \(closed loop\)\."):
        OpenTraffic(recorded, speed=1.0)
    shared = trace(
        session("a", Turn(blocks=[1], input_tokens=1)), session("b", Turn(blocks=[1], input_tokens=1)), clock="session"
    )
    with pytest.raises(ConfigError, match="clock of its own"):  # in one namespace, as --shared-preamble makes it
        OpenTraffic(shared, speed=1.0)


def test_one_session_with_its_sub_agent_has_one_clock() -> None:
    recorded = trace(talk("a", (0.0, None)), talk("a/x", (2.0, None), parent="a"), clock="session")
    assert serve(OpenTraffic(recorded, speed=1.0)) == [(0.0, "a", 0), (2.0, "a/x", 0)]


def test_a_session_thinks_between_its_turns_and_never_longer_than_the_cap() -> None:
    recorded = trace(talk("a", (0.0, None), (9.0, 2.5), (30.0, 20.0), (40.0, None), (50.0, -3.0)))
    arrivals = serve(closed(recorded, idle_cap_s=7.0, default_think_s=0.5))
    # Answers end at 1, 4.5, 12.5 and 14: pauses of 2.5, 7 (capped), 0.5 (not recorded) and none (negative).
    assert [due_s for due_s, _, _ in arrivals] == [0.0, 3.5, 11.5, 13.0, 14.0]


def test_a_new_session_starts_as_an_old_one_ends() -> None:
    recorded = trace(*(talk(name, (0.0, None), (9.0, 2.0)) for name in "abcde"))
    traffic = closed(recorded, alive=2, seed=3)
    arrivals = serve(traffic)
    assert traffic.peak_alive == 2
    assert [(due_s, index) for due_s, _, index in arrivals] == [
        (0.0, 0), (0.0, 0), (3.0, 1), (3.0, 1), (4.0, 0), (4.0, 0), (7.0, 1), (7.0, 1), (8.0, 0), (11.0, 1),
    ]  # fmt: skip
    assert sorted({name for _, name, _ in arrivals}) == list("abcde")


def test_more_alive_than_there_are_is_all_of_them() -> None:
    traffic = closed(trace(talk("a", (0.0, None)), talk("b", (0.0, None))), alive=9)
    assert len(serve(traffic)) == traffic.peak_alive == 2


def test_the_seed_decides_the_order() -> None:
    recorded = trace(*(talk(name, (0.0, None)) for name in "abcdefgh"))
    orders = [[name for _, name, _ in serve(closed(recorded, seed=seed))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list("abcdefgh")


def test_a_sub_agent_starts_after_the_request_it_followed_and_its_tree_ends_last() -> None:
    """The sub-agent began 2 s after the answer to a's second request, which ended at 11; b may start when all are done."""
    recorded = trace(
        talk("a", (0.0, None), (10.0, 1.0), (20.0, 1.0)),
        talk("a/x", (13.0, None), (15.0, 4.0), parent="a"),
        talk("a/x/y", (16.5, None), parent="a/x"),
    )
    tries = (serve(closed(trace(*recorded.sessions, talk("b", (0.0, None))), seed=seed)) for seed in range(9))
    assert next(arrivals for arrivals in tries if arrivals[0][1] == "a") == [
        (0.0, "a", 0), (2.0, "a", 1), (4.0, "a", 2), (5.0, "a/x", 0), (10.0, "a/x", 1), (11.5, "a/x/y", 0), (12.5, "b", 0),
    ]  # fmt: skip


def test_a_sub_agents_delay_is_capped_and_never_negative() -> None:
    recorded = trace(
        talk("a", (0.0, None)), talk("a/late", (50.0, None), parent="a"), talk("a/early", (0.5, None), parent="a")
    )
    arrivals = serve(closed(recorded, idle_cap_s=3.0))
    assert arrivals == [(0.0, "a", 0), (1.0, "a/early", 0), (4.0, "a/late", 0)]


def test_a_sub_agent_whose_parent_is_not_in_the_trace_starts_by_itself() -> None:
    recorded = trace(talk("a/x", (0.0, None), parent="a"), talk("b", (0.0, None)), talk("b/y", (0.0, None), parent="b"))
    assert parents(recorded) == {"a/x": None, "b": None, "b/y": "b"}
    assert sorted(name for _, name, _ in serve(closed(recorded, alive=2))) == ["a/x", "b", "b/y"]


def test_sessions_that_name_each_other_as_parents_are_served_once() -> None:
    recorded = trace(talk("a", (0.0, None), parent="b"), talk("b", (0.0, None), parent="a"))
    assert parents(recorded) == {"a": None, "b": "a"}
    assert sorted(name for _, name, _ in serve(closed(recorded))) == ["a", "b"]


def test_starting_anywhere_sends_the_request_before_as_warm_up() -> None:
    turns = [(0.0, None), *((10.0 * place, 1.0) for place in range(1, 8))]
    recorded = trace(*(talk(name, *turns) for name in "abcd"))
    arrivals = serve(closed(recorded, alive=2, seed=5, start_anywhere=True))
    assert arrivals == serve(closed(recorded, alive=2, seed=5, start_anywhere=True))
    for name in "abcd":
        places = [(who, index) for _, who, index in arrivals if who.rstrip("!") == name]
        warm_ups = [index for who, index in places if who.endswith("!")]
        counted = [index for who, index in places if not who.endswith("!")]
        assert counted == list(range(counted[0], 8))
        assert warm_ups == ([counted[0] - 1] if counted[0] else [])
    assert sum(who.endswith("!") for _, who, _ in arrivals) in (1, 2)  # only those that are alive at the start


def test_sub_agents_from_before_the_starting_point_are_over() -> None:
    turns = [(10.0 * place, 1.0) for place in range(6)]
    children = [talk(f"a/{place}", (10.0 * place + 2.0, None), parent="a") for place in range(6)]
    for seed in range(6):
        arrivals = serve(closed(trace(talk("a", *turns), *children), seed=seed, start_anywhere=True))
        first = next(index for _, name, index in arrivals if name == "a")
        assert sorted(name for _, name, _ in arrivals if "/" in name) == [f"a/{place}" for place in range(first, 6)]


def test_forks_of_forks_go_as_deep_as_they_like() -> None:
    chain = [talk("s0", (0.0, None))]
    chain += [talk(f"s{place}", (2.0 * place, None), parent=f"s{place - 1}") for place in range(1, 3000)]
    recorded = trace(*chain)
    assert set(trees(recorded).values()) == {"s0"}
    traffic = closed(recorded)
    served, now_s = 0, 0.0
    while (next_s := traffic.next_s) is not None:
        now_s = next_s + 1.0
        for arrival in traffic.due(next_s):
            traffic.finished(arrival, now_s)
            served += 1
    assert (served, traffic.peak_alive) == (3000, 1)
    assert now_s == 2.0 * 2999 + 1.0

"""Virtual time of steps: one after another, the horizon, what a plan of several steps gives back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.replay_worlds import one_second_steps
from twinpool.clock import VirtualClock
from twinpool.replay.executor import LONGEST_RUN, SimExecutor
from twinpool.replay.host_link import HostLink
from twinpool.replay.timing import decode_durations, order_durations, step_durations
from twinpool.step import HostCopy, Row, StepPlan, StoreCopy

PAGES = np.zeros(99, np.int32)


def executor(*, overlap: bool, start_s: float = 0.0, cost=one_second_steps(), store=None) -> SimExecutor:  # noqa: B008
    made = SimExecutor(
        clock=VirtualClock(start_s), overlap=overlap, step_s=step_durations(cost), decode_s=decode_durations(cost),
        orders_s=order_durations(cost), store=store,
    )  # fmt: skip
    made.answers[7] = np.arange(100, 120, dtype=np.int32)
    return made


def decode(step: int, *, start: int, repeat: int = 1, position: int = 1) -> StepPlan:
    row = Row(rid=7, start=start, end=start + repeat, tokens=None, slot=1, pages=PAGES, position=position)
    return StepPlan(step=step, rows=(row,), repeat=repeat)


def now_s(made: SimExecutor) -> float:
    return made._clock.now_s()


def test_steps_queue_behind_each_other_and_the_clock_follows_the_results() -> None:
    made = executor(overlap=True, start_s=5.0)
    first, second = made.submit(decode(1, start=4)), made.submit(decode(2, start=5, position=2))
    assert now_s(made) == 5.0
    one = first.result()
    assert (one.tokens, one.duration_s, now_s(made)) == ((101,), 1.0, 6.0)
    assert (second.result().tokens, now_s(made)) == ((102,), 7.0)


def test_a_plan_of_several_steps_gives_every_token_and_all_its_time() -> None:
    made = executor(overlap=False)
    result = made.submit(decode(4, start=8, repeat=4, position=3)).result()
    assert (result.tokens, result.duration_s, now_s(made)) == ((106,), 4.0, 4.0)
    assert [run.tolist() for run in result.runs] == [[103, 104, 105, 106]]


def test_a_row_that_does_not_sample_gives_none() -> None:
    made = executor(overlap=False)
    row = Row(rid=7, start=0, end=4, tokens=np.zeros(4, np.int32), slot=1, pages=PAGES, sample=False)
    assert made.submit(StepPlan(step=1, rows=(row,))).result().tokens == (None,)


def test_orders_without_a_step_take_their_time_and_the_disk_hears_of_them_when_they_begin() -> None:
    link = HostLink(bytes_per_s=10.0, page_bytes=10, slot_bytes=0, n_layers=1, one_way=False, saves_beside=True)
    told: list[float] = []
    cost = replace(one_second_steps(), host=link)
    made = executor(overlap=False, start_s=5.0, cost=cost, store=lambda order, when_s: told.append(when_s))
    copy, store = HostCopy(True, PAGES[:3], PAGES[:3]), StoreCopy(PAGES[:2], 0, 2, PAGES[:2], 0)
    made.settle((copy, store))
    made.settle((store,))
    assert now_s(made) == 5.0
    made.submit(StepPlan(step=1, rows=decode(1, start=4).rows, orders=(store,))).result()
    assert (told, now_s(made)) == ([5.0, 10.0, 12.0], 14.0)


@pytest.mark.parametrize(
    ("overlap", "until_s", "steps"),
    [
        (False, None, LONGEST_RUN), (True, None, LONGEST_RUN), (False, 5.0, 1), (True, 5.0, 1), (False, 5.5, 1), (True, 5.5, 2),
        (False, 6.0, 1), (True, 6.0, 2), (False, 7.5, 3), (True, 7.5, 4), (False, 8.0, 3), (True, 8.0, 4),
    ],
)  # fmt: skip
def test_the_horizon_ends_with_the_step_after_which_an_arrival_is_seen(
    overlap: bool, until_s: float | None, steps: int
) -> None:
    """Steps end at 6, 7, 8 s. What comes at 7.5 is seen at 8: three steps; with overlap the fourth is planned by then."""
    made = executor(overlap=overlap, start_s=5.0)
    made.until_s = until_s
    assert made.horizon([10, 20]) == steps


def test_with_overlap_time_stands_where_the_last_step_is_planned() -> None:
    made = executor(overlap=True)
    handle = made.submit(decode(4, start=8, repeat=4))
    made.catch_up()
    assert now_s(made) == 3.0
    handle.result()
    assert now_s(made) == 4.0


def test_without_overlap_or_with_a_single_step_there_is_nothing_to_catch_up() -> None:
    serial, single = executor(overlap=False), executor(overlap=True)
    serial.submit(decode(4, start=8, repeat=4))
    single.submit(decode(1, start=8))
    serial.catch_up()
    single.catch_up()
    assert now_s(serial) == now_s(single) == 0.0


def test_without_costs_steps_take_no_time() -> None:
    made = executor(overlap=False, cost=None, start_s=2.0)
    made.until_s = 3.0
    assert made.horizon([5]) == LONGEST_RUN
    assert (made.submit(decode(4, start=8, repeat=4)).result().duration_s, now_s(made)) == (0.0, 2.0)

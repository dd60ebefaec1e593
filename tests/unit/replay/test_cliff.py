"""Edges, cliffs, the pool that made them and margins, on curves made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.replay.cliff import HELD, Reading, shape_of, tighter_pool


def reading(x: float, reuse: float, **values: float) -> Reading:
    given = {"state_evicted": 0.0, "kv_evicted": 0.0, "slots_free": 0.5, "pages_free": 0.5, **values}
    return Reading(x=x, reuse=reuse, **given)


CURVE = [
    reading(80, 0.10, state_evicted=0.8),
    reading(120, 0.30, state_evicted=0.6),
    reading(180, 0.85, state_evicted=0.1),
    reading(270, 0.90),
    reading(400, 0.88),
    reading(600, 0.60, kv_evicted=0.3, pages_free=0.01),
    reading(900, 0.50, kv_evicted=0.4, pages_free=0.01),
]


def test_a_plateau_between_two_cliffs() -> None:
    shape = shape_of(CURVE)
    below, above = shape.below, shape.above
    assert (shape.best_x, shape.best_reuse, shape.first, shape.last) == (270, 0.90, 80, 900)
    assert below is not None
    assert above is not None
    assert (below.edge, below.inner, below.outer, below.worst, below.pool) == (270, 180, 120, 0.10, "states")
    assert below.drop == pytest.approx(
        0.55 / 0.90
    )  # 0.85 is under 95 % of 0.90, so the edge is not at the steepest fall
    assert (above.edge, above.inner, above.outer, above.worst, above.pool) == (400, 400, 600, 0.50, "KV")
    assert above.drop == pytest.approx(0.28 / 0.90)


def test_margins_are_distances_to_edges() -> None:
    shape = shape_of(CURVE)
    assert shape.margins(300) == (30, 100)
    assert shape.margins(180) == (-90, 220)
    assert shape_of(CURVE[3:5]).margins(300) == (None, None)


def test_order_does_not_matter_and_one_reading_is_a_plateau() -> None:
    assert shape_of(CURVE[::-1]) == shape_of(CURVE)
    alone = shape_of([reading(5, 0.0)])
    assert (alone.best_x, alone.below, alone.above) == (5, None, None)


def test_a_fall_that_keeps_95_percent_is_no_cliff() -> None:
    assert shape_of([reading(1, 1.0), reading(2, HELD)]).above is None
    assert shape_of([reading(1, 1.0), reading(2, HELD - 0.001)]).above is not None


def test_kv_that_went_with_a_leafs_state_is_laid_on_the_states() -> None:
    assert tighter_pool(reading(1, 0, kv_evicted=0.5, slots_free=0.01, pages_free=0.4)) == "states"
    assert tighter_pool(reading(1, 0, kv_evicted=0.5, slots_free=0.4, pages_free=0.01)) == "KV"
    assert tighter_pool(reading(1, 0, state_evicted=0.5, kv_evicted=0.1, slots_free=0.4, pages_free=0.01)) == "states"


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 1)), min_size=1, max_size=20, unique_by=lambda p: p[0]))
def test_from_edge_to_edge_reuse_holds_and_past_a_cliff_it_does_not(pairs: list[tuple[int, float]]) -> None:
    shape = shape_of([reading(x, reuse) for x, reuse in pairs])
    least = HELD * shape.best_reuse
    low = shape.below.edge if shape.below is not None else shape.first
    high = shape.above.edge if shape.above is not None else shape.last
    assert low <= shape.best_x <= high
    assert all(reuse >= least for x, reuse in pairs if low <= x <= high)
    for cliff, beyond in (
        (shape.below, [p for p in pairs if p[0] < low]),
        (shape.above, [p for p in pairs if p[0] > high]),
    ):
        assert (cliff is None) == (not beyond)
        if cliff is not None:
            assert cliff.drop > 0
            assert cliff.worst < least
            assert cliff.worst <= min(reuse for _, reuse in beyond)

"""Many points: here, over processes, over two Ray nodes; the same numbers everywhere."""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import cast

import pytest

from tests.unit.replay.sweep_worlds import CLOSED, shared, sizing
from twinpool.errors import ConfigError
from twinpool.replay.spread import Finished, run_point, spread
from twinpool.replay.sweep import Measured, Point, grid_of, points_of

HAS_RAY = importlib.util.find_spec("ray") is not None


def points(slots: str = "16,20,30,40") -> dict[int, Point]:
    return dict(enumerate(points_of(sizing(), CLOSED, grid_of({"--slots": slots}))))


def test_here_and_over_processes_the_numbers_are_the_same() -> None:
    held, jobs = shared(), points()
    alone = dict(spread(held, jobs, workers=1))
    assert dict(spread(held, jobs, workers=2)) == alone
    found = [outcome for outcome in alone.values() if isinstance(outcome, Measured)]
    assert [one.slots for one in found] == [16, 20, 30, 40]
    assert all(one.requests == 48 and one.refused == 0 for one in found)
    assert found[0].token_share < found[-1].token_share  # more states, more to resume from
    assert found[0].gap("state_evicted") + found[0].gap("kv_evicted") > found[-1].gap("state_evicted")


def test_an_infinite_cache_reuses_at_least_as_much() -> None:
    held, jobs = shared(), points()
    with_bound, without = run_point(held, jobs[0]), run_point(held, jobs[1])
    assert isinstance(with_bound, Measured)
    assert isinstance(without, Measured)
    assert with_bound.infinite_token_share is not None
    assert with_bound.infinite_token_share >= with_bound.token_share
    assert without.infinite_token_share is None
    unbounded = run_point(replace(held, bounds=False), jobs[0])
    assert unbounded == replace(with_bound, infinite_token_share=None)


def test_a_refused_point_is_its_sentence() -> None:
    job = points("4000")[0]
    assert run_point(shared(), job) == job.refusal != ""


def test_closing_stops_what_still_runs() -> None:
    before = set(multiprocessing.active_children())
    with closing(cast(Generator[Finished], spread(shared(), points(), workers=2))) as results:
        next(results)
    # Not join(): the pool's own thread reaps them too, and whoever comes second is told that the child still lives.
    until_s = time.monotonic() + 10
    while left := set(multiprocessing.active_children()) - before:
        assert time.monotonic() < until_s, left
        time.sleep(0.01)


def test_a_missing_or_absent_cluster_is_a_sentence() -> None:
    says = "there is no Ray cluster" if HAS_RAY else r"pip install twinpool\[ray\]"
    with pytest.raises(ConfigError, match=says):
        list(spread(shared(), points(), ray="127.0.0.1:1"))


@pytest.fixture
def two_nodes() -> Iterator[str]:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_over_two_ray_nodes(two_nodes: str) -> None:
    held, jobs = shared(), points()
    assert dict(spread(held, jobs, ray=two_nodes)) == dict(spread(held, jobs, workers=1))

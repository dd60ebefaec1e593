"""The residency experiment in small: a plateau between two cliffs, and none left with ten times the sessions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from twinpool.replay.sweep_choice import choice_of, lines_of
from twinpool.replay.sweep_cli import SpreadOptions

SOURCE = Path(__file__).resolve().parents[3] / "examples" / "residency_cliff.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("residency_cliff", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_both_halves(example) -> None:
    few, many = (
        example.sweep(half, example.QUICK, SpreadOptions(workers=1))
        for half in example.worlds(example.synthesize(example.WORKLOAD), example.QUICK)
    )
    (line,) = lines_of(few)
    best, crowd = choice_of(few), choice_of(many)
    assert best is not None
    assert crowd is not None
    assert line.shape.below is not None
    assert line.shape.above is not None
    assert (line.shape.below.pool, line.shape.above.pool) == ("states", "KV")
    assert best.row.measured.token_share > 0.9 * few.rows[0].measured.infinite_token_share
    assert crowd.row.measured.token_share < 0.1
    assert (best.row.measured.requests, crowd.row.measured.requests) == (240, 240)


def test_copied_trees_share_nothing(example) -> None:
    trace = example.synthesize(example.WORKLOAD)
    doubled = example.crowd_of(trace, 18)
    assert len(doubled.sessions) == 18
    assert len({session.id for session in doubled.sessions}) == 18
    assert len({session.namespace for session in doubled.sessions}) == 2
    assert all(request.session == session.id for session in doubled.sessions for request in session.requests)
    assert len(example.crowd_of(trace, 5).sessions) == 5
    assert all(len(session.requests) == 2 for session in example.head(doubled, 2).sessions)

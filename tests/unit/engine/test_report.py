"""Per-batch log lines over a tiny world, with exact numbers."""

from __future__ import annotations

import logging

import pytest

from tests.unit.engine.test_core import drain, make_engine
from twinpool.engine.report import BatchLog
from twinpool.request import SamplingParams


def test_prefill_and_decode_lines_count_what_ran(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(n_pages=40, n_slots=20, overlap=False, chunk=6, grid=4, track=4)
    engine.observers.append(BatchLog(book=engine.scheduler.book, clock=engine.clock, decode_log_interval=4))
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9], params)
        engine.add([1, 2], params)
        drain(engine)
        prefills = [line for line in caplog.messages if line.startswith("Prefill batch")]
        decodes = [line for line in caplog.messages if line.startswith("Decode batch")]
        # Six tokens a step, cut at the grid of four; the queue holds the second prompt meanwhile.
        assert prefills[0].startswith("Prefill batch, #new-seq: 1, #new-token: 4, #cached-token: 0, full token usage: ")
        assert "#running-req: 1, #queue-req: 1, #pending-token: 7, cuda graph: False" in prefills[0]
        assert "#new-seq: 1, #new-token: 6, #cached-token: 0" in prefills[1]
        assert len(decodes) == 2
        assert decodes[0].startswith("Decode batch, #running-req: 2, #full token: ")
        caplog.clear()
        engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9], params)
        drain(engine)
    assert "#new-seq: 1, #new-token: 3, #cached-token: 8" in caplog.messages[0]


def test_retractions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(n_pages=24, overlap=True, schedule_conservativeness=0.1)
    engine.observers.append(BatchLog(book=engine.scheduler.book, clock=engine.clock, decode_log_interval=40))
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        for first in range(1, 5):
            engine.add([first, 2, 3], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        drain(engine)
    assert any(
        line.startswith("KV cache pool is full. Retract requests. #retracted_reqs: ") for line in caplog.messages
    )

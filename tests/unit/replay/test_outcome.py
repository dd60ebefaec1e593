"""What follows from a run's numbers: work done again, checkpoints a session, the tighter pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.replay.outcomes import BOUNDS, RECORDS, outcome
from twinpool.replay.outcome import Recomputed, first_refused, held, pressure, recomputed


def test_work_done_again() -> None:
    """1,000 prompt tokens, 256 reused: 744 are computed once, so 256 of the 1,000 computed came after the retraction."""
    found = recomputed(outcome())
    assert found == Recomputed(state_evicted_tokens=128, kv_evicted_tokens=64, forgotten_tokens=0, retracted_tokens=256)
    assert found.tokens == 448
    assert recomputed(outcome(retractions=0)).retracted_tokens == 0


def test_what_the_tree_has_forgotten_is_lost_kv() -> None:
    """448 of 1,000 tokens are reused or explained; an infinite cache would have had 600, so 152 new ones are not new."""
    found = replace(outcome(), bounds=BOUNDS)
    assert recomputed(found).forgotten_tokens == 152
    assert recomputed(found).kv_lost_tokens == 216
    assert pressure(found).pool == "KV"
    result = found.result
    full = replace(found, result=replace(result, counts=replace(result.counts, evicted_kv_tokens=0)))
    assert recomputed(full).forgotten_tokens == 0


def test_checkpoints_of_a_session() -> None:
    """2 of 10 slots hold checkpoints; session a lives 8 s and b 6 s of 10, so 1.4 sessions are alive on average."""
    found = held(outcome().result)
    assert found.mean_checkpoints == pytest.approx(2.0)
    assert found.per_session == pytest.approx(2.0 / 1.4)


def test_sessions_of_one_request_hold_nothing_each() -> None:
    alone = replace(outcome().result, records=RECORDS[1:3])
    assert held(alone).per_session is None


def test_first_refusal_names_its_place() -> None:
    assert first_refused(outcome().result) == "session b, request 2: it is too long"
    assert first_refused(replace(outcome().result, records=RECORDS[:3])) == ""


FREE = "on average 40.0% of the slots and 25.0% of the KV pages were free."


@pytest.mark.parametrize(
    ("states", "kv", "pool", "said"),
    [
        (128, 64, "states", "The state pool was the tighter one: 128 prompt tokens (12.8%) were computed again because their "
         f"checkpoint had been evicted, 64 (6.4%) because their KV had, alone or with its checkpoint; {FREE}"),
        (1, 64, "KV", "The KV pool was the tighter one: 1 prompt tokens (0.1%) were computed again because their checkpoint had "
         f"been evicted, 64 (6.4%) because their KV had, alone or with its checkpoint; {FREE}"),
        (0, 0, "neither", f"Neither pool cost reuse: nothing that was evicted was asked for again; {FREE}"),
    ],
)  # fmt: skip
def test_tighter_pool(states: int, kv: int, pool: str, said: str) -> None:
    found = pressure(outcome(state_evicted=states, kv_evicted=kv, peak_running=1, retractions=0))
    assert (found.pool, found.sentences) == (pool, (said,))


def test_kv_that_went_with_its_state_is_the_state_pools() -> None:
    """Most of what was lost is KV, but pages were free and slots were not: leaves went because of their states."""
    found = outcome(state_evicted=1, kv_evicted=64)
    occupancy = replace(found.result.occupancy, slots_free=0.1, pages_free=0.5)
    assert pressure(replace(found, result=replace(found.result, occupancy=occupancy))).pool == "states"


def test_limits_of_running_requests() -> None:
    assert pressure(outcome()).sentences[1:] == (
        "Running requests are limited to 2 (slots / 5, the state pool's limit), and as many ran at the peak.",
        "1 times a running request was retracted: the KV pool could not hold them all.",
    )


def test_lengths_only_leave_the_pool_unknown() -> None:
    found = pressure(outcome(lengths_only=True, state_evicted=0, kv_evicted=0, peak_running=1, retractions=0))
    assert found.pool == "neither"
    assert found.sentences[0].startswith("Which pool limits reuse is unknown")

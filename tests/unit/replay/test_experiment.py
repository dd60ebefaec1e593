"""Experiments as a whole: what part of a trace is used, arrival modes, an infinite cache against an independent count, determinism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.replay_worlds import Turn, keys, run, session, trace
from twinpool.errors import ConfigError
from twinpool.plan.command import read_command
from twinpool.plan.run import sizing_of
from twinpool.replay.cost import Calibration
from twinpool.replay.experiment import Experiment, first_trees, prepare, run_experiment
from twinpool.replay.formats import load_trace
from twinpool.replay.options import TrafficOptions
from twinpool.replay.reuse import Match, matches
from twinpool.replay.run import Run
from twinpool.replay.synthetic import SyntheticOptions, synthesize
from twinpool.replay.trace import Trace
from twinpool.replay.traffic import ClosedTraffic, Traffic

# The public traces lie beside the repository where they are at hand.
TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
MOONCAKE, AGENTS = TRACES / "mooncake_conversation.jsonl.xz", TRACES / "agent-traces.tar.xz"
MACHINE = ["Qwen3.5-9B", "--gpu", "H100", "--pool-memory", "3GiB", "--page-size", "16", "--max-running-requests", "4"]


def turn(count: int = 1) -> list[Turn]:
    return [Turn(blocks=[1, 2], input_tokens=2) for _ in range(count)]


def ids(recorded: Trace) -> list[str]:
    return [one.id for one in recorded.sessions]


def test_the_first_trees_come_with_their_sub_agents() -> None:
    recorded = trace(
        session("a", *turn()), session("a/x", *turn(), parent="a"), session("b", *turn()), session("c", *turn()),
        session("a/x/y", *turn(), parent="a/x"), session("c/z", *turn(), parent="c"),
    )  # fmt: skip
    assert ids(first_trees(recorded, 1)) == ["a", "a/x", "a/x/y"]
    assert ids(first_trees(recorded, 2)) == ["a", "a/x", "b", "a/x/y"]
    assert ids(first_trees(recorded, 99)) == ids(recorded)


def test_a_sub_agent_without_its_parent_is_a_tree_of_its_own() -> None:
    recorded = trace(session("gone/x", *turn(), parent="gone"), session("b", *turn()))
    assert ids(first_trees(recorded, 1)) == ["gone/x"]


def test_automatic_arrival_follows_the_clock_of_the_trace() -> None:
    for clock, arrival in (("session", "closed"), ("trace", "recorded")):
        _, options = prepare(trace(session("a", *turn()), clock=clock), TrafficOptions())
        assert options.arrival == arrival
    _, options = prepare(trace(session("a", *turn())), TrafficOptions(arrival="closed"))
    assert options.arrival == "closed"


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="hand-made has no usable request: 0 records were left out"):
        prepare(trace(), TrafficOptions())


def experiment(seed: int, **options: object) -> Experiment:
    made = synthesize(
        SyntheticOptions(sessions=12, turns=4, system_tokens=64, input_tokens=300, output_tokens=20, seed=7)
    )
    traffic = TrafficOptions(arrival="closed", sessions=6, start_anywhere=True, seed=seed)
    recorded, traffic = prepare(made, traffic)
    sizing = sizing_of(read_command(MACHINE, usage=""))
    return Experiment(trace=recorded, sizing=sizing, traffic=traffic, calibration=Calibration(), **options)


def test_the_same_seed_gives_the_same_result_and_another_seed_another_one() -> None:
    first, again, other = (run_experiment(experiment(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.records != other.records


def test_warm_ups_count_in_no_summary() -> None:
    result = run_experiment(experiment(1))
    warm = [record for record in result.records if record.warm_up]
    counted = [record for record in result.records if not record.warm_up]
    assert 1 <= len(warm) == result.counts.warm_up <= 6
    assert result.counts.requests == len(counted)
    assert result.reuse.prompt_tokens == sum(record.input_tokens for record in counted)
    assert result.times.e2e_s is not None
    assert result.times.e2e_s.count == len(counted)
    # Who starts late sends neither what came before its warm-up nor anything twice.
    skipped = sum(record.index for record in warm)
    assert len(result.records) + skipped == 12 * 4


def test_skipping_is_a_matter_of_speed_only() -> None:
    fast, slow = run_experiment(experiment(3)), run_experiment(experiment(3, skip=False))
    assert (fast.records, fast.reuse, fast.counts, fast.times) == (slow.records, slow.reuse, slow.counts, slow.times)


def test_in_count_mode_no_time_passes_but_that_of_the_trace() -> None:
    made = synthesize(SyntheticOptions(sessions=5, turns=3, input_tokens=200, output_tokens=30, seed=1))
    recorded, traffic = prepare(made, TrafficOptions(arrival="count"))
    sizing = sizing_of(read_command(MACHINE, usage=""))
    result = run_experiment(Experiment(trace=recorded, sizing=sizing, traffic=traffic, calibration=Calibration()))
    assert {record.finished_s - record.arrival_s for record in result.records} == {0.0}
    slower = Experiment(
        trace=recorded, sizing=sizing, traffic=traffic, calibration=Calibration(flops_share=0.01, step_s=1.0)
    )
    assert replace(run_experiment(slower), setup=result.setup) == result


def endless(recorded: Trace, traffic: Traffic | None = None, *, chunk_tokens: int | None) -> Run:
    """A cache of pages of one block that never forgets, one request at a time, no step taking time."""
    block = recorded.block_size
    return run(
        recorded, traffic=traffic, cost=None, n_pages=1_000_000, n_slots=200_000, page_size=block, grid=block, track=block,
        chunk=chunk_tokens, max_running=1, context_len=10_000_000,
    )  # fmt: skip


def at_most(match: Match, block_size: int) -> int:
    """What a request can find: whole pages of what was sent before, and never its last token."""
    return min(match.seen_tokens, match.request.input_tokens - 1) // block_size * block_size


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake trace is not here")
def test_an_infinite_cache_finds_what_the_independent_count_finds() -> None:
    """Request by request on the first 2,500; the whole file gives 54,063,104 tokens both ways (a minute under load).

    Chunks of one block: a chunk leaves one checkpoint, and KV behind the last one is not kept, so that with longer chunks a prompt
    that leaves a cached one behind is kept up to that fork only (0.4 % less on this file).
    """
    whole = load_trace(str(MOONCAKE), format=None, strict=True)
    counted = list(matches(whole))
    blocks = sum(len(match.request.blocks) for match in counted)
    assert round(sum(match.seen_blocks for match in counted) / blocks, 3) == 0.366
    recorded = replace(whole, sessions=whole.sessions[:2500])
    done = endless(recorded, chunk_tokens=512)
    found = {(record.session, record.index): record.kv_matched for record in done.recorder.records}
    assert sorted(found) == keys(recorded)
    assert found == {(one.request.session, one.request.index): at_most(one, 512) for one in matches(recorded)}


@pytest.mark.skipif(not AGENTS.exists(), reason="the agent traces are not here")
def test_agent_sessions_find_at_least_the_independent_count_with_an_infinite_cache() -> None:
    """More than the count, by less than 1 %: here answers are cached too, there only what a later prompt repeats of them.

    All sessions together are near 96 % (trace info); the first six are shorter and lie below.
    """
    recorded = first_trees(load_trace(str(AGENTS), format=None, strict=False), 6)
    size = recorded.block_size
    assert size is not None
    traffic = ClosedTraffic(recorded, alive=1, idle_cap_s=0.0, seed=0, start_anywhere=False)
    done = endless(recorded, traffic, chunk_tokens=None)
    found = {(record.session, record.index): record.kv_matched for record in done.recorder.records}
    least = {(one.request.session, one.request.index): at_most(one, size) for one in matches(recorded)}
    assert sorted(found) == keys(recorded)
    assert all(found[key] >= tokens for key, tokens in least.items())
    prompt_tokens = sum(request.input_tokens for request in recorded.requests())
    assert 0 < sum(found.values()) - sum(least.values()) < 0.01 * prompt_tokens
    assert sum(found.values()) > 0.9 * prompt_tokens


def test_concurrency_over_time_is_exact_however_few_moments_are_kept() -> None:
    made = synthesize(SyntheticOptions(sessions=300, turns=1, input_tokens=300, output_tokens=40, interval_s=2.0))
    recorded, traffic = prepare(made, TrafficOptions(arrival="recorded"))
    sizing = sizing_of(read_command(MACHINE, usage=""))
    one = Experiment(trace=recorded, sizing=sizing, traffic=traffic, calibration=Calibration())
    result, stepped = run_experiment(one), run_experiment(replace(one, skip=False))
    ran_s = sum(one.finished_s - one.scheduled_s for one in result.records)
    assert result.occupancy.mean_running == ran_s / result.times.duration_s
    assert result.occupancy.median_running == 0
    for share in ("slots_working", "slots_protected", "slots_evictable", "pages_evictable"):
        seen, wanted = getattr(result.occupancy, share), getattr(stepped.occupancy, share)
        assert seen == pytest.approx(wanted, rel=0.1)  # few looks against all of them

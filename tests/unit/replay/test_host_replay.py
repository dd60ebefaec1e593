"""The host tier in replay: a report rebuilt, what copies cost, what a run says about it, and sweeps over it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.replay_worlds import numbers
from tests.unit.replay.host_worlds import (
    KV_BYTES,
    N_PROMPTS,
    PAGE_TOKENS,
    PROMPT_TOKENS,
    SLOT_BYTES,
    experiment,
    report_sizing,
    report_trace,
    sweep_of,
)
from twinpool.errors import ConfigError
from twinpool.plan.sizing import changed
from twinpool.replay.bound import bounds
from twinpool.replay.chrome import chrome_trace
from twinpool.replay.cliff import Reading, tighter_pool
from twinpool.replay.cost import Calibration
from twinpool.replay.document import replay_json
from twinpool.replay.experiment import run_experiment
from twinpool.replay.host_link import HostLink
from twinpool.replay.machine import cost_model
from twinpool.replay.options import TrafficOptions
from twinpool.replay.outcome import Outcome
from twinpool.replay.page import replay_page
from twinpool.replay.report import report_text
from twinpool.replay.result import ReplayResult
from twinpool.replay.sweep import grid_of, points_of
from twinpool.replay.sweep_choice import choice_of, lines_of
from twinpool.replay.sweep_report import flags_of, sweep_text
from twinpool.replay.tokens import TokenSpace
from twinpool.step import HostCopy, SlotOrder

COUNT = TrafficOptions(arrival="count")


def gb(slots: int) -> str:
    """So many states for --hicache-mamba-size-gb."""
    return f"{(slots * SLOT_BYTES + 1) / 10**9:.9f}"


def ran(*flags: str) -> ReplayResult:
    return run_experiment(experiment(report_sizing(*flags), report_trace()))


def again(result: ReplayResult) -> list[int]:
    """Tokens that each of the first eight prompts got from the host when it came again."""
    return [record.from_host for record in result.records if int(record.session[1:]) >= N_PROMPTS]


def test_565_states_beside_kv_for_317_prompts_give_no_hit() -> None:
    result = ran("--hicache-mamba-size-gb", gb(565))
    assert (result.setup.slots, result.setup.kv_tokens) == (60, 20 * PROMPT_TOKENS)
    host = result.host
    assert host is not None
    assert host.most_states == 565
    assert host.most_tokens == pytest.approx(2_680_896, rel=0.006)
    assert again(result) == [0] * 8
    assert dict(result.reuse.gaps)["host_state_evicted"] == 8 * 8_192
    last = result.samples[-1]
    assert last.host_states == 565
    assert 0.34 < 1 - last.host_pages * PAGE_TOKENS / host.most_tokens < 0.38
    assert host.dropped_states > 0


@pytest.mark.parametrize("flags", [("--hicache-mamba-size-gb", gb(734)), ()])
def test_734_states_or_no_split_bring_all_eight_back(flags) -> None:
    result = ran(*flags)
    host = result.host
    assert host is not None
    assert again(result) == [8_192] * 8
    assert (host.loaded_tokens, host.loaded_states, host.dropped_states) == (8 * 8_192, 8, 0)
    assert host.loaded_bytes == 8 * (8_192 * KV_BYTES + SLOT_BYTES)
    assert (result.reuse.reused_tokens, result.reuse.from_host_tokens) == (8 * 8_192, 8 * 8_192)
    assert host.resumable_share == 1.0
    assert host.kv_share + host.states_share < 1


LINK = HostLink(bytes_per_s=100.0, page_bytes=10, slot_bytes=50, n_layers=4, one_way=False, saves_beside=True)


def copy(*, to_host: bool, pages: int, slot: int = 0) -> HostCopy:
    ids = np.array(numbers(pages), np.int32)
    return HostCopy(to_host, ids, ids, slot, slot)


@pytest.mark.parametrize(
    ("link", "forward_s", "took_s"),
    [
        (LINK, 9.0, 9.25),  # 1 s of loads: the first of four layers, then the forward
        (LINK, 0.5, 1.5),  # 1.5 s of saves are the longest
        (replace(LINK, one_way=True), 0.5, 2.5),
        (replace(LINK, one_way=True), 9.0, 9.25),
        (replace(LINK, saves_beside=False), 0.5, 2.5),
    ],
)
def test_what_a_step_with_copies_takes(link, forward_s, took_s) -> None:
    orders = [copy(to_host=False, pages=5, slot=1), SlotOrder(1), copy(to_host=True, pages=15)]
    assert link.step_s(np.array([forward_s]), orders).tolist() == pytest.approx([took_s])
    assert link.step_s(np.array([forward_s]), [SlotOrder(1)]).tolist() == [forward_s]


def test_a_load_that_is_longer_than_the_forward_is_waited_for() -> None:
    assert LINK.step_s(np.array([0.5]), [copy(to_host=False, pages=20)]).tolist() == pytest.approx([2.0])


def test_the_link_is_that_of_the_device_and_absent_without_a_tier() -> None:
    sizing = report_sizing()
    link = cost_model(sizing, Calibration()).host
    assert link is not None
    assert (link.bytes_per_s, link.page_bytes, link.slot_bytes) == (64e9, PAGE_TOKENS * KV_BYTES, SLOT_BYTES)
    assert (link.one_way, link.saves_beside) == (False, True)
    assert cost_model(changed(sizing, enable_hierarchical_cache=False), Calibration()).host is None


def test_restored_prompts_have_their_first_token_sooner() -> None:
    recorded = report_trace()

    def ttft_s(slots: int) -> float:
        sizing = report_sizing("--hicache-mamba-size-gb", gb(slots))
        result = run_experiment(experiment(sizing, recorded, arrival="recorded"))
        found = [one for one in result.records if int(one.session[1:]) >= N_PROMPTS]
        return sum(one.first_token_s - one.arrival_s for one in found) / len(found)

    assert ttft_s(734) < ttft_s(565)


def outcome(*flags: str) -> Outcome:
    recorded = report_trace()
    one = experiment(report_sizing(*flags), recorded)
    result = run_experiment(one)
    return Outcome(trace=recorded, traffic=COUNT, result=result, bounds=bounds(one, result, TokenSpace(recorded)))


def row_of(text: str, name: str) -> str:
    """The first cell beside a row's name."""
    return next(line.removeprefix(name).split()[0] for line in text.splitlines() if line.startswith(name))


def test_the_report_says_what_the_tier_did() -> None:
    text = report_text(outcome("--hicache-mamba-size-gb", gb(565)))
    assert "host tier: 31.99 GB, 2,667,904 tokens and 565 states, a fixed split; write_through" in text
    assert row_of(text, "host_state_evicted") == "65,536"
    assert "The host tier's part for states was the tighter one: 65,536 prompt tokens" in text
    assert "dropped to make room" in text
    text = report_text(outcome())
    assert "4,041,984 tokens or 1,662 states, no fixed split" in text
    assert row_of(text, "  of it, from the host") == "65,536"
    assert "at the end 100.0% of its KV led to a state" in text


def test_document_page_and_chrome_trace_have_the_tier() -> None:
    found = outcome()
    document = json.loads(replay_json(found))
    assert document["host"]["loaded_states"] == 8
    assert document["setup"]["write_policy"] == "write_through"
    assert document["samples"]["host_states"][-1] == 608
    assert "Host memory" in replay_page(found)
    assert '"host states"' in chrome_trace(found.result)


def test_the_clairvoyant_bound_counts_the_hosts_room() -> None:
    with_tier, without = outcome(), outcome("--hicache-size", "0.1")
    assert with_tier.bounds is not None
    assert without.bounds is not None
    assert with_tier.bounds.clairvoyant_tokens >= with_tier.result.reuse.reused_tokens > 0
    assert "With a host tier" in with_tier.bounds.note
    # 8 prompts can be had again by an endless cache; a far smaller host cannot make that less than what the device alone holds.
    assert without.bounds.clairvoyant_tokens <= with_tier.bounds.clairvoyant_tokens == with_tier.bounds.infinite_tokens


@pytest.mark.parametrize(
    ("values", "pool"),
    [({"one_memory": True}, "host"), ({"slots_free": 0.0, "pages_free": 0.4}, "states"), ({"pages_free": 0.0}, "KV")],
)
def test_what_ran_out(values, pool) -> None:
    reading = Reading(x=1, reuse=0.1, state_evicted=0.1, kv_evicted=0.3, slots_free=0.5, pages_free=0.5)
    assert tighter_pool(replace(reading, **values)) == pool


def test_a_sweep_over_sizes_finds_where_the_host_becomes_too_small() -> None:
    sweep = sweep_of(host_sizes="0,8,16,24,32")
    assert [one.measured.from_host_share > 0 for one in sweep.rows if one.measured] == [
        False,
        False,
        False,
        False,
        True,
    ]
    (line,) = lines_of(sweep)
    assert line.shape.below is not None
    assert (line.shape.below.edge, line.shape.below.pool) == (32.0, "host")
    assert "what runs out is host memory" in sweep_text(sweep)
    choice = choice_of(sweep)
    assert choice is not None
    assert "--hicache-size 32.0" in flags_of(choice)


def test_a_sweep_over_splits_has_shares_on_a_line_and_auto_beside_it() -> None:
    sweep = sweep_of(host_splits="auto,0.3,0.45,0.9", host_sizes="32")
    assert sweep.over is not None
    assert sweep.over.name == "host_split"
    (line,) = lines_of(sweep)
    assert line.xs == (0.3, 0.45, 0.9)
    assert [one.token_share > 0 for one in line.measured] == [False, True, False]
    assert line.shape.below is not None
    assert line.shape.above is not None
    assert (line.shape.below.pool, line.shape.above.pool) == ("states", "KV")
    assert "host size 32.0, host split auto: 3.7% reuse." in sweep_text(sweep)
    quota = next(row for row in sweep.rows if ("host_split", 0.3) in row.point.values).point.sizing
    assert quota is not None
    assert quota.resolved.hicache_mamba_size_gb == pytest.approx(0.3 * 32, rel=0.001)


def test_policies_are_an_axis() -> None:
    sweep = sweep_of(write_policies="write_through,write_back")
    policies = [row.point.sizing.resolved.hicache_write_policy for row in sweep.rows if row.point.sizing]
    assert policies == ["write_through", "write_back"]


def test_what_does_not_go_together_is_refused() -> None:
    sizing = report_sizing()
    for axis in ("--host-splits", "--write-policies"):
        bare = changed(sizing, enable_hierarchical_cache=False)
        values = "auto" if axis == "--host-splits" else "write_back"
        with pytest.raises(ConfigError, match=f"{axis} needs a host tier"):
            points_of(bare, COUNT, grid_of({axis: values}))
    with pytest.raises(ConfigError, match="--host-sizes contradicts --hicache-size"):
        points_of(sizing, COUNT, grid_of({"--host-sizes": "1,2"}))
    with pytest.raises(ConfigError, match="contradicts --hicache-mamba-size-gb"):
        points_of(changed(sizing, hicache_mamba_size_gb=1.0), COUNT, grid_of({"--host-splits": "0.5"}))
    given = replace(sizing, flags=replace(sizing.flags, given=sizing.flags.given - {"hicache_size"}))
    none, tiny = points_of(given, COUNT, grid_of({"--host-sizes": "0,0.001", "--host-splits": "0.5"}))
    assert "nothing to split" in none.refusal
    assert "raise --hicache-size" in tiny.refusal

"""The disk tier in a replay's reports, documents and sweeps: a run whose prompts come back from the disk."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.replay.host_worlds import (
    N_AGAIN,
    N_PROMPTS,
    SLOT_BYTES,
    experiment,
    report_sizing,
    report_trace,
    sweep_of,
)
from twinpool.cli.main import run as run_verb
from twinpool.errors import ConfigError
from twinpool.plan.sizing import changed
from twinpool.replay.bound import bounds
from twinpool.replay.chrome import chrome_trace
from twinpool.replay.cliff import Reading, tighter_pool
from twinpool.replay.cost import Calibration
from twinpool.replay.disk_link import USUAL, DiskLink
from twinpool.replay.document import replay_json
from twinpool.replay.experiment import run_experiment
from twinpool.replay.options import ReplayOptions, TrafficOptions, disk_link
from twinpool.replay.outcome import Outcome, pressure
from twinpool.replay.page import replay_page
from twinpool.replay.report import report_text
from twinpool.replay.result import ReplayResult
from twinpool.replay.sweep import grid_of, points_of
from twinpool.replay.sweep_choice import lines_of
from twinpool.replay.sweep_report import sweep_text
from twinpool.replay.sweep_store import point_key
from twinpool.replay.tokens import TokenSpace

COUNT = TrafficOptions(arrival="count")
DISK = ("--hicache-storage-backend", "file", "--hicache-size", "8")  # the host of 8 GB holds none of them long enough
AGAIN_TOKENS = N_AGAIN * 8_192


def ran(*flags: str, arrival: str = "count", link: DiskLink | None = None) -> ReplayResult:
    one = experiment(report_sizing(*DISK, *flags), report_trace(), arrival=arrival)
    return run_experiment(one if link is None else replace(one, disk=link))


def outcome(*flags: str) -> Outcome:
    recorded = report_trace()
    one = experiment(report_sizing(*DISK, *flags), recorded)
    result = run_experiment(one)
    return Outcome(trace=recorded, traffic=COUNT, result=result, bounds=bounds(one, result, TokenSpace(recorded)))


def test_what_device_and_host_have_dropped_comes_from_the_disk() -> None:
    result = ran("--hicache-storage-size", "64")
    disk = result.disk
    assert disk is not None
    assert (result.reuse.reused_tokens, result.reuse.from_storage_tokens, result.reuse.from_host_tokens) == (
        AGAIN_TOKENS,
        AGAIN_TOKENS,
        0,
    )
    assert sum(one.from_storage for one in result.records) == AGAIN_TOKENS
    assert disk.written_segments == disk.segments > N_PROMPTS
    assert (disk.evicted_segments, disk.dropped_segments, disk.late_requests) == (0, 0, 0)
    assert disk.used_bytes == disk.written_bytes <= disk.limit_bytes == 64 * 10**9
    assert result.samples[-1].disk_bytes == disk.used_bytes
    assert result.setup.prefetch_policy == "timeout"


def test_a_disk_that_is_too_small_evicts_what_would_have_come_back() -> None:
    found = outcome("--hicache-storage-size", "6")
    disk = found.result.disk
    assert disk is not None
    assert found.result.reuse.from_storage_tokens == 0
    assert disk.evicted_segments > 0
    assert disk.used_bytes <= disk.limit_bytes
    assert pressure(found).pool == "disk"
    assert "The disk tier was too small" in report_text(found)


def test_a_disk_that_writes_too_slowly_is_not_called_too_small() -> None:
    link = DiskLink(read_bytes_per_s=1e10, write_bytes_per_s=1e7, latency_s=0.0)
    run = experiment(report_sizing(*DISK, "--hicache-storage-size", "64"), report_trace(), arrival="recorded")
    disk = run_experiment(replace(run, disk=link)).disk
    assert disk is not None
    assert disk.dropped_segments > 0
    assert (disk.ran_out, disk.lacked) == (False, "disk_writes")
    few = replace(disk, evicted_segments=disk.dropped_segments - 1)
    many = replace(disk, evicted_segments=disk.dropped_segments)
    assert [one.lacked for one in (few, many, replace(disk, dropped_segments=0))] == ["disk_writes", "disk", None]


def test_without_the_flags_there_is_none() -> None:
    result = run_experiment(experiment(report_sizing(), report_trace()))
    assert (result.disk, result.setup.prefetch_policy) == (None, None)


def test_a_slow_disk_is_waited_for_and_a_very_slow_one_is_not() -> None:
    quick, slow = DiskLink(read_bytes_per_s=1e10, write_bytes_per_s=1e10, latency_s=0.0), None

    def of(link: DiskLink | None) -> tuple[float, ReplayResult]:
        result = ran("--hicache-storage-size", "64", arrival="recorded", link=link)
        last = [one for one in result.records if int(one.session[1:]) >= N_PROMPTS]
        return sum(one.scheduled_s - one.arrival_s for one in last) / N_AGAIN, result

    waited_s = {}
    for name, link in (("quick", quick), ("usual", slow)):
        waited_s[name], result = of(link)
        assert result.reuse.from_storage_tokens == AGAIN_TOKENS
    assert 0 < waited_s["quick"] < waited_s["usual"]
    # 8,192 tokens are waited for 3 s at most; their files take ten.
    late_s, result = of(DiskLink(read_bytes_per_s=1e7, write_bytes_per_s=1e10, latency_s=0.0))
    assert result.disk is not None
    assert result.disk.late_requests == N_AGAIN
    assert late_s > waited_s["usual"]


def test_a_disk_that_cannot_keep_up_drops_segments() -> None:
    link = DiskLink(read_bytes_per_s=1e10, write_bytes_per_s=1e7, latency_s=0.0)
    disk = ran("--hicache-storage-size", "64", arrival="recorded", link=link).disk
    assert disk is not None
    assert disk.dropped_segments > 0
    assert disk.pending_segments > 0


def test_report_document_page_and_chrome_trace_have_the_disk() -> None:
    found = outcome("--hicache-storage-size", "64")
    text = report_text(found)
    assert "disk tier: 64.00 GB, empty at the start; timeout" in text
    assert re.search(r"of it, from the disk +65,536 ", text)
    assert "evicted to make room" in text
    document = json.loads(replay_json(found, records=True))
    assert document["disk"]["limit_bytes"] == 64 * 10**9
    assert document["disk"]["latency_s"] is None, "no step takes time"
    assert document["reuse"]["from_storage_tokens"] == AGAIN_TOKENS
    assert document["records"][-1]["from_storage"] == 8_192
    assert document["samples"]["disk_bytes"][-1] == document["disk"]["used_bytes"]
    page = replay_page(found)
    assert "Disk tier" in page
    assert "disk GB" in chrome_trace(found.result)
    assert "disk GB" not in chrome_trace(replace(found.result, disk=None))


def test_the_bound_counts_the_disks_room() -> None:
    found = outcome("--hicache-storage-size", "64")
    assert found.bounds is not None
    assert found.bounds.clairvoyant_tokens >= found.result.reuse.reused_tokens > 0
    assert "With a disk below it" in found.bounds.note
    assert found.result.disk is not None
    assert found.result.disk.most_states > 64 * 10**9 // (SLOT_BYTES * 2)


def test_the_disk_is_named_before_the_host() -> None:
    reading = Reading(
        x=1, reuse=0.1, state_evicted=0.1, kv_evicted=0.3, slots_free=0.5, pages_free=0.5, one_memory=True
    )
    assert tighter_pool(reading) == "host"
    assert tighter_pool(replace(reading, disk="disk")) == "disk"


def test_a_sweep_over_sizes_of_host_and_disk() -> None:
    sweep = sweep_of(disk_sizes="0,6,64", host_sizes="8")
    shares = [one.measured.from_storage_share > 0 for one in sweep.rows if one.measured]
    assert shares == [False, False, True]
    assert [one.measured.disk_full for one in sweep.rows if one.measured] == [None, True, False]
    (line,) = lines_of(replace(sweep, over=next(axis for axis in grid_of({"--disk-sizes": "0,6,64"}))))
    assert line.shape.below is not None
    assert (line.shape.below.edge, line.shape.below.pool) == (64.0, "disk")
    assert "from disk" in sweep_text(sweep)
    no_host, none = sweep_of(disk_sizes="6,0", host_sizes="0").rows
    assert "needs --enable-hierarchical-cache" in no_host.refusal
    assert none.measured is not None
    assert "from disk" not in sweep_text(sweep_of(disk_sizes="0", host_sizes="8"))


def test_without_a_host_tier_there_is_no_disk_below_it() -> None:
    """Of a command line that has a disk at every other size."""
    base = report_sizing(*DISK)
    base = replace(base, flags=replace(base.flags, given=base.flags.given - {"hicache_size"}))
    none, some = points_of(base, COUNT, grid_of({"--host-sizes": "0,8"}))
    assert (none.refusal, some.refusal) == ("", "")
    assert none.sizing.resolved.hicache_storage_backend is None
    assert not none.sizing.resolved.enable_hierarchical_cache
    assert some.sizing.resolved.hicache_storage_backend == "file"


def test_what_does_not_go_together_is_refused() -> None:
    sizing = report_sizing()
    with pytest.raises(ConfigError, match="--disk-sizes needs a host tier"):
        points_of(changed(sizing, enable_hierarchical_cache=False), COUNT, grid_of({"--disk-sizes": "1"}))
    with pytest.raises(ConfigError, match="--disk-sizes contradicts --hicache-storage-size"):
        points_of(report_sizing(*DISK, "--hicache-storage-size", "5"), COUNT, grid_of({"--disk-sizes": "1"}))


def test_a_points_key_has_the_speed_of_its_disk() -> None:
    (point,) = points_of(report_sizing(), COUNT, grid_of({"--disk-sizes": "64"}))
    slow = DiskLink(read_bytes_per_s=1.0, write_bytes_per_s=1.0, latency_s=0.0)
    keys = {point_key(point, trace="t", calibration=Calibration(), disk=link) for link in (USUAL, slow)}
    assert len(keys) == 2


@pytest.mark.parametrize("flag", ["disk_read_gb_s", "disk_write_gb_s", "disk_latency_ms"])
def test_a_speed_that_would_do_nothing_is_refused(flag) -> None:
    options = ReplayOptions(**{flag: 0.5})
    name = "--" + flag.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{name} does nothing without a disk tier"):
        disk_link(options, has_disk=False, timed=True)
    with pytest.raises(ConfigError, match=f"{name} does nothing with --arrival count"):
        disk_link(options, has_disk=True, timed=False)
    link = disk_link(options, has_disk=True, timed=True)
    assert 0.5 * 10**9 in (link.read_bytes_per_s, link.write_bytes_per_s) or link.latency_s == 0.0005


def test_a_pasted_line_needs_no_folder_and_its_disk_is_honoured(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Path(__file__).parents[2] / "golden" / "replay_trace.jsonl"
    line = "sglang serve --model-path Qwen/Qwen3.5-35B-A3B --enable-hierarchical-cache --hicache-storage-backend file"
    line += " --hicache-storage-prefetch-policy wait_complete"
    argv = ["replay", str(recorded), "--gpu", "H200", "--no-bounds", "--disk-latency-ms", "2", "--", *line.split()]
    assert run_verb(argv) == 0
    assert (
        "disk tier: 10.00 GB, empty at the start; reads 2 GB/s, writes 1 GB/s, 2 ms a file; wait_complete"
        in capsys.readouterr().out
    )

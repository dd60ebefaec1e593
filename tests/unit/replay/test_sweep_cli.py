"""`twinpool replay sweep` from words to exit code: reports, files, resuming, Ctrl-C."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replay.sweep_worlds import CLOSED, MACHINE, shared, sizing
from twinpool.cli.main import run as twinpool
from twinpool.clock import VirtualClock
from twinpool.errors import ConfigError
from twinpool.replay import sweep_cli
from twinpool.replay.spread import Finished, Shared, run_point
from twinpool.replay.sweep import Point, Row, grid_of, points_of
from twinpool.replay.sweep_cli import Progress, SpreadOptions, run, run_points

TRACE = str(Path(__file__).parents[2] / "data" / "traces" / "mooncake.jsonl")
AXIS = ["--slots", "16,40", "--workers", "1"]


def words(*more: str) -> list[str]:
    return [TRACE, *MACHINE, *AXIS, *more]


def test_a_sweep_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    assert twinpool(["replay", "sweep", *words("--html", str(page))]) == 0
    said = capsys.readouterr()
    assert "2 points run, 0 refused" in said.out
    assert "--max-mamba-cache-size" in said.out
    assert said.err.splitlines()[0].startswith("1/2 slots 16: ")
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_same_words_same_bytes_however_many_workers(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for workers in ("1", "2"):
        assert run([TRACE, *MACHINE, "--slots", "16,20,40,4000", "--workers", workers, "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    document = json.loads(texts[0])
    assert [one["values"]["slots"] for one in document["points"]] == [16, 20, 40, 4000]
    assert document["points"][3]["measured"] is None
    assert document["points"][3]["refusal"]


def test_a_sweep_whose_every_point_is_refused_exits_as_a_refused_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([TRACE, *MACHINE, "--slots", "3900,4000"]) == 3
    assert "0 points run, 2 refused" in capsys.readouterr().out


def test_flags_of_a_tier_that_is_an_axis_do_something(capsys: pytest.CaptureFixture[str]) -> None:
    policy = ["--hicache-write-policy", "write_back", "--no-bounds"]
    with pytest.raises(ConfigError, match="--hicache-write-policy does nothing without --enable-hierarchical-cache"):
        run(words(*policy))
    assert run(words(*policy, "--host-sizes", "0,1")) == 0
    assert "4 points run, 0 refused" in capsys.readouterr().out
    prefetch = [*policy, "--hicache-storage-prefetch-policy", "best_effort", "--host-sizes", "1"]
    with pytest.raises(ConfigError, match="does nothing without --hicache-storage-backend file"):
        run(words(*prefetch))
    assert run(words(*prefetch, "--disk-sizes", "0,1")) == 0


def test_finished_points_are_not_run_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "points.jsonl"
    assert run(words("--out", str(out), "--json")) == 0
    first = capsys.readouterr().out
    out.write_text(out.read_text()[:-40])  # the second line is torn
    ran: list[Point] = []
    monkeypatch.setattr(
        "twinpool.replay.spread.run_point", lambda held, point: (ran.append(point), run_point(held, point))[1]
    )
    assert run(words("--out", str(out), "--json")) == 0
    said = capsys.readouterr()
    assert said.out == first
    assert [dict(point.values)["slots"] for point in ran] == [40]
    assert "1 points are finished already, 1 are left; 1 unreadable lines in it are ignored." in said.err
    assert run(words("--out", str(out), "--json")) == 0
    assert capsys.readouterr().out == first
    assert len(ran) == 1


def test_ctrl_c_keeps_and_reports_what_is_finished(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(held: Shared, points: Mapping[int, Point], **_: Any) -> Iterator[Finished]:
        yield 0, run_point(held, points[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_cli, "spread", interrupted)
    out = tmp_path / "points.jsonl"
    assert run(words("--out", str(out))) == 130
    said = capsys.readouterr()
    assert "1 points run, 0 refused, 1 not run" in said.out
    assert f"Interrupted with 1 of 2 points not run; the same command goes on from {out}." in said.err
    assert len(out.read_text().splitlines()) == 1
    assert run(words()) == 130
    assert "with --out FILE.jsonl the next run would go on from here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--chrome-trace", "x.json"], "--chrome-trace is of one run"),
        (["--ray", "auto"], "--workers contradicts --ray"),
        (["--page-sizes", "1,16"], "--page-sizes contradicts --page-size"),
        (["--html", "/nowhere/at/all.html"], "--html /nowhere/at/all.html cannot be written"),
    ],
)
def test_bad_words(more: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(words(*more))


def test_help_lists_axes_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--slots VALUES", "--out FILE.jsonl", "--sessions N", "--gpu NAME", "--page-size"):
        assert flag in text


def test_a_run_without_points_left_says_so() -> None:
    stream = io.StringIO()
    points = points_of(sizing(), CLOSED, grid_of({"--slots": "4000,5000"}))
    rows, interrupted = run_points(shared(), points, SpreadOptions(workers=1), stream=stream)
    assert (stream.getvalue(), interrupted) == ("", False)
    assert all(row.refusal for row in rows)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal() -> None:
    clock, stream = VirtualClock(), _Terminal()
    (point,) = points_of(sizing(), CLOSED, grid_of({"--slots": "20"}))
    bar = Progress(4, stream=stream, clock=clock)
    clock.advance(10)
    bar.finished(Row(point=point, refusal="no"))
    bar.end()
    assert stream.getvalue() == "\r\x1b[K[######..................] 1/4, 30 s left. slots 20: refused\n"


def test_a_trace_of_lengths_alone_has_no_reuse_to_collapse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    azure, page = str(Path(TRACE).with_name("azure.csv")), tmp_path / "page.html"
    assert run([azure, *MACHINE, *AXIS, "--html", str(page)]) == 0
    said = capsys.readouterr()
    assert "Reuse is unknown: the trace has lengths only." in said.out
    assert "% reuse" not in said.out + said.err
    assert "collapses" not in said.out + page.read_text()
    assert run([azure, *MACHINE, *AXIS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["reuse_known"], document["lines"]) == (False, [])


def test_records_left_out_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(Path(TRACE).read_text() + "{}\n")
    lines = len(trace.read_text().splitlines())
    assert run([str(trace), *MACHINE, *AXIS]) == 0
    assert f"Records left out: 1; the first is t.jsonl:{lines}: " in capsys.readouterr().out

"""Axes, values, points and their sizes; what is chosen; lines on disk."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.unit.replay.sweep_worlds import CLOSED, MEASURED, measured, sizing, trace
from twinpool.config.field import options_of
from twinpool.errors import ConfigError
from twinpool.replay.cost import Calibration
from twinpool.replay.sweep import AXES, Axis, Point, Row, Sweep, grid_of, main_axis, points_of, values_of
from twinpool.replay.sweep_choice import choice_of, lines_of
from twinpool.replay.sweep_cli import AxisOptions
from twinpool.replay.sweep_report import sweep_json, sweep_page, sweep_text
from twinpool.replay.sweep_store import append, fingerprint, open_for_more, point_key, read_finished


def axis(name: str) -> Axis:
    return next(one for one in AXES if one.name == name)


def test_every_axis_has_its_flag_and_its_single_option() -> None:
    assert {one.flag for one in AXES} == {option.name for option in options_of(AxisOptions)}
    assert axis("slots").option.name == "--max-mamba-cache-size"
    assert axis("sessions_alive").option.name == "--sessions"
    assert [one.name for one in AXES if not one.numeric] == ["strategy", "write_policy"]


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("slots", "80,120,80", (80, 120)),
        ("slots", "100:1600:5", (100, 200, 400, 800, 1600)),
        ("slots", "2:4:9", (2, 3, 4)),
        ("ratio", "0.1:10:3", (0.1, 1.0, 10.0)),
        ("strategy", "extra_buffer, no_buffer", ("extra_buffer", "no_buffer")),
        ("path_cap", "1,unlimited", (1, -1)),
        ("chunk_size", "unlimited,2048", (-1, 2048)),
        ("host_size", "0,32", (0.0, 32.0)),
        ("host_split", "auto,0.25", ("auto", 0.25)),
        ("write_policy", "write_back", ("write_back",)),
    ],
)
def test_values(name: str, text: str, values: tuple[object, ...]) -> None:
    assert values_of(axis(name), text) == values


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("slots", "80:40:3", "--slots 80:40:3 is no range"),
        ("slots", "80:400", "is no range"),
        ("slots", "80:400:1", "is no range"),
        ("slots", "80:inf:3", "is no range"),
        ("slots", "80:400:100000000", "is no range"),
        ("strategy", "a:b:3", "--strategies a:b:3 is no range"),
        ("slots", "80,x", "--slots: 'x' is not an integer"),
        ("strategy", "no_buffer,often", "often is not one of"),
        ("strategy", "no_buffer,", "is empty"),
        ("path_cap", "-1", "write unlimited"),
        ("page_size", "0", "--page-sizes must be"),
    ],
)
def test_bad_values(name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        values_of(axis(name), text)


def test_grids_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="Nothing is varied: give at least one of --slots, --ratio"):
        grid_of({"--slots": None})
    with pytest.raises(ConfigError, match="--slots contradicts --ratio"):
        grid_of({"--slots": "8", "--ratio": "0.5"})
    with pytest.raises(ConfigError, match="has 10,000 points"):
        grid_of({"--slots": ",".join(map(str, range(1, 101))), "--page-sizes": ",".join(map(str, range(1, 101)))})


def test_the_axis_of_plots() -> None:
    assert main_axis(grid_of({"--page-sizes": "1,16", "--sessions-alive": "4,8"})) is axis("sessions_alive")
    assert main_axis(grid_of({"--slots": "80", "--chunk-sizes": "1024,2048"})) is axis("chunk_size")
    assert main_axis(grid_of({"--strategies": "no_buffer,extra_buffer"})) is None


def test_points_are_sized_at_fixed_memory_and_refused_with_a_sentence() -> None:
    grid = grid_of({"--slots": "20,40,4000", "--strategies": "extra_buffer,no_buffer"})
    points = points_of(sizing(), CLOSED, grid)
    assert [dict(point.values) for point in points[:2]] == [
        {"slots": 20, "strategy": "extra_buffer"},
        {"slots": 20, "strategy": "no_buffer"},
    ]
    ran = [point for point in points if point.sizing is not None]
    assert [dict(point.values)["slots"] for point in ran] == [20, 40]
    assert [point.bounded for point in ran] == [True, False]
    few, many = (point.sizing.ledger for point in ran if point.sizing is not None)
    assert few is not None
    assert many is not None
    slot_bytes = ran[0].sizing.request.stage_slot_bytes + ran[0].sizing.request.stage_extra_bytes  # type: ignore[union-attr]
    token_bytes = ran[0].sizing.request.kv_bytes_per_token  # type: ignore[union-attr]
    moved = (few.kv_tokens - many.kv_tokens) * token_bytes - 20 * slot_bytes
    assert abs(moved) <= 16 * token_bytes  # what slots take KV gives, but for a page
    refused = {dict(point.values)["strategy"]: point.refusal for point in points if point.sizing is None}
    assert "page_size=1" in refused["no_buffer"]
    assert refused["extra_buffer"]


def test_axes_that_contradict_single_flags() -> None:
    with pytest.raises(ConfigError, match="--page-sizes contradicts --page-size"):
        points_of(sizing(), CLOSED, grid_of({"--page-sizes": "1,16"}))
    with pytest.raises(ConfigError, match="--ratio does nothing beside --max-mamba-cache-size"):
        points_of(sizing("--max-mamba-cache-size", "20"), CLOSED, grid_of({"--ratio": "0.1,0.5"}))
    with pytest.raises(ConfigError, match="--sessions-alive is for a closed loop"):
        points_of(sizing(), replace(CLOSED, arrival="recorded"), grid_of({"--sessions-alive": "1,2"}))


def test_sessions_alive_are_set_in_the_traffic() -> None:
    base = sizing()
    points = points_of(base, CLOSED, grid_of({"--sessions-alive": "4,8"}))
    assert [point.traffic.sessions for point in points] == [4, 8]
    assert all(point.sizing is base and point.bounded for point in points)


def sweep_of(shares: dict[int, float], **values: object) -> Sweep:
    grid = grid_of({"--slots": ",".join(map(str, shares))})
    rows = tuple(
        Row(point=point, measured=measured(share, **values))
        for point, share in zip(points_of(sizing(), CLOSED, grid), shares.values(), strict=True)
    )
    return Sweep(
        trace="made", model="Qwen3.5-9B", machine="1 × H100", arrival="closed", calibration="assumed", over=main_axis(grid),
        rows=rows, notes=("A note.",), pool_bytes=3 << 30,
    )  # fmt: skip


def test_the_choice_is_the_best_reuse_then_the_widest_margin() -> None:
    choice = choice_of(sweep_of({10: 0.3, 20: 0.898, 30: 0.9, 40: 0.899, 50: 0.4}))
    assert choice is not None
    assert (choice.x, choice.below, choice.above) == (30, 10, 10)


def test_among_equals_the_first_token_decides() -> None:
    sweep = sweep_of({10: 0.9, 20: 0.9, 30: 0.9})
    quick = replace(sweep.rows[2], measured=measured(0.9, ttft_p50_s=0.1))
    choice = choice_of(replace(sweep, rows=(*sweep.rows[:2], quick)))
    assert choice is not None
    assert (choice.x, choice.below, choice.above) == (30, None, None)


def test_lines_are_told_apart_by_the_other_axes() -> None:
    grid = grid_of({"--slots": "20,40", "--track-intervals": "128,256"})
    rows = tuple(Row(point=point, measured=MEASURED) for point in points_of(sizing(), CLOSED, grid))
    lines = lines_of(replace(sweep_of({20: 0.5, 40: 0.5}), rows=rows))
    assert [(dict(line.others), line.xs) for line in lines] == [
        ({"track_interval": 128}, (20.0, 40.0)),
        ({"track_interval": 256}, (20.0, 40.0)),
    ]


def test_text_names_cliff_margin_and_flags() -> None:
    text = sweep_text(sweep_of({10: 0.3, 20: 0.9, 30: 0.9, 40: 0.9}, infinite_token_share=0.95))
    assert "Reuse collapses below slots 20, the last with 95% of the best (90.0% at 20)" in text
    assert "from 90.0% at 20 to 30.0% at 10; what runs out is state slots." in text
    assert "An infinite cache would reuse 95.0%." in text
    assert (
        "Recommended: slots 40, with 90.0% reuse; margin: 20 slots (50%) to the edge below, no cliff above in this sweep."
        in text
    )
    assert "--max-mamba-cache-size 40" in text
    assert "--mem-fraction-static 1" not in text
    assert "leaves the pools 3.00 GiB" in text
    assert "A note." in text


def test_memory_that_is_too_small_is_called_so() -> None:
    text = sweep_text(sweep_of({10: 0.1, 20: 0.2}, infinite_token_share=0.95))
    assert "No point comes near: 20.0% at best, so this memory is too small for these sessions." in text
    assert "No point" not in sweep_text(sweep_of({10: 0.3, 20: 0.8}, infinite_token_share=0.95))


def test_counts_alone_show_no_times() -> None:
    text = sweep_text(replace(sweep_of({10: 0.3, 20: 0.9}), arrival="count"))
    assert "TTFT" not in text
    assert "reuse" in text


def test_a_sweep_without_a_number_to_vary_has_a_table_and_a_choice() -> None:
    sweep = sweep_of({10: 0.3, 20: 0.9})
    text = sweep_text(replace(sweep, over=None))
    assert "Recommended: slots 20, with 90.0% reuse." in text
    assert "collapses" not in text
    nothing = replace(sweep, rows=tuple(Row(point=row.point) for row in sweep.rows))
    assert "No point has run." in sweep_text(nothing)
    assert "2 not run" in sweep_text(nothing)
    assert json.loads(sweep_json(nothing))["recommended"] is None
    assert "<html" in sweep_page(nothing)


def test_the_document() -> None:
    sweep = sweep_of({10: 0.3, 20: 0.9})
    document = json.loads(sweep_json(sweep))
    assert document["schema"] == "twinpool-replay-sweep/1"
    assert document["over"] == "slots"
    assert document["points"][0]["measured"]["gaps"]["state_evicted"] == 0.1
    assert set(document["points"][0]["measured"]) == {field.name for field in fields(MEASURED)}
    assert document["lines"][0]["shape"]["below"]["pool"] == "states"
    assert document["recommended"]["values"] == {"slots": 20}
    assert sweep_json(sweep) == sweep_json(sweep_of({10: 0.3, 20: 0.9}))


def test_the_page_has_plots_and_no_script() -> None:
    page = sweep_page(sweep_of({10: 0.3, 20: 0.9}))
    assert page.count("<figure") == 3
    assert "<script" not in page
    assert "Refused" not in page


def point(slots: int = 20) -> Point:
    return points_of(sizing(), CLOSED, grid_of({"--slots": str(slots)}))[0]


def test_keys_depend_on_everything_and_on_nothing_else() -> None:
    kept = {"trace": fingerprint(trace()), "calibration": Calibration()}
    key = point_key(point(), **kept)  # type: ignore[arg-type]
    assert point_key(point(), trace=fingerprint(trace()), calibration=Calibration()) == key
    others = (
        point_key(point(21), **kept),  # type: ignore[arg-type]
        point_key(replace(point(), traffic=replace(CLOSED, seed=1)), **kept),  # type: ignore[arg-type]
        point_key(point(), trace="other", calibration=Calibration()),
        point_key(point(), trace=str(kept["trace"]), calibration=Calibration(step_s=0.1)),
    )
    assert len({key, *others}) == 5


def test_fingerprints_see_lengths_and_blocks() -> None:
    first = trace()
    session = first.sessions[0]
    request = session.requests[0]
    longer = replace(
        session, requests=(replace(request, output_tokens=request.output_tokens + 1), *session.requests[1:])
    )
    other = replace(session, requests=(replace(request, blocks=request.blocks + 1), *session.requests[1:]))
    found = {fingerprint(replace(first, sessions=(one, *first.sessions[1:]))) for one in (session, longer, other)}
    assert len(found) == 3
    assert fingerprint(replace(first, name="elsewhere.jsonl.gz")) == fingerprint(first)


def test_lines_come_back_and_torn_ones_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    assert not read_finished(path).measured
    with open_for_more(path) as file:
        append(file, "a", point(), MEASURED)
        append(file, "b", point(), MEASURED)
    path.write_text(path.read_text()[:-100])  # killed while writing
    stored = read_finished(path)
    assert (dict(stored.measured), stored.torn) == ({"a": MEASURED}, 1)
    with open_for_more(path) as file:
        append(file, "c", point(), MEASURED)
    stored = read_finished(path)
    assert (set(stored.measured), stored.torn) == ({"a", "c"}, 1)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not ours\n")
    with pytest.raises(ConfigError, match="holds something else"):
        read_finished(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        open_for_more(tmp_path / "missing" / "points.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_finished(tmp_path)

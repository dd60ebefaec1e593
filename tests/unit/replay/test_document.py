"""--json of a replay: its keys are those that docs/replay.md names, and what is unknown is null."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.unit.replay.outcomes import BOUNDS, DISK, HOST, outcome
from twinpool.replay.document import replay_json

ROOT = Path(__file__).resolve().parents[3]
SPREADS = ("queue_s", "ttft_s", "tpot_s", "e2e_s")


def keys(value: object, path: str) -> Iterator[str]:
    """Dotted names of every key; a list counts by its first object, percentiles as times.*, reasons not at all."""
    if isinstance(value, list):
        yield from keys(value[0], path) if value else ()
    if isinstance(value, dict):
        for name, part in value.items():
            yield f"{path}{name}"
            if name not in ("gaps", "evictions"):
                yield from keys(part, "times.*." if name in SPREADS else f"{path}{name}.")


def documented() -> Iterator[str]:
    """Names in the first column of the tables under "JSON" of docs/replay.md, below the key in each table's heading."""
    page = (ROOT / "docs" / "replay.md").read_text().split("\n## JSON\n")[1]
    for part in page.split("\n### `")[1:]:
        heading = part.partition("`")[0]
        prefix = "" if heading == "twinpool-replay/1" else f"{heading}."
        for line in part.splitlines():
            if line.startswith("| `"):
                yield from (prefix + name.strip(" `") for name in line.split("|")[1].split(","))


def test_every_key_is_documented() -> None:
    made = outcome(rejected=1)
    found = replace(made, bounds=BOUNDS, result=replace(made.result, host=HOST, disk=DISK))
    assert sorted(documented()) == sorted({*keys(json.loads(replay_json(found, records=True)), "")})


def test_what_is_unknown_is_null() -> None:
    plain = json.loads(replay_json(outcome()))
    assert plain["schema"] == "twinpool-replay/1"
    assert plain["bounds"] is None
    assert plain["records"] is None
    assert plain["times"]["tpot_s"] is None
    assert json.loads(replay_json(outcome(arrival="count")))["times"] is None
    assert json.loads(replay_json(outcome(lengths_only=True)))["reuse"] is None


def test_numbers_and_columns() -> None:
    found = json.loads(replay_json(outcome(rejected=6), records=True))
    assert found["reuse"]["gaps"] == {
        "state_evicted": 128, "no_checkpoint": 0, "below_grid": 0, "kv_evicted": 64, "new": 552
    }  # fmt: skip
    assert found["recomputed"] == {
        "tokens": 448, "state_evicted_tokens": 128, "kv_evicted_tokens": 64, "forgotten_tokens": 0, "retracted_tokens": 256,
        "restore_failed_tokens": 0,
    }  # fmt: skip
    assert found["samples"]["now_s"] == [0.0, 5.0, 10.0]
    assert found["samples"]["slots_held"] == [3, 5, 0]
    assert {len(column) for column in found["samples"].values()} == {3}
    assert (found["trace"]["rejected"], len(found["trace"]["rejections"])) == (6, 6)
    assert found["records"][1]["gaps"] == {"state_evicted": 128, "new": 116}
    assert found["pressure"]["pool"] == "states"
    assert found["traffic"]["arrival"] == "recorded"
    assert "html" not in found["traffic"]


def test_same_run_same_bytes() -> None:
    assert replay_json(outcome(), records=True) == replay_json(outcome(), records=True)

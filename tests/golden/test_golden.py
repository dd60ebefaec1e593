"""Output to the letter. Refresh after a deliberate change: `python -m tests.golden.update`."""

from __future__ import annotations

import difflib

import pytest

from tests.golden.cases import CASES, HERE, output


@pytest.mark.parametrize("name", CASES)
def test_output(name: str) -> None:
    kept, printed = (HERE / name).read_text().splitlines(), output(CASES[name]).splitlines()
    diff = list(difflib.unified_diff(kept, printed, name, "printed now", lineterm="", n=1))
    assert not diff, "\n".join(diff) + "\nIf this was meant: python -m tests.golden.update"


def test_every_file_is_a_case() -> None:
    kept = {path.name for path in HERE.iterdir() if path.suffix in {".txt", ".json"}}
    assert kept == {*CASES, "boot_log.txt"}

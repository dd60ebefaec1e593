"""Generated pages and the files of ARCHITECTURE.md are what the code says; `make docs` writes them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("docs")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_pages_match_the_code(docs: ModuleType) -> None:
    assert docs.drifted(ROOT) == []


def test_drift_is_seen(docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name, page in docs.PAGES.items():
        (tmp_path / name).write_text(page())
    assert docs.drifted(tmp_path) == []
    flags = tmp_path / "docs" / "flags.md"
    flags.write_text(flags.read_text().replace("30000", "30001"))
    (tmp_path / "docs" / "errors.md").unlink()
    assert docs.drifted(tmp_path) == ["docs/flags.md", "docs/errors.md"]


def test_a_key_of_a_plan_without_meaning_is_seen(docs: ModuleType) -> None:
    compare = docs.docs_plan_json._compare
    schema = {"fit": {"running": ["integer", ""], "idle": ["integer or null", ""]}, "plan": {"fit": ["fit", ""]}}

    def problems(value: object) -> list[str]:
        return [f"{path}: {problem}" for path, _, problem in compare(value, "plan", schema, path="plan") if problem]

    assert problems({"fit": {"running": 1, "idle": None}}) == []
    assert problems({"fit": {"running": 1, "idle": 2, "new": 3}}) == ["plan.fit.new: not in [fit]"]
    assert problems({"fit": {"running": 1.5}}) == [
        "plan.fit.idle: in [fit] and not printed", "plan.fit.running: 1.5 is not integer",
    ]  # fmt: skip
    assert problems({"fit": None}) == ["plan.fit: not an object (fit)"]


def test_a_file_that_says_nothing_is_seen(docs: ModuleType, tmp_path: Path) -> None:
    files = docs.docs_files
    (tmp_path / "a.py").write_text('"""Sums (reference 1.9, e.g. both). More is said here."""\n')
    (tmp_path / "b.toml").write_text("# Rows of\n# numbers.\nx = 1\n")
    (tmp_path / "c.cpp").write_text('#include <vector>\n#include "c.h"\n')
    (tmp_path / "d.py").write_text("x = 1\n")
    said = [files.first_sentence(tmp_path / name) for name in ("a.py", "b.toml", "c.cpp")]
    assert said == ["Sums (reference 1.9, e.g. both).", "Rows of numbers.", "Declared in `c.h`."]
    with pytest.raises(ValueError, match="does not say what it is"):
        files.first_sentence(tmp_path / "d.py")
    with pytest.raises(ValueError, match="no folder"):
        files._folder(Path("elsewhere/e.py"))


@pytest.mark.parametrize("name", ["README.md", "docs/plan.md"])
def test_output_in_documents_is_real(name: str) -> None:
    """Every line of a ```text block is a line of a golden file."""
    golden = {line for path in (ROOT / "tests" / "golden").glob("*.txt") for line in path.read_text().splitlines()}
    blocks = (ROOT / name).read_text().split("```text\n")[1:]
    assert blocks
    assert [line for block in blocks for line in block.split("```")[0].splitlines() if line not in golden] == []


def test_links_between_the_documents_exist() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        for part in path.read_text().split("](")[1:]:
            target = part.partition(")")[0].partition("#")[0]
            if target and not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_tests_of_user_reports_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "user-reports.md").read_text())
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}" in (ROOT / file).read_text(), f"{file}::{test}"

"""docs/flags.md, docs/errors.md and docs/metrics.md are what the code says; `make docs` writes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    found = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_pages_match_the_code(docs: ModuleType) -> None:
    assert docs.drifted(ROOT / "docs") == []


def test_drift_is_seen(docs: ModuleType, tmp_path: Path) -> None:
    for name, page in docs.PAGES.items():
        (tmp_path / name).write_text(page())
    assert docs.drifted(tmp_path) == []
    (tmp_path / "flags.md").write_text((tmp_path / "flags.md").read_text().replace("30000", "30001"))
    (tmp_path / "errors.md").unlink()
    assert docs.drifted(tmp_path) == ["flags.md", "errors.md"]

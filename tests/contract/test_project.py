"""Things that drift: the changelog and the version, the public names, the README's commands and links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import twinpool

ROOT = Path(__file__).resolve().parents[2]


def test_the_changelog_names_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]


def test_public_names() -> None:
    assert len(set(twinpool.__all__)) == len(twinpool.__all__)
    for name in ("LLM", "SamplingParams"):
        assert name in twinpool.__all__
    for name in twinpool.__all__:
        assert getattr(twinpool, name) is not None


def test_readme_targets_and_links_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / link).exists(), link


def test_nothing_names_a_machine() -> None:
    """No absolute path of somebody's machine in what is shipped."""
    for folder in ("src", "docs", "examples", "bench", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md", ".toml", ".cpp", ".h", ".json"}:
                text = path.read_text()
                assert "/work/" not in text, path
                assert "/root/" not in text, path

"""The size budget: files of at most 400 lines, functions of at most 60, every source file named in ARCHITECTURE.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    p for p in (ROOT / "src").rglob("*") if p.suffix in {".py", ".cpp", ".h"} and ".egg-info" not in str(p)
)
PYTHON = [p for folder in ("src", "tools", "bench", "examples") for p in (ROOT / folder).rglob("*.py")]


def test_files_are_short() -> None:
    long = {str(p.relative_to(ROOT)): n for p in {*SOURCES, *PYTHON} if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_functions_are_short() -> None:
    long = []
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert not long


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public functions and classes of a module or class; what is nested in a function is nobody's interface."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def test_public_functions_have_docstrings() -> None:
    bare = []
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        if path.name != "__init__.py" and ast.get_docstring(tree) is None:
            bare.append(str(path.relative_to(ROOT)))
        bare += [
            f"{path.relative_to(ROOT)}:{n.lineno} {n.name}" for n in public(tree.body) if ast.get_docstring(n) is None
        ]
    assert not bare


def test_architecture_names_every_source_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [
        str(p.relative_to(ROOT)) for p in SOURCES if p.name != "__init__.py" and f"`{p.relative_to(ROOT)}`" not in text
    ]
    assert not missing
    named = {word for word in text.split("`") if word.startswith("src/") and "." in word.rsplit("/", 1)[-1]}
    assert not [name for name in named if not (ROOT / name).exists()]

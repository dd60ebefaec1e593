"""The core is torch-free, clock-free and server-free: importing all of it with those modules blocked must work (DESIGN)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src" / "twinpool"
CORE = sorted(
    path
    for pattern in (
        "errors.py", "units.py", "request.py", "step.py", "loop.py", "metrics.py", "bootlog.py",
        "config/*.py", "memory/*.py", "prefix/*.py", "sched/*.py", "models/spec.py", "models/registry.py", "models/*/spec.py",
    )
    for path in SRC.glob(pattern)
)  # fmt: skip
FORBIDDEN = {"torch", "time", "os", "transformers", "fastapi", "uvicorn", "prometheus_client"}
# Later stages may import earlier ones, never the other way round.
NEVER = {
    "memory": {"prefix.tree", "sched", "loop", "engine", "server"},
    "prefix": {"sched", "loop", "engine", "server"},
    "sched": {"loop", "engine", "server", "config"},
    "engine": {"server", "cli"},
    "models": {"memory", "prefix", "sched", "engine", "server"},
}


def module_name(path: Path) -> str:
    relative = path.relative_to(SRC.parent).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_core_module_names_no_forbidden_import(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & FORBIDDEN


def test_core_imports_with_torch_blocked() -> None:
    modules = ",".join(repr(module_name(path)) for path in CORE)
    code = (
        "import sys, importlib\n"
        "for name in ('torch', 'transformers', 'fastapi', 'uvicorn'): sys.modules[name] = None\n"
        f"for name in [{modules}]: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", sorted(NEVER))
def test_imports_go_one_way(package: str) -> None:
    for path in (SRC / package).rglob("*.py"):
        for name in imports_of(path):
            for banned in NEVER[package]:
                assert not f"{name}.".startswith(f"twinpool.{banned}."), f"{path.name} imports {name}"

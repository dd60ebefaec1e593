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
        "tables.py", "plan/*.py", "replay/*.py", "replay/formats/*.py", "reports/*.py",
    )
    for path in SRC.glob(pattern)
)  # fmt: skip
FORBIDDEN = {"torch", "time", "os", "transformers", "fastapi", "uvicorn", "prometheus_client"}
# Later stages may import earlier ones, never the other way round.
NEVER = {
    "memory": {"prefix.tree", "sched", "loop", "engine", "server"},
    "prefix": {"sched", "loop", "engine", "server"},
    "sched": {"loop", "engine", "server", "config"},
    "storage": {
        "config",
        "memory",
        "prefix",
        "sched",
        "loop",
        "step",
        "models",
        "engine",
        "server",
        "plan",
        "replay",
        "reports",
        "cli",
    },
    "engine": {"server", "cli", "plan"},
    "server": {"cli", "plan"},
    "models": {"memory", "prefix", "sched", "engine", "server", "plan"},
    "config": {"memory", "prefix.tree", "sched", "loop", "engine", "server", "plan", "replay", "reports", "cli"},
    "plan": {"prefix", "sched", "loop", "engine", "server", "cli", "request", "step"},
    "replay": {"engine", "server", "cli"},
    "reports": {"plan", "replay", "memory", "models", "config", "engine", "server", "cli"},
}
# Reading recorded workloads needs no core: only what replays them does.
READERS = ("formats", "describe.py", "files.py", "reuse.py", "synthetic.py", "trace.py")
NEVER |= {
    f"replay/{name}": NEVER["replay"] | {"plan", "memory", "prefix", "sched", "loop", "models"} for name in READERS
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


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "Qwen3.5-9B", "--gpu", "H100", "--running", "8", "--tokens-per-request", "1000", "--json"],
        ["plan", "sweep", "Qwen3.5-9B", "--gpu", "H100", "--running", "8", "--tokens-per-request", "1000"],
        ["plan", "Qwen3.5-9B", "--gpu", "H100", "--engine", "vllm"],
        ["trace", "info", str(Path(__file__).parents[1] / "data" / "traces" / "mooncake.jsonl")],
    ],
    ids=" ".join,
)
def test_verbs_run_with_torch_blocked(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'fastapi', 'uvicorn', 'huggingface_hub'): sys.modules[name] = None\n"
        f"from twinpool.cli.main import run\nsys.exit(run({argv!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("package", sorted(NEVER))
def test_imports_go_one_way(package: str) -> None:
    part = SRC / package
    for path in part.rglob("*.py") if part.is_dir() else [part]:
        for name in imports_of(path):
            for banned in NEVER[package]:
                assert not f"{name}.".startswith(f"twinpool.{banned}."), f"{path.name} imports {name}"

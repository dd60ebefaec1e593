"""The "Files" part of ARCHITECTURE.md: one line a file, from the first sentence of the file's own docstring or comment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

BEGIN = "<!-- files: written by tools/docs.py (make docs) from the first sentence of each file -->"
END = "<!-- end of files -->"

# Folder: its heading. A folder below one of these belongs to it; one that is below none is an error.
FOLDERS = {
    "src/twinpool": "Core, one concept a file",
    "src/twinpool/config": "config/: what a user may set",
    "src/twinpool/memory": "memory/: bytes, ids, ownership",
    "src/twinpool/prefix": "prefix/: the hybrid radix cache",
    "src/twinpool/sched": "sched/: continuous batching",
    "src/twinpool/storage": "storage/: a folder below the host tier",
    "src/twinpool/models": "models/: what a model keeps, and running it",
    "src/twinpool/engine": "engine/: PyTorch execution",
    "src/twinpool/server": "server/: the OpenAI door",
    "src/twinpool/plan": "plan/: sizing without a device",
    "src/twinpool/replay": "replay/: recorded workloads",
    "src/twinpool/reports": "reports/: charts, pages, JSON",
    "src/twinpool/cli": "cli/: thin",
    "src/native": "native/: compiled kernels (module `twinpool._native`)",
    "tools": "tools/: generated documents, and the demo model",
    "bench": "bench/: speed as ratios, side by side in one run",
    "examples": "examples/: runnable, and run by the tests",
}
_SUFFIXES = {".py", ".toml", ".cpp", ".h"}
_SENTENCE = re.compile(r"(?<![0-9]\.)(?<=[.!?])\s+(?=[A-Z`\[(])")


def files_part(root: Path) -> str:
    """The lines between BEGIN and END, both included. Raises ValueError: a file says nothing or is in no folder above."""
    by_folder: dict[str, list[Path]] = {folder: [] for folder in FOLDERS}
    for path in _sources(root):
        by_folder[_folder(path.relative_to(root))].append(path)
    lines = [BEGIN, ""]
    for folder, heading in FOLDERS.items():
        lines += [f"### {heading}", "", "| file | what |", "|-|-|"]
        lines += [f"| `{path.relative_to(root)}` | {first_sentence(path)} |" for path in by_folder[folder]] + [""]
    return "\n".join([*lines, END])


def architecture_page(root: Path) -> str:
    """ARCHITECTURE.md with its "Files" part written anew; what stands around it is kept."""
    text = (root / "ARCHITECTURE.md").read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{files_part(root)}{after}"


def first_sentence(path: Path) -> str:
    """What a file says it is. Raises ValueError when it says nothing."""
    text = path.read_text()
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        said = _comment(text, "#" if path.suffix == ".toml" else "//")
    if not said and path.suffix == ".cpp":
        headers = re.findall(r'#include "(.+?)"', text)
        said = f"Declared in `{headers[0]}`." if headers else ""
    if not said:
        raise ValueError(f"{path} does not say what it is: give it a first line (a docstring or a comment)")
    paragraph = said.split("\n\n")[0]
    return _SENTENCE.split(" ".join(paragraph.split()))[0].replace("|", "\\|")


def _comment(text: str, mark: str) -> str:
    """The comment that a file begins with, without its marks."""
    lines = []
    for line in text.splitlines():
        if not line.startswith(mark):
            break
        lines.append(line.removeprefix(mark).strip())
    return "\n".join(lines)


def _sources(root: Path) -> Iterator[Path]:
    """Every file that has a line of its own: an __init__.py only when it says something."""
    for folder in ("src", "tools", "bench", "examples"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in _SUFFIXES or ".egg-info" in str(path):
                continue
            if path.name != "__init__.py" or ast.get_docstring(ast.parse(path.read_text())):
                yield path


def _folder(path: Path) -> str:
    for parent in path.parents:
        if str(parent) in FOLDERS:
            return str(parent)
    raise ValueError(f"{path} is in no folder that tools/docs_files.py has a heading for")

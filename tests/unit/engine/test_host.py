"""Memory and cores of the machine, as a container sees them (made-up control groups in a folder)."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from twinpool.engine.host import available_memory_bytes, usable_cores
from twinpool.units import MIB


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with 512 MiB available."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 512 * MIB}))
    return 512 * MIB


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n")
    return root


def test_without_groups_it_is_the_machines(tmp_path: Path, plenty: int) -> None:
    assert available_memory_bytes(root=tmp_path) == plenty


def test_a_v2_limit_counts_and_file_cache_is_room(tmp_path: Path, plenty: int) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": str(90 * MIB),
            "sys/fs/cgroup/a/memory.max": str(100 * MIB),
            "sys/fs/cgroup/a/memory.current": str(90 * MIB),
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {7 * MIB}",
        },
    )
    assert available_memory_bytes(root=root) == 17 * MIB


def test_a_v1_limit_counts_and_no_limit_does_not(tmp_path: Path, plenty: int) -> None:
    files = {
        "proc/self/cgroup": "4:cpu:/x\n3:memory:/docker/77\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(64 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(70 * MIB),
    }
    assert available_memory_bytes(root=write(tmp_path, files)) == 0
    write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)})
    assert available_memory_bytes(root=tmp_path) == plenty


def test_cores_are_at_least_one_and_follow_a_quota(tmp_path: Path) -> None:
    assert usable_cores() >= 1
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"})
    assert usable_cores(root=root) == 1

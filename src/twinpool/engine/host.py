"""What the machine gives a process on the CPU: memory and cores, containers' limits respected."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_ROOT = Path("/")


def available_memory_bytes(*, root: Path = _ROOT) -> int:
    """Bytes this process can still use: what the machine has available, or less where a control group limits it."""
    rooms = [psutil.virtual_memory().available, *_group_rooms(root)]
    return int(max(0, min(rooms)))


def usable_cores(*, root: Path = _ROOT) -> int:
    """Physical cores this process may use, at least 1: affinity and a control group's CPU quota count."""
    allowed = len(os.sched_getaffinity(0))
    logical, physical = psutil.cpu_count(logical=True), psutil.cpu_count(logical=False)
    if logical and physical:
        allowed = min(allowed, max(1, allowed * physical // logical))
    quota = _cpu_quota(root)
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def _groups(root: Path) -> list[tuple[str, Path]]:
    """(version, folder) of every control group this process is in, its ancestors included: each can limit it."""
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return []
    found: list[tuple[str, Path]] = []
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, top = "v2", root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            version, top = "v1", root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = top / path.lstrip("/")
        # Inside a container the path may be the host's and not exist here; the top is then the container's own group.
        while folder != top:
            found.append((version, folder))
            folder = folder.parent
        found.append((version, top))
    return [(version, folder) for version, folder in found if folder.is_dir()]


def _group_rooms(root: Path) -> list[int]:
    """Limit minus use of every control group that has a limit; file cache that can be dropped is not use."""
    rooms: list[int] = []
    for version, folder in _groups(root):
        names = (
            ("memory.max", "memory.current") if version == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        limit, used = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and used is not None:
            rooms.append(limit - used + _droppable_bytes(folder / "memory.stat"))
    return rooms


def _droppable_bytes(path: Path) -> int:
    """The inactive file cache of a group."""
    if not path.is_file():
        return 0
    stat = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _number(path: Path) -> int | None:
    """The integer in a file, or None: no file, 'max', or a number that stands for no limit."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _cpu_quota(root: Path) -> float | None:
    """Cores that the tightest v2 group grants, or None."""
    grants: list[float] = []
    for version, folder in _groups(root):
        path = folder / "cpu.max"
        if version == "v2" and path.is_file():
            quota, period = path.read_text().split()
            if quota != "max":
                grants.append(int(quota) / int(period))
    return min(grants, default=None)

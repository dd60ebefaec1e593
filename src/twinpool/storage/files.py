"""Files of a folder that are whole or absent: written aside, synced and renamed; read whole; leftovers of dead writers removed.

A writer holds a lock (flock) on the file it writes. The kernel drops the lock when the writer dies, however it dies, so nobody has to
ask which process that was. The folder's own clock (the time of a file made now) tells ages, as a network disk may have another one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twinpool.storage.format import Bytes

_PART_SUFFIX = ".part"
_LEFTOVER_AGE_NS = (
    10 * 60 * 10**9
)  # a file this old and without a lock is not one whose writer has yet to take the lock


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of the folder; used_ns: when it was last written or touched."""

    name: str
    size_bytes: int
    used_ns: int


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless it is there. Raises OSError, before any is made if another kind of file is in the way."""
    missing = list(itertools.takewhile(lambda folder: not _is_folder(folder), (path, *path.parents)))
    for folder in reversed(missing):  # not Path.mkdir's parents, which is one call within another for each of them
        folder.mkdir(exist_ok=True)


def _is_folder(path: Path) -> bool:
    """False: nothing is there. Raises OSError when something else is."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.ENOENT, f"{path} is a link to nothing") from None
        return False
    if not is_folder:
        raise OSError(errno.ENOTDIR, f"{path} is not a folder")
    return True


def free_bytes(folder: Path) -> int | None:
    """What can still be written there; None where the file system does not say. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def write_whole(folder: Path, name: str, parts: Iterable[Bytes]) -> int:
    """Make the file of these parts appear at once, or not at all, even if the machine stops; returns when it was written, in ns.

    Raises OSError.
    """
    handle, part_path = tempfile.mkstemp(dir=folder, suffix=_PART_SUFFIX)
    try:
        with open(handle, "wb") as file:
            _lock(handle)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(handle)
            written_ns = os.fstat(handle).st_mtime_ns
            os.replace(part_path, folder / name)
    except BaseException:
        remove(Path(part_path))
        raise
    _sync_folder(folder)
    return written_ns


def read_whole(path: Path, size_bytes: int) -> memoryview | None:
    """All bytes of a file, or None when they are not as many. Raises OSError, or MemoryError when there is no room for them."""
    with open(path, "rb", opener=_open_at_once) as file:
        if os.fstat(file.fileno()).st_size != size_bytes:
            return None
        data = np.empty(size_bytes, np.uint8).data  # not zeroed, unlike a bytearray
        return data if file.readinto(data) == size_bytes else None


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for the other end of what has become a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def touch(path: Path) -> int:
    """Mark a file as used now; returns when that was, in ns. Raises OSError."""
    os.utime(path)
    return path.stat().st_mtime_ns


def remove(path: Path) -> None:
    """Delete a file if it is there and can be deleted."""
    with contextlib.suppress(OSError):
        path.unlink()


def list_folder(folder: Path) -> list[Listed]:
    """The regular files of a folder. Raises OSError."""
    listed: list[Listed] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another server removed it meanwhile, or this one file is damaged
                if entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    listed.append(Listed(entry.name, found.st_size, found.st_mtime_ns))
    return listed


def remove_leftovers(folder: Path, listed: Iterable[Listed]) -> int:
    """Delete what dead writers left half-written, some minutes old; returns how many. Raises OSError when no file can be made."""
    parts = [found for found in listed if found.name.endswith(_PART_SUFFIX)]
    if not parts:
        return 0
    now_ns = probe(folder)
    # One from the future is of a clock that has been put right since.
    return sum(_remove_leftover(folder / one.name) for one in parts if abs(now_ns - one.used_ns) >= _LEFTOVER_AGE_NS)


def probe(folder: Path) -> int:
    """Make a file and delete it; returns the folder's time in ns. Raises OSError when the folder is not writable."""
    handle, path = tempfile.mkstemp(dir=folder, suffix=_PART_SUFFIX)
    try:
        return os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)
        remove(Path(path))


def _remove_leftover(path: Path) -> bool:
    try:
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:  # its writer lives, or it is gone
        return False
    return True


def _lock(handle: int) -> None:
    """Say that this file has a living writer, where the disk has locks: without them no cleaner gets one either."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """Make a rename last."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

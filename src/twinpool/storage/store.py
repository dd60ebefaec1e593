"""The disk tier: segments of conversations in a folder, bounded in bytes, shared by servers, kept over restarts and kills.

What is taken, evicted and found is the shelf's to say (shelf.py); here are the files.

After the constructor nothing raises for trouble with the disk: it is counted, logged once a kind, and is a miss.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from twinpool.errors import ConfigError
from twinpool.storage import files
from twinpool.storage.backoff import Backoff
from twinpool.storage.format import (
    Segment,
    check_segment,
    decode,
    encode,
    file_bytes,
    file_name,
    parse_name,
    smallest_file_bytes,
)
from twinpool.storage.index import Entry
from twinpool.storage.keys import Fingerprint, SegmentInfo
from twinpool.storage.shelf import Shelf
from twinpool.units import format_bytes

log = logging.getLogger("twinpool.storage")


class DiskStore(Shelf):
    """Segments of one model in a folder that other models and servers may use too. Every method may be called from any thread.

    limit_bytes holds for all segments in the folder, whoever wrote them; two servers may go over it for as long as they have not yet
    seen each other's files (`refresh`).
    """

    def __init__(self, path: Path, *, limit_bytes: int, fingerprint: Fingerprint) -> None:
        """Make the folder, read its listing. Raises ConfigError as `prepare_folder` does, or when the limit is too small."""
        super().__init__(limit_bytes=limit_bytes, fingerprint=fingerprint)
        self.path = path
        self._backoff = Backoff()
        self._said: set[int | None] = set()
        prepare_folder(path, needed_bytes=smallest_file_bytes(fingerprint))
        self.refresh()

    def put(self, segment: Segment) -> bool:
        """Write a segment; False: it is here already, or its parent is not, or there is no room, or the disk is in trouble.

        After a write that failed others are not tried for a while (storage/backoff.py): nothing is evicted for what will not be written.
        """
        check_segment(segment, self.fingerprint)
        info = segment.info
        if not self.begin_put(info):
            return False
        try:
            written_ns = files.write_whole(self.path, file_name(info), encode(segment, self.fingerprint))
        except (OSError, MemoryError) as error:
            self._trouble(error)
            self.end_put(info, written_ns=None)
            with self._lock:
                self._backoff.failed()
            return False
        self.end_put(info, written_ns=written_ns)
        with self._lock:
            self._backoff.worked()
        return True

    def read(self, info: SegmentInfo) -> Segment | None:
        """Read and verify a segment, and mark it used; None when that is not possible.

        A damaged file is removed, and so are the segments that need it. The bytes are the caller's: nothing here changes them.
        """
        path = self.path / file_name(info)
        try:
            data = files.read_whole(path, file_bytes(info, self.fingerprint))
        except FileNotFoundError:
            self._vanished(info)
            return None
        except (OSError, MemoryError) as error:
            self._trouble(error)
            return None
        segment = decode(data, info, self.fingerprint) if data is not None else None
        if segment is None:
            self._damaged(info)
            return None
        self.was_read(info)
        return segment

    def refresh(self) -> None:
        """Look at the folder again: learn what other servers wrote and removed, clean up after dead ones, keep to the limit.

        Takes milliseconds for thousands of files; the writer's thread calls it at intervals.
        """
        with self._lock:
            known = {entry.info.key for entry in self._index}
        try:
            listed = files.list_folder(self.path)
            found, spare = _segments_of(listed)
            self._learn(found, known)
            leftovers = files.remove_leftovers(self.path, listed)
        except (OSError, MemoryError) as error:
            self._trouble(error)
            return
        self._count("leftovers", leftovers)
        with self._lock:
            victims = self._make_room(0, keep=()) or []
        self._remove([*spare, *(entry.info for entry in victims)])

    def _is_paused(self) -> bool:
        """Whether a write failed a short while ago; then this put is counted as not tried."""
        with self._lock:
            pauses = self._backoff.pauses
            self._counts["paused"] += pauses
        return pauses

    def _touch(self, info: SegmentInfo) -> int | None:
        try:
            return files.touch(self.path / file_name(info))
        except FileNotFoundError:
            self._vanished(info)
        except OSError as error:
            self._trouble(error)
        return None

    def _learn(self, found: dict[bytes, Entry], known: set[bytes]) -> None:
        """Make the index what the folder was. known: keys before it was listed; what came or went since then is left alone."""
        with self._lock:
            for key in known - found.keys():
                self._counts["vanished"] += self._index.remove(key) is not None
            for key, entry in found.items():
                here = self._index.get(key)
                if here is None and key in known:
                    continue
                if here is None or (here.info, here.size_bytes) != (entry.info, entry.size_bytes):
                    self._index.add(entry)
                self._index.mark_used(key, entry.used_ns)
            self._last_used_ns = max([self._last_used_ns, *(entry.used_ns for entry in self._index)])

    def _vanished(self, info: SegmentInfo) -> None:
        """Forget a file that is gone; what needs it stays until it is needed again or evicted."""
        with self._lock:
            here = self._index.get(info.key)
            if here is not None and here.info == info:
                self._index.remove(info.key)
                self._counts["vanished"] += 1

    def _damaged(self, info: SegmentInfo) -> None:
        """Remove a file that is not what was written, and all that needs it."""
        with self._lock:
            doomed = [self._index.remove(key) for key in self._index.with_descendants(info.key)]
            self._counts["damaged"] += 1
        log.warning("The disk tier removed %s: its bytes are not those that were written.", file_name(info))
        self._remove([info, *(entry.info for entry in doomed if entry is not None)])

    def _remove(self, infos: Iterable[SegmentInfo]) -> None:
        for info in infos:
            files.remove(self.path / file_name(info))

    def _trouble(self, error: OSError | MemoryError) -> None:
        """Count a failure of the disk, or of memory for what it has; say it the first time it is of this kind."""
        number = error.errno if isinstance(error, OSError) else errno.ENOMEM
        with self._lock:
            self._counts["failed"] += 1
            is_new = number not in self._said
            self._said.add(number)
        if is_new:
            name = errno.errorcode.get(number or 0, "an error")
            why = error.strerror if isinstance(error, OSError) else os.strerror(errno.ENOMEM)
            log.warning("The disk tier goes on without %s: %s (%s; said once).", self.path, why, name)


def prepare_folder(path: Path, *, needed_bytes: int) -> None:
    """Make a folder for segments, if it is not there, and see that it can be used. needed_bytes: of the smallest of them.

    Raises ConfigError: it cannot be made or written, or has neither segments nor room for one.
    """
    try:
        files.make_folder(path)
        files.probe(path)
        os.scandir(path).close()  # writing does not mean that it can be listed
        left_bytes = files.free_bytes(path)
        is_full = left_bytes is not None and left_bytes < needed_bytes
        if is_full and not any(parse_name(found.name) for found in files.list_folder(path)):
            raise ConfigError(
                f"The disk of --hicache-storage-path '{path}' has {format_bytes(left_bytes or 0)} left, and one segment takes at least "
                f"{format_bytes(needed_bytes)}: make room there, or give another folder."
            )
    except OSError as error:
        raise ConfigError(
            f"The disk tier needs a folder that can be made, read and written, and '{path}' is not one ({error.strerror}): "
            "give --hicache-storage-path another."
        ) from error


def _segments_of(listed: Iterable[files.Listed]) -> tuple[dict[bytes, Entry], list[SegmentInfo]]:
    """(segments by key, files to spare: of two that end at one prefix, the one that needs more parents)."""
    found: dict[bytes, Entry] = {}
    spare: list[SegmentInfo] = []
    for file in listed:
        info = parse_name(file.name)
        if info is None:
            continue
        other = found.get(info.key)
        if other is not None and other.info.start <= info.start:
            spare.append(info)
            continue
        if other is not None:
            spare.append(other.info)
        found[info.key] = Entry(info, file.size_bytes, file.used_ns)
    return found, spare

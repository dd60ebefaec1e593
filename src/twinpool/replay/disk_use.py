"""What the disk tier did in a run: what was written, read, evicted and refused, and how its room was used."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinpool.replay.cliff import DiskLack
from twinpool.replay.disk import SimDisk
from twinpool.replay.record import Means
from twinpool.storage.format import smallest_file_bytes

_PAGES_WITHOUT_KV = 1 << 40  # of a model whose pages only count tokens: more than anybody has


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """A worker's disk, all its ranks together, empty at the start. used_share: of its limit, mean over time; used_bytes, segments:
    when the run ended.

    read_bytes_per_s, write_bytes_per_s, latency_s: how fast it was, None where no step takes time. Segments: written; already_there:
    given again; evicted: to make room; no_room, no_parent: refused; dropped: more than the queue holds was waiting; pending: not yet
    written when the run ended; read: for requests, of which fetched_tokens are KV tokens. late_requests: went on before all was read.
    most_pages, most_states: what the disk, and what was on its way there or back, held at most, each as if the other took nothing.
    """

    limit_bytes: int
    used_bytes: int
    used_share: float
    segments: int
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    latency_s: float | None
    written_segments: int
    written_tokens: int
    written_bytes: int
    already_there_segments: int
    evicted_segments: int
    no_room_segments: int
    no_parent_segments: int
    dropped_segments: int
    pending_segments: int
    read_segments: int
    read_bytes: int
    fetched_tokens: int
    late_requests: int
    most_pages: int
    most_states: int

    @property
    def ran_out(self) -> bool:
        """Whether something went from the disk, or did not get there, for want of room."""
        return bool(self.evicted_segments or self.no_room_segments)

    @property
    def lacked(self) -> DiskLack | None:
        """What cost it most segments: time to write those that were dropped, or room; None for neither."""
        if self.dropped_segments > self.evicted_segments + self.no_room_segments:
            return "disk_writes"
        return "disk" if self.ran_out else None


def disk_use(disk: SimDisk | None, means: Means) -> DiskUse | None:
    """Of a run that has ended; None without a disk."""
    if disk is None:
        return None
    stats, link, fingerprint = disk.stats, disk.link, disk.shelf.fingerprint
    timed = math.isfinite(link.read_bytes_per_s)
    most_bytes = stats.limit_bytes + disk.most_aside_bytes
    return DiskUse(
        limit_bytes=stats.limit_bytes, used_bytes=stats.used_bytes,
        used_share=means.of("disk_bytes") / stats.limit_bytes, segments=stats.segments,
        read_bytes_per_s=link.read_bytes_per_s if timed else None,
        write_bytes_per_s=link.write_bytes_per_s if timed else None, latency_s=link.latency_s if timed else None,
        written_segments=stats.written, written_tokens=stats.written_tokens, written_bytes=disk.writer.written_bytes,
        already_there_segments=stats.already_there, evicted_segments=stats.evicted, no_room_segments=stats.no_room,
        no_parent_segments=stats.no_parent, dropped_segments=disk.writer.queue.dropped,
        pending_segments=len(disk.writer.queue), read_segments=stats.read, read_bytes=disk.readers.read_bytes,
        fetched_tokens=disk.fetched_tokens, late_requests=disk.late_requests,
        most_pages=most_bytes // fingerprint.page_bytes if fingerprint.page_bytes else _PAGES_WITHOUT_KV,
        most_states=stats.limit_bytes // smallest_file_bytes(fingerprint) + disk.most_aside_bytes // fingerprint.slot_bytes,
    )  # fmt: skip

"""The disk tier of a run for people: its set-up, what became of segments, and how its room was used."""

from __future__ import annotations

from twinpool.replay.disk_use import DiskUse
from twinpool.tables import Table
from twinpool.units import GB, count


def disk_speed_text(disk: DiskUse) -> str:
    """Room and speed, and that nothing was there before the run."""
    room = f"{disk.limit_bytes / GB:,.2f} GB, empty at the start"
    if disk.read_bytes_per_s is None or disk.write_bytes_per_s is None or disk.latency_s is None:
        return room
    return (
        f"{room}; reads {disk.read_bytes_per_s / GB:g} GB/s, writes {disk.write_bytes_per_s / GB:g} GB/s, "
        f"{disk.latency_s * 1000:g} ms a file"
    )


def disk_table(disk: DiskUse) -> Table:
    """What became of segments; with warm-up."""

    def row(name: str, segments: int, tokens: int | None = None, size_bytes: int | None = None) -> tuple[str, ...]:
        return (
            name, f"{segments:,}", "" if tokens is None else f"{tokens:,}", "" if size_bytes is None else f"{size_bytes / GB:,.2f}",
        )  # fmt: skip

    rows = [
        row("written", disk.written_segments, disk.written_tokens, disk.written_bytes),
        row("read for requests", disk.read_segments, disk.fetched_tokens, disk.read_bytes),
        row("evicted to make room", disk.evicted_segments),
        row("not written for want of room", disk.no_room_segments),
        row("not written, what they stand on had gone", disk.no_parent_segments),
        row("not written, too much waited", disk.dropped_segments),
    ]
    return Table(("Disk tier", "segments", "KV tokens", "GB"), rows, right=range(1, 4))


def disk_use_text(disk: DiskUse) -> str:
    """How its room was used, and who did not wait, in two sentences."""
    return (
        f"{disk.used_share:.1%} of it was in use on average; at the end {count(disk.segments, 'segment')}, {disk.used_bytes / GB:,.2f} of "
        f"{disk.limit_bytes / GB:,.2f} GB. {count(disk.late_requests, 'request')} went on before all of their prefix was read."
    )

"""Writing pauses after the disk has refused a write, longer each time, and begins again with one try."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from tests.unit.storage.small import FILE_BYTES, chain_infos, longest_end, put_chain, same, segment, store_at
from twinpool.storage import files
from twinpool.storage.backoff import Backoff
from twinpool.storage.store import DiskStore

TOKENS = list(range(2000, 2400))


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def paused_until(backoff: Backoff, clock: Clock) -> float:
    """Seconds from now at which the pause is over, to a tenth."""
    began_s = clock.now_s
    while backoff.pauses:
        clock.now_s += 0.1
    return round(clock.now_s - began_s, 1)


def test_a_pause_doubles_up_to_a_minute_and_starts_anew_after_a_success() -> None:
    backoff = Backoff(clock := Clock())
    assert not backoff.pauses
    pauses = []
    for _ in range(9):
        backoff.failed()
        pauses.append(paused_until(backoff, clock))
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60], abs=0.2)
    backoff.worked()
    assert not backoff.pauses
    backoff.failed()
    assert paused_until(backoff, clock) == pytest.approx(1, abs=0.2)


def slow_clock(store: DiskStore) -> Clock:
    """Give a store a clock that stands still."""
    store._backoff = Backoff(clock := Clock())
    return clock


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_broken_disk_is_tried_seldom_and_still_read(tmp_path: Path, monkeypatch, error) -> None:
    store = store_at(tmp_path, limit_bytes=3 * FILE_BYTES)
    clock = slow_clock(store)
    (here,) = put_chain(store, TOKENS, [4])
    put_chain(store, TOKENS[1:], [4])
    tries = []

    def refuse(*args: object) -> int:
        tries.append(args)
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as broken:
        broken.setattr(files, "write_whole", refuse)
        wanted = [chain_infos(store, TOKENS[at:], [4])[0] for at in range(2, 30)]
        assert not any(store.put(segment(info)) for info in wanted)
        assert len(tries) == 1
        stats = store.stats
        assert (stats.failed, stats.paused, stats.evicted, stats.segments) == (1, 27, 0, 2), (
            "nothing made room for nothing"
        )
        assert same(store.read(here), here)
        clock.now_s += 1.1
        assert not any(store.put(segment(info)) for info in wanted)
        assert len(tries) == 2
    assert not store.put(segment(wanted[0])), "the disk is well again and nobody has tried yet"
    clock.now_s += 2.1
    assert store.put(segment(wanted[0]))
    assert store.put(segment(wanted[1])), "no pause after a success"
    assert longest_end(store, TOKENS[3:]) == 4


def test_a_limit_on_the_size_of_files_is_such_a_failure(tmp_path: Path) -> None:
    """The kernel itself refuses: of what was half-written nothing is left."""
    store = store_at(tmp_path)
    clock = slow_clock(store)
    (info,) = chain_infos(store, TOKENS, [8])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert not store.put(segment(info))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
    assert (store.stats.failed, store.stats.written, store._reserved_bytes) == (1, 0, 0)
    assert not store.put(segment(info))
    clock.now_s += 1.1
    assert store.put(segment(info))
    assert (store.stats.paused, store.stats.written) == (1, 1)

import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import pytest

from tests.unit.storage.small import (
    FILE_BYTES,
    PLENTY_BYTES,
    SMALL,
    chain_infos,
    longest_end,
    put_chain,
    same,
    segment,
    store_at,
)
from twinpool.sched.disk import longest_wait_s
from twinpool.storage import files
from twinpool.storage.format import Segment
from twinpool.storage.keys import SegmentInfo
from twinpool.storage.store import DiskStore
from twinpool.storage.workers import Prefetcher, StoreWriter

TOKENS = list(range(1000, 1400))
PAYLOAD_BYTES = SMALL.page_bytes + SMALL.slot_bytes  # of one page
LONG_S = 60.0


class Gate(DiskStore):
    """A store whose puts and reads wait until they are let through; `entered` says that one waits or has passed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, limit_bytes=1 << 30, fingerprint=SMALL)
        self.gate, self.entered = threading.Semaphore(0), threading.Semaphore(0)

    def put(self, segment: Segment) -> bool:
        self._pass()
        return super().put(segment)

    def read(self, info: SegmentInfo) -> Segment | None:
        self._pass()
        return super().read(info)

    def _pass(self) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=LONG_S)


def test_offers_are_written_in_order(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1 << 20)
    assert all(writer.offer(segment(info)) for info in chain_infos(store, TOKENS, range(4, 400, 4)))
    assert writer.flush(LONG_S)
    assert longest_end(store, TOKENS) == 396
    assert (writer.pending_bytes, writer.dropped) == (0, 0)
    writer.close(LONG_S)
    assert not writer.offer(segment(chain_infos(store, TOKENS, [4])[0]))


def test_a_writer_outlives_a_moment_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1 << 20, refresh_s=0.01)
    refused = []

    def fail(*args: object) -> None:
        raise MemoryError

    infos = chain_infos(store, TOKENS, [4, 8])
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_whole", fail)
        patch.setattr(files, "list_folder", fail)
        assert writer.offer(segment(infos[0]), refused=lambda: refused.append(True))
        assert writer.flush(LONG_S)
        while store.stats.failed < 3:  # one write, and the folder looked at again
            time.sleep(0.01)
    monkeypatch.setattr(store, "_is_paused", lambda: False)
    assert all(writer.offer(segment(info)) for info in infos)
    assert writer.flush(LONG_S)
    assert (refused, longest_end(store, TOKENS)) == ([True], 8)
    writer.close(LONG_S)


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=2 * PAYLOAD_BYTES)
    infos = chain_infos(store, TOKENS, [4, 8, 12])
    assert [writer.offer(segment(info)) for info in infos] == [True, True, False]
    assert (writer.pending_bytes, writer.dropped) == (2 * PAYLOAD_BYTES, 1)
    assert not writer.flush(0.01)
    store.gate.release(2)
    writer.close(LONG_S)
    assert longest_end(store, TOKENS) == 8


def test_a_segment_larger_than_the_queue_is_taken_alone(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1)
    offers = [chain_infos(store, TOKENS, [end])[0] for end in (400, 4)]
    assert [writer.offer(segment(info)) for info in offers] == [True, False]
    store.gate.release()
    writer.close(LONG_S)
    assert longest_end(store, TOKENS) == 400


def test_closing_in_a_hurry_drops_what_waits(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1 << 20)
    for info in chain_infos(store, TOKENS, [4, 8, 12]):
        writer.offer(segment(info))
    assert store.entered.acquire(timeout=LONG_S)
    writer.close(0.01)
    store.gate.release(3)
    writer.close(LONG_S)
    assert longest_end(store, TOKENS) == 4
    assert writer.pending_bytes == 0


def test_an_idle_writer_learns_of_other_servers(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    seen = threading.Event()
    refresh = store.refresh
    store.refresh = lambda: (refresh(), seen.set())[0]  # type: ignore[method-assign]
    writer = StoreWriter(store, max_pending_bytes=1, refresh_s=0.01)
    put_chain(store_at(tmp_path), TOKENS, [64])
    seen.clear()
    assert seen.wait(LONG_S)
    seen.clear()
    assert seen.wait(LONG_S)
    assert longest_end(store, TOKENS) == 64
    writer.close(LONG_S)


def test_a_busy_writer_learns_of_other_servers(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    put_chain(store_at(tmp_path), [1, 2, 3, 4], [4])
    writer = StoreWriter(store, max_pending_bytes=1 << 20, refresh_s=LONG_S)
    for info in chain_infos(store, TOKENS, range(4, 260, 4)):
        writer.offer(segment(info))
    writer.close(LONG_S)
    assert longest_end(store, [1, 2, 3, 4]) == 4


def test_a_wrong_segment_is_refused_where_it_is_offered(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1)
    with pytest.raises(AssertionError, match="state of a segment"):
        writer.offer(Segment(store.hashes(TOKENS).info(0, 4), bytes(32), b""))
    writer.close(LONG_S)


def test_a_chain_is_fetched(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    infos = put_chain(store, TOKENS, [64, 100, 300])
    prefetcher = Prefetcher(store, max_held_bytes=PLENTY_BYTES)
    fetch = prefetcher.start(infos[1:])
    read = fetch.wait(LONG_S)
    assert [same(segment, info) for segment, info in zip(read, infos[1:], strict=True)] == [True, True]
    assert fetch.poll() == read
    assert longest_wait_s(infos[1:]) == 1 + 0.25 * 236 / 1024
    assert prefetcher.start([]).wait(LONG_S) == ()
    prefetcher.close()


def test_a_fetch_ends_at_the_first_miss(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    infos = put_chain(store, TOKENS, [64, 100, 300])
    next(tmp_path.glob("*-64-100.safetensors")).write_bytes(b"")
    prefetcher = Prefetcher(store, max_held_bytes=PLENTY_BYTES)
    assert [segment.info for segment in prefetcher.start(infos).wait(LONG_S)] == infos[:1]
    prefetcher.close()


def test_a_wait_that_ends_gives_what_was_read_and_reads_no_more(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    store.gate.release(3)
    infos = put_chain(store, TOKENS, [64, 100, 300])
    prefetcher = Prefetcher(store, max_held_bytes=PLENTY_BYTES, n_threads=1)
    store.gate.release()
    fetch = prefetcher.start(infos)
    for _ in range(5):  # three puts, one read, and a second read that waits
        assert store.entered.acquire(timeout=LONG_S)
    assert fetch.poll() is None
    assert [segment.info for segment in fetch.wait(0.0)] == infos[:1]
    store.gate.release(2)
    prefetcher.close()
    assert fetch.poll() == ()
    assert store.stats.read == 2


def test_cancelled_and_closed_fetches_read_nothing(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    store.gate.release()
    infos = put_chain(store, TOKENS, [64])
    prefetcher = Prefetcher(store, max_held_bytes=PLENTY_BYTES, n_threads=1)
    reading, waiting, left = (prefetcher.start(infos) for _ in range(3))
    assert store.entered.acquire(timeout=LONG_S)
    assert store.entered.acquire(timeout=LONG_S)
    reading.cancel()
    waiting.cancel()
    threading.Timer(0.05, store.gate.release).start()
    prefetcher.close()
    assert [fetch.poll() for fetch in (reading, waiting, left)] == [(), (), ()]
    assert store.stats.read == 1


def test_a_disk_that_does_not_answer_keeps_no_process_alive(tmp_path: Path) -> None:
    code = f"""
import sys, threading
from pathlib import Path
from tests.unit.storage.small import PLENTY_BYTES, put_chain, store_at
from twinpool.storage import workers
workers._PATIENCE_S = 0.1
store = store_at(Path({str(tmp_path)!r}))
infos = put_chain(store, range(100), [64])
store.read = lambda info: threading.Event().wait()
prefetcher = workers.Prefetcher(store, max_held_bytes=PLENTY_BYTES)
fetches = [prefetcher.start(infos) for _ in range(4)]
prefetcher.close()
print([fetch.wait(0) for fetch in fetches])
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[(), (), (), ()]\n", "")


def test_a_bug_in_the_thread_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(tmp_path)
    infos = put_chain(store, TOKENS, [64])
    monkeypatch.setattr(store, "read", lambda info: 1 // 0)
    prefetcher = Prefetcher(store, max_held_bytes=PLENTY_BYTES)
    with pytest.raises(ZeroDivisionError):
        prefetcher.start(infos).wait(LONG_S)
    prefetcher.close()


def test_what_is_read_ahead_is_bounded_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    """Six chains of three files where four files may wait: one chain at a time, the longer one alone, whoever leaves makes room."""
    store = store_at(tmp_path)
    chains = [put_chain(store, TOKENS[at:], [4, 8, 12]) for at in range(5)]
    chains.insert(2, put_chain(store, TOKENS[50:], [4, 8, 12, 16, 20]))
    prefetcher = Prefetcher(store, max_held_bytes=4 * FILE_BYTES)
    fetches = [prefetcher.start(chain) for chain in chains]
    for number in (0, 1, 2):
        assert [one.info for one in fetches[number].wait(10)] == chains[number]
        assert fetches[number + 2].poll() is None, "it waits for the next one to be fetched"
    fetches[4].cancel()
    assert [one.info for one in fetches[3].wait(10)] == chains[3]
    assert [one.info for one in fetches[5].wait(10)] == chains[5]
    assert store.stats.read == 3 * 4 + 5
    read, waiting = prefetcher.start(chains[0]), prefetcher.start(chains[1])
    futures.wait([read._future], 10)
    assert waiting.poll() is None
    prefetcher.close()
    assert (len(read.poll() or ()), waiting.poll()) == (3, ())

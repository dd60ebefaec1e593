"""The disk in virtual time: how long files take, who waits for whom, and what a run sees of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.replay_worlds import Turn, numbers, one_second_steps, replay, session, trace
from tests.unit.storage.small import FILE_BYTES, ONE_PAGE, SMALL
from twinpool.clock import VirtualClock
from twinpool.errors import ConfigError
from twinpool.memory.host import HostArena
from twinpool.replay.agenda import Agenda
from twinpool.replay.disk import SimDisk
from twinpool.replay.disk_keys import TokenSums
from twinpool.replay.disk_link import INSTANT, DiskLink
from twinpool.replay.host_link import HostLink
from twinpool.replay.run import Replay
from twinpool.replay.trace import Session, Trace
from twinpool.step import HostCopy, StepPlan, StoreCopy
from twinpool.storage.format import file_bytes

TOKENS = np.arange(4000, dtype=np.int32)
LINK = DiskLink(read_bytes_per_s=1000.0, write_bytes_per_s=500.0, latency_s=1.0)


def file_bytes_of(tokens: int) -> int:
    """Size of the file of so many tokens."""
    return file_bytes(replace(ONE_PAGE, end=tokens), SMALL)


def file_s(tokens: int, bytes_per_s: float) -> float:
    """Seconds that it takes, without its latency."""
    return file_bytes_of(tokens) / bytes_per_s


def disk_of(
    *, limit_bytes: int = 1 << 30, link: DiskLink = INSTANT, policy: str = "wait_complete", threshold_tokens: int = 1
) -> tuple[SimDisk, VirtualClock]:
    clock = VirtualClock()
    disk = SimDisk(
        clock=clock,
        limit_bytes=limit_bytes,
        fingerprint=SMALL,
        link=link,
        policy=policy,
        threshold_tokens=threshold_tokens,
    )
    return disk, clock


def give(disk: SimDisk, *ends: int, when_s: float = 0.0, tokens: np.ndarray = TOKENS) -> None:
    """Segments that end there, one after another."""
    for start, end in zip((0, *ends), ends, strict=False):
        pages = np.zeros((end - start) // SMALL.page_size, np.int32)
        disk.give(StoreCopy(tokens[:end], start, end, pages, 1), when_s)


def spans(read: object) -> list[tuple[int, int]]:
    return [(one.start, one.end) for one in read]  # type: ignore[attr-defined]


def test_calls_are_made_in_order_of_time_and_see_their_own() -> None:
    clock, made = VirtualClock(), []
    agenda = Agenda(clock)

    def call(name: str, then_s: float | None = None) -> None:
        made.append((name, agenda.now_s))
        if then_s is not None:
            agenda.at(then_s, lambda: call("then"))

    agenda.at(3.0, lambda: call("late"))
    agenda.at(1.0, lambda: call("first", 2.0))
    agenda.at(1.0, lambda: call("second", 9.0))
    clock.advance_to(5.0)
    agenda.catch_up()
    assert made == [("first", 1.0), ("second", 1.0), ("then", 2.0), ("late", 3.0)]
    assert (agenda.now_s, agenda.next_s) == (5.0, 9.0)


def test_names_are_equal_where_prefixes_are() -> None:
    short = TokenSums(TOKENS[:100])
    other = TokenSums([*range(70), 7, *range(71, 200)])
    long = TokenSums(np.tile(TOKENS, 30))  # more places than before
    for end in (0, 1, 63, 64, 70, 100):
        assert short.key(end) == long.key(end)
        assert short.grid_key(end) == short.key(end // 64 * 64)
        assert (short.key(end) == other.key(end)) == (end <= 70)
    assert len({long.key(end) for end in range(5000)}) == 5000
    assert len({TokenSums([token]).key(1) for token in range(5000)}) == 5000


def test_one_file_after_another_is_written() -> None:
    disk, clock = disk_of(link=LINK)
    give(disk, 4, 8, when_s=2.0)
    each_s = 1.0 + FILE_BYTES / 500
    for now_s, segments in ((2.0 + each_s - 0.01, 0), (2.0 + each_s, 1), (2.0 + 2 * each_s, 2)):
        clock.advance_to(now_s)
        assert disk.stats.segments == segments
    assert disk.writer.written_bytes == 2 * FILE_BYTES
    assert disk.stats.used_bytes == 2 * FILE_BYTES


def test_a_full_queue_drops_and_the_tree_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.replay.disk.MAX_PENDING_BYTES", 2 * (SMALL.page_bytes + SMALL.slot_bytes))
    disk, clock = disk_of(link=LINK)
    give(disk, 4, 8, 12)
    assert [(len(lost.tokens), lost.kept_tokens) for lost in disk.lost()] == [(12, 8)]
    clock.advance_to(100.0)
    assert disk.stats.written == 2
    give(disk, 4, 8, 12, 16, when_s=100.0)
    clock.advance_to(200.0)
    assert (disk.stats.already_there, disk.stats.written) == (2, 4)


def test_what_stands_on_nothing_and_what_finds_no_room_is_refused() -> None:
    disk, _ = disk_of(limit_bytes=2 * FILE_BYTES)
    disk.give(StoreCopy(TOKENS[:8], 4, 8, np.zeros(1, np.int32), 1), 0.0)
    give(disk, 4, 8, 12)
    assert [(len(lost.tokens), lost.kept_tokens) for lost in disk.lost()] == [(8, 0), (12, 8)]
    assert (disk.stats.no_parent, disk.stats.no_room, disk.stats.evicted) == (1, 1, 0)
    give(disk, 4, tokens=TOKENS + 9)
    assert disk.lost() == []
    assert (disk.stats.evicted, disk.stats.segments) == (1, 2)


def test_a_limit_below_one_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise --hicache-storage-size"):
        disk_of(limit_bytes=FILE_BYTES - 1)


T0 = 10_000.0  # all is written by then


def filled(
    *, link: DiskLink = LINK, policy: str = "wait_complete", threshold_tokens: int = 1
) -> tuple[SimDisk, VirtualClock]:
    """A disk with a chain of two files (the second ends at 256) and another of one, at T0."""
    disk, clock = disk_of(link=link, policy=policy, threshold_tokens=threshold_tokens)
    give(disk, 128, 256)
    give(disk, 4, tokens=TOKENS + 9)
    clock.advance_to(T0)
    assert disk.stats.segments == 3
    return disk, clock


def test_a_chain_is_read_file_by_file_and_readers_share_the_disk() -> None:
    disk, clock = filled()
    disk.look(1, TOKENS[:300], in_memory_tokens=0, kv_tokens=0)
    disk.look(2, TOKENS[:9] + 9, in_memory_tokens=0, kv_tokens=0)
    long_s, short_s = file_s(128, LINK.read_bytes_per_s), file_s(4, LINK.read_bytes_per_s)
    # Both wait for their first byte together; then one file moves at a time, and the chain's second comes behind the other's.
    ends_s = (T0 + 1.0 + long_s, T0 + 1.0 + long_s + short_s)
    assert disk.next_s == ends_s[0]
    clock.advance_to(ends_s[0])
    assert (disk.poll(1), disk.poll(2)) == (None, None)
    clock.advance_to(ends_s[1])
    assert spans(disk.poll(2)) == [(0, 4)]
    last_s = ends_s[1] + long_s
    assert disk.next_s == last_s
    clock.advance_to(last_s)
    assert spans(disk.poll(1)) == [(0, 128), (128, 256)]
    assert disk.poll(1) == ()
    assert (disk.fetched_tokens, disk.late_requests, disk.stats.read) == (260, 0, 3)
    assert (disk.next_s, disk.readers.aside.now_bytes) == (math.inf, 0)


def test_a_third_chain_waits_for_a_reader() -> None:
    disk, clock = filled(link=DiskLink(read_bytes_per_s=math.inf, write_bytes_per_s=math.inf, latency_s=1.0))
    for rid in (1, 2, 3):
        disk.look(rid, TOKENS[:9] + 9, in_memory_tokens=0, kv_tokens=0)
    clock.advance_to(T0 + 1)
    assert [disk.poll(rid) is None for rid in (1, 2, 3)] == [False, False, True]
    clock.advance_to(T0 + 2)
    assert disk.poll(3)


def test_what_is_read_ahead_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both readers are idle; the second chain begins when the first has been fetched, or is given up."""
    monkeypatch.setattr("twinpool.replay.disk.MAX_FETCHED_BYTES", 1)
    disk, clock = filled(link=DiskLink(read_bytes_per_s=math.inf, write_bytes_per_s=math.inf, latency_s=1.0))
    for rid in (1, 2, 3):
        disk.look(rid, TOKENS[:9] + 9, in_memory_tokens=0, kv_tokens=0)
    clock.advance_to(T0 + 5)
    assert disk.poll(2) is None
    assert spans(disk.poll(1)) == [(0, 4)]
    clock.advance_to(T0 + 6)
    assert disk.poll(3) is None
    disk.forget(2)
    clock.advance_to(T0 + 7)
    assert spans(disk.poll(3)) == [(0, 4)]
    assert (disk.stats.read, disk.readers.aside.now_bytes) == (3, 0)


def test_only_what_memory_lacks_is_read_and_little_is_not() -> None:
    disk, _ = filled(link=INSTANT, threshold_tokens=100)
    for rid, in_memory, found in (
        (1, 128, [(128, 256)]),
        (2, 156, [(128, 256)]),
        (3, 157, []),
        (4, 100, [(0, 128), (128, 256)]),
    ):
        disk.look(rid, TOKENS[:300], in_memory_tokens=in_memory, kv_tokens=in_memory)
        assert spans(disk.poll(rid)) == found


@pytest.mark.parametrize(("policy", "waits_s"), [("best_effort", 0.0), ("timeout", 1.0 + 0.25 * 256 / 1024)])
def test_a_policy_that_does_not_wait_gets_what_was_read(policy, waits_s) -> None:
    slow, quick = (
        replace(LINK, latency_s=0.001, read_bytes_per_s=10.0),
        replace(LINK, latency_s=0.001, read_bytes_per_s=7000.0),
    )
    for link, n_read in (
        (slow, 0),
        (quick, 1 if waits_s else 0),
    ):  # quick: one file takes less than the wait, both take more
        disk, clock = filled(link=link, policy=policy)
        disk.look(1, TOKENS[:300], in_memory_tokens=0, kv_tokens=0)
        if waits_s:
            assert disk.poll(1) is None
            assert disk.next_s <= T0 + waits_s
            clock.advance_to(T0 + waits_s - 1e-6)
            assert disk.poll(1) is None
        clock.advance_to(T0 + waits_s)
        assert len(disk.poll(1)) == n_read
        assert (disk.late_requests, disk.poll(1)) == (1, ())
        clock.advance_to(2 * T0)
        assert disk.stats.read == min(n_read + 1, 2), "what was being read was read to its end, and nothing after it"


def test_a_request_that_leaves_is_read_no_more() -> None:
    disk, clock = filled()
    disk.look(1, TOKENS[:300], in_memory_tokens=0, kv_tokens=0)
    disk.forget(1)
    disk.forget(1)
    assert disk.poll(1) == ()
    clock.advance_to(2 * T0)
    assert (disk.stats.read, disk.readers.aside.now_bytes) == (1, 0)


def test_a_segment_that_was_evicted_before_its_turn_ends_the_chain() -> None:
    limit = file_bytes_of(128) + FILE_BYTES
    disk, clock = disk_of(link=LINK, limit_bytes=limit)
    give(disk, 128, 132)
    clock.advance_to(T0)
    disk.look(1, TOKENS[:300], in_memory_tokens=0, kv_tokens=0)
    give(disk, 4, tokens=TOKENS + 9, when_s=T0)
    clock.advance_to(2 * T0)
    assert spans(disk.poll(1)) == [(0, 128)]
    assert disk.stats.evicted == 1


# A prompt of 64 tokens, another that takes its place on device and host, and somebody who has the first one again.
FIRST = session("first", Turn(blocks=numbers(64), input_tokens=64, arrival_s=0.0))
OTHER = session("other", Turn(blocks=numbers(64, first=300), input_tokens=64, arrival_s=100.0))


def back(name: str, *, at_s: float, last: int = 900) -> Session:
    return session(name, Turn(blocks=[*numbers(64), last], input_tokens=65, arrival_s=at_s))


def test_what_a_run_was_told_last_is_written_while_nobody_is_there() -> None:
    """Both ends of a turn and what is waited for lie in pauses, where no step takes time along."""
    machine = run_of(trace(FIRST, OTHER, back("back", at_s=200.0)), link=replace(LINK, latency_s=40.0))
    run = machine.run()
    record = run.recorder.records[2]
    assert (record.reused, record.from_storage, record.from_host) == (64, 64, 0)
    (size_bytes,) = {entry.size_bytes for entry in machine._disk.shelf._index}  # type: ignore[union-attr]
    assert record.scheduled_s == 200.0 + 40.0 + size_bytes / LINK.read_bytes_per_s
    assert record.first_token_s == record.scheduled_s + 1.0


def test_time_goes_from_event_to_event_while_everybody_waits() -> None:
    late = [back(str(number), at_s=200.0 + number, last=900 + number) for number in range(3)]
    machine = run_of(trace(FIRST, OTHER, *late), link=replace(LINK, latency_s=40.0))
    assert machine._disk is not None
    polls: list[int] = []
    poll = machine._disk.poll
    machine._disk.poll = lambda rid: (polls.append(rid), poll(rid))[1]  # type: ignore[method-assign]
    run = machine.run()
    assert [one.reused for one in run.recorder.records] == [0, 0, 64, 64, 64]
    assert run.recorder.records[2].scheduled_s > 240
    assert len(polls) < 30


def test_what_is_read_while_the_house_is_full_cuts_no_run_of_steps() -> None:
    """It stays aside until somebody ends, so that nothing can happen before."""
    long = session("long", Turn(blocks=numbers(8, first=500), input_tokens=8, output_tokens=60, arrival_s=200.0))
    link = replace(LINK, latency_s=10.0, read_bytes_per_s=1e9)
    machine = run_of(trace(FIRST, OTHER, long, back("back", at_s=202.5)), link=link, max_running=1)
    plans: list[StepPlan] = []
    machine.observers.append(lambda plan, result: plans.append(plan))
    machine.run()
    assert machine._disk is not None
    assert machine._disk.fetched_tokens == 64
    # It is seen at 203 and read a moment after 213, in the middle of the last run.
    assert [plan.repeat for plan in plans if plan.n_decode_rows] == [1, 1, 3, 3, 1, 50]


def test_what_goes_to_the_disk_leaves_the_device_over_its_link() -> None:
    link = HostLink(bytes_per_s=100.0, page_bytes=10, slot_bytes=50, n_layers=4, one_way=False, saves_beside=True)
    pages = np.zeros(15, np.int32)
    order = StoreCopy(TOKENS[:60], 0, 60, pages, 1)
    assert link.step_s(np.array([0.5]), [order]).tolist() == pytest.approx([2.0])
    both = [order, HostCopy(True, pages, pages, 1, 1)]
    assert link.step_s(np.array([0.5]), both).tolist() == pytest.approx([4.0])
    before = replace(link, saves_beside=False)
    assert before.step_s(np.array([0.5]), both).tolist() == pytest.approx([4.5])


def run_of(recorded: Trace, *, link: DiskLink, **world: object) -> Replay:
    """A machine whose host holds one prompt of 64 tokens, and drops it when the next one comes."""
    arena = HostArena(total_bytes=90, page_bytes=1, slot_bytes=10)
    fingerprint = replace(SMALL, page_size=1, page_bytes=1, slot_bytes=10)
    disk = {
        "limit_bytes": 1 << 30, "fingerprint": fingerprint, "link": link, "policy": "wait_complete", "threshold_tokens": 8,
    }  # fmt: skip
    options = {
        "n_pages": 80,
        "n_slots": 8,
        "chunk": 64,
        "track": 64,
        "grid": 8,
        "overlap": False,
        "host": arena,
        **world,
    }
    return replay(recorded, cost=one_second_steps(), disk=disk, **options)

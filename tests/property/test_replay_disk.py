"""Replay with a disk below the host on random traffic: skipping steps changes nothing, all tiers keep to their room, and no request
reuses more than could be there.
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from tests.property.test_replay import SECONDS, arrivals, sessions, worlds
from tests.property.test_replay_host import COSTS, POLICIES, everything, tiers, traffic_of
from tests.replay_worlds import Turn, replay, session, trace
from twinpool.memory.host import HostArena
from twinpool.replay.bound import Capacity, bounds_of
from twinpool.replay.disk_link import INSTANT, DiskLink
from twinpool.replay.disk_use import disk_use
from twinpool.replay.run import Replay, Run
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace
from twinpool.storage.format import smallest_file_bytes
from twinpool.storage.keys import Fingerprint

# A file here is a block of 4096 bytes for its header and little else: some tenths of a second, beside steps of a second.
LINKS = {
    "quick": DiskLink(read_bytes_per_s=1e6, write_bytes_per_s=1e6, latency_s=0.001),
    "even": DiskLink(read_bytes_per_s=8192.0, write_bytes_per_s=4096.0, latency_s=0.5),
    "slow": DiskLink(read_bytes_per_s=1300.0, write_bytes_per_s=700.0, latency_s=0.7),
}
PREFETCH = ["timeout", "best_effort", "wait_complete"]


@st.composite
def returning(draw: st.DrawFn) -> Trace:
    """A few conversations that go on again and again in any order, so that others have their place in memory meanwhile."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    openings = [[*range(1000 * one, 1000 * one + draw(st.integers(6, 24)) // block_size + 1)] for one in range(1, 5)]
    turns: list[list[Turn]] = [[] for _ in openings]
    at_s, fresh = 0.0, 100_000
    for which in draw(st.lists(st.integers(0, len(openings) - 1), min_size=6, max_size=16)):
        openings[which] += [fresh, fresh + 1]
        fresh += 2
        at_s += draw(SECONDS)
        turns[which].append(
            Turn(
                blocks=[*openings[which]], input_tokens=len(openings[which]) * block_size, arrival_s=at_s,
                output_tokens=draw(st.integers(0, 12)), think_s=draw(SECONDS),
            )
        )  # fmt: skip
    return trace(*(session(f"s{number}", *one) for number, one in enumerate(turns) if one), block_size=block_size)


@st.composite
def small(draw: st.DrawFn) -> dict[str, object]:
    """A world whose pools hold about one of them."""
    world = draw(worlds())
    return {**world, "n_pages": draw(st.integers(56, 72)) // world["page_size"], "context_len": 4096}


@st.composite
def disks(draw: st.DrawFn) -> dict[str, object]:
    """A disk of a few files, or many, that is slower or quicker than steps are."""
    return {
        "n_files": draw(st.sampled_from([1, 3, 10, 1000])), "link": draw(st.sampled_from(sorted(LINKS))),
        "policy": draw(st.sampled_from(PREFETCH)), "threshold_tokens": draw(st.sampled_from([1, 8])),
    }  # fmt: skip


def made(
    recorded: Trace, world: dict[str, object], tier: dict[str, object], disk: dict[str, object], options: dict[str, object], *,
    policy: str, cost: str, skip: bool,
) -> Replay:  # fmt: skip
    arena = HostArena(**tier)
    fingerprint = Fingerprint(
        model="", kv_dtype="", ssm_dtype="", conv_dtype="", page_size=world["page_size"], page_bytes=arena.page_bytes,
        slot_bytes=arena.slot_bytes,
    )  # fmt: skip
    chosen = {
        "fingerprint": fingerprint, "limit_bytes": disk["n_files"] * smallest_file_bytes(fingerprint),
        "link": LINKS[disk["link"]] if COSTS[cost] is not None else INSTANT, "policy": disk["policy"],
        "threshold_tokens": disk["threshold_tokens"],
    }  # fmt: skip
    world = {**world, "radix": True, "host": arena, "host_policy": policy}
    return replay(recorded, traffic=traffic_of(recorded, options), cost=COSTS[cost], skip=skip, disk=chosen, **world)


def seen(run: Run) -> dict[str, object]:
    """Everything a run says, with what the disk holds and did."""
    disk = run.disk
    assert disk is not None
    return everything(run) | {
        "disk": dataclasses.asdict(disk.stats), "files": sorted(disk.shelf._index, key=lambda entry: entry.info.key),
        "read": (disk.fetched_tokens, disk.late_requests, disk.readers.read_bytes, disk.writer.written_bytes),
        "dropped": disk.writer.queue.dropped,
    }  # fmt: skip


SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
ANY = {
    "recorded": st.one_of(sessions(), returning(), returning()), "world": st.one_of(worlds(), small(), small()), "tier": tiers(),
    "disk": disks(), "options": arrivals(), "policy": st.sampled_from(POLICIES), "cost": st.sampled_from(sorted(COSTS)),
}  # fmt: skip


@SETTINGS
@given(**ANY)
def test_skipping_steps_changes_nothing(recorded, world, tier, disk, options, policy, cost) -> None:
    stepped = made(recorded, world, tier, disk, options, policy=policy, cost=cost, skip=False).run()
    skipped = made(recorded, world, tier, disk, options, policy=policy, cost=cost, skip=True).run()
    assert seen(skipped) == seen(stepped)
    assert skipped.plans <= stepped.plans == stepped.steps


@SETTINGS
@given(**ANY, skip=st.booleans())
def test_all_tiers_keep_to_their_room_and_every_request_ends(
    recorded, world, tier, disk, options, policy, cost, skip
) -> None:
    machine = made(recorded, world, tier, disk, options, policy=policy, cost=cost, skip=skip)
    storage = machine.scheduler.book.storage
    most_bytes = storage.shelf.limit_bytes

    def look(plan, result) -> None:
        machine.scheduler.check()
        assert storage.stats.used_bytes <= most_bytes

    machine.observers.append(look)
    run = machine.run()
    for counts in run.scheduler.counts():
        assert counts.held == counts.protected == 0
    for record in run.recorder.records:
        assert 0 <= record.from_host + record.from_storage <= record.reused <= record.kv_matched < record.input_tokens
        if not record.refusal:
            assert record.reused + sum(tokens for _, tokens in record.gaps) == record.input_tokens
    assert storage.stats.used_bytes <= most_bytes  # and what was given at the end is under way
    aside = (storage.writer.aside.now_bytes, storage.readers.aside.now_bytes)
    assert aside == (storage.writer.queue.pending_bytes, 0)


@SETTINGS
@given(**ANY, skip=st.booleans())
def test_no_run_reuses_more_than_the_bound(recorded, world, tier, disk, options, policy, cost, skip) -> None:
    if "speed" not in options and cost == "count":
        cost = "even"  # in a closed loop without time, order is not that of arrivals
    world = {**world, "schedule_policy": "fcfs"}
    run = made(recorded, world, tier, disk, options, policy=policy, cost=cost, skip=skip).run()
    use, arena = disk_use(run.disk, run.recorder.means), HostArena(**tier)
    capacity = Capacity(
        page_size=world["page_size"], pages=world["n_pages"] + arena.most_pages + use.most_pages,
        slots=world["n_slots"] + arena.most_slots + use.most_states,
    )  # fmt: skip
    counted = [
        one for one in run.recorder.records if not one.warm_up and one.finished_s is not None and not one.refusal
    ]
    found = bounds_of(recorded, run.recorder.records, capacity, tokens=TokenSpace(recorded))
    assert sum(one.reused for one in counted) <= found.clairvoyant_tokens <= found.infinite_tokens

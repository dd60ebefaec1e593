"""The scheduler over three tiers: whatever the disk loses, cuts short or delays, no token changes, nothing leaks, nobody waits for ever."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, rule

from tests.disk_worlds import FakeStorage
from tests.failing import let_fail
from tests.property.test_host_tier import MODES, POLICIES, HostMachine, RefusingArena, sessions
from tests.unit.storage.small import PLENTY_BYTES
from tests.worlds import expected_output, make_world
from twinpool.engine.disk import DiskTier
from twinpool.memory.host import HostArena
from twinpool.storage.format import smallest_file_bytes
from twinpool.storage.keys import Fingerprint
from twinpool.storage.store import DiskStore


class DiskMachine(HostMachine):
    """The traffic of the host tier's own test, with a disk below it that survives restarts."""

    @initialize(
        mode=st.sampled_from(MODES), page_size=st.sampled_from([1, 2, 4]), n_pages=st.integers(12, 40),
        n_running=st.integers(1, 4), spare_slots=st.integers(0, 6), chunk=st.sampled_from([4, 8, 13, None]),
        policy=st.sampled_from(["fcfs", "lpm"]), lazy=st.booleans(), cap=st.sampled_from([-1, 1, 2]),
        host_policy=st.sampled_from(POLICIES), host_bytes=st.sampled_from([40, 150, 400, 2000]),
        slot_bytes=st.sampled_from([10, 30, 70]), quota=st.sampled_from([None, None, 1, 4]),
        refused_percent=st.sampled_from([0, 0, 20, 60]), seed=st.integers(0, 99), most_polls=st.sampled_from([0, 1, 9]),
        lost_percent=st.sampled_from([0, 0, 40]), cut_percent=st.sampled_from([0, 0, 40]),
    )  # fmt: skip
    def build(
        self, mode, page_size, n_pages, n_running, spare_slots, chunk, policy, lazy, cap, host_policy, host_bytes, slot_bytes,
        quota, refused_percent, seed, most_polls, lost_percent, cut_percent,
    ) -> None:  # fmt: skip
        strategy, overlap = mode
        self.host_policy = host_policy
        self.storage = FakeStorage(random.Random(seed), most_polls, lost_percent, cut_percent)
        self.settings = {
            "n_pages": n_pages, "n_slots": n_running * 3 + 1 + spare_slots, "strategy": strategy, "overlap": overlap,
            "page_size": 1 if strategy == "no_buffer" else page_size, "chunk": chunk, "max_running": n_running, "lazy": lazy,
            "max_states_per_path": cap, "schedule_policy": policy, "host_policy": host_policy, "storage": self.storage,
        }  # fmt: skip
        self.arena_settings = {
            "refused_percent": refused_percent, "seed": seed, "total_bytes": host_bytes, "page_bytes": 10,
            "slot_bytes": slot_bytes, "max_slots": quota,
        }  # fmt: skip
        self.requests, self.said, self.stopped, self.history = {}, {}, set(), [[]]
        self._boot()

    def _boot(self) -> None:
        self.arena = RefusingArena(**self.arena_settings)
        self.world = make_world(host=self.arena, **self.settings)
        let_fail(self.world)
        self.scheduler = self.world.scheduler

    @rule()
    def kill(self) -> None:
        """The process dies in the middle of whatever it does: what runs is lost, and so is what the disk was not given yet."""
        self.storage.waiting.clear()
        self.storage.unheard.clear()
        self.requests, self.said, self.stopped = {}, {}, set()
        self._boot()

    @rule(data=st.data())
    def lose(self, data) -> None:
        """Somebody removes a file: what stands on it is found by nobody, and may be written again."""
        keys = sorted(self.storage.segments)
        if keys:
            del self.storage.segments[data.draw(st.sampled_from(keys))]

    @rule()
    def restart(self) -> None:
        """Everything in memory goes, the disk stays; what runs is finished first."""
        self.teardown()
        self.requests, self.said, self.stopped = {}, {}, set()
        self._boot()

    @invariant()
    def nobody_is_remembered_who_has_left(self) -> None:
        if hasattr(self, "world"):
            book = self.scheduler.book
            queued = {request.rid for request in book.waiting.ordered(lambda request: 0)}
            assert set(self.storage.waiting) | set(book.fetched) <= queued

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            assert not self.storage.waiting
            assert not self.scheduler.book.fetched
            for request in self.requests.values():
                reuse = request.reuse
                assert 0 <= reuse.from_storage <= reuse.from_storage + reuse.from_host <= reuse.reused


TestDiskTier = DiskMachine.TestCase
TestDiskTier.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("strategy", "overlap"), MODES)
def test_nothing_is_given_twice_while_it_is_in_memory(policy, strategy, overlap) -> None:
    """Over plenty of memory every token of every conversation reaches the disk once at most."""
    for seed in range(4):
        storage = FakeStorage()
        world = make_world(
            n_pages=2000, n_slots=300, strategy=strategy, overlap=overlap, grid=1, max_running=2,
            host=HostArena(total_bytes=100_000, page_bytes=10, slot_bytes=30), host_policy=policy, storage=storage,
        )  # fmt: skip
        sessions(world, random.Random(seed), rounds=12)
        spans: dict[bytes, int] = {}
        for order in storage.given:
            key = order.tokens.tobytes()
            assert key not in spans, "one prefix was given twice"
            assert not order.start or key[: 4 * order.start] in spans, "it stands on what was not given"
            spans[key] = order.start
        assert len(spans) > 10


@pytest.mark.parametrize("most_files", [3, 12, None])
@pytest.mark.parametrize("seed", range(3))
def test_real_files_under_a_world_that_restarts(tmp_path: Path, seed, most_files) -> None:
    fingerprint = Fingerprint(
        model="world", kv_dtype="int64", ssm_dtype="int64", conv_dtype="int64", page_size=1, page_bytes=8, slot_bytes=8
    )
    limit_bytes = most_files * smallest_file_bytes(fingerprint) if most_files else PLENTY_BYTES
    dice = random.Random(seed)
    histories = [[dice.randrange(1, 6) for _ in range(dice.randint(4, 10))] for _ in range(6)]
    from_storage = 0
    for _ in range(4):
        store = DiskStore(tmp_path, limit_bytes=limit_bytes, fingerprint=fingerprint)
        tier = DiskTier(store, policy="wait_complete", threshold_tokens=1)
        world = make_world(
            n_pages=60, n_slots=12, grid=1, max_running=2, storage=tier,
            host=HostArena(total_bytes=1500, page_bytes=8, slot_bytes=8),
        )  # fmt: skip
        for turn in range(8):
            which = dice.randrange(len(histories))
            request = world.request(turn, [*histories[which], dice.randrange(1, 6)][:30], 2, ignore_eos=True)
            prompt = [int(token) for token in request.tokens[: request.prompt_len]]
            world.run(request)
            histories[which] = [int(token) for token in request.tokens]
            assert histories[which][len(prompt) :] == expected_output(prompt, 2, ignore_eos=True)
            from_storage += request.reuse.from_storage
        tier.close()
        stats = store.stats
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) == stats.used_bytes <= limit_bytes
        assert stats.failed == stats.damaged == stats.vanished == 0
    if most_files is None:
        assert from_storage > 50

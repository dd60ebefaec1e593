"""The scheduler over two tiers: whatever is refused, dropped, demoted, restored or cancelled, no token changes and nothing leaks."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.failing import let_fail
from tests.property.test_scheduler import SchedulerMachine
from tests.worlds import World, expected_output, make_world
from twinpool.memory.host import HostArena
from twinpool.memory.pools import Pool
from twinpool.prefix.evict import POLICIES as EVICTION_POLICIES
from twinpool.prefix.host import HostPlan
from twinpool.prefix.tree import PrefixTree
from twinpool.request import Request

MODES = [
    ("extra_buffer", True), ("extra_buffer", False), ("extra_buffer_lazy", True), ("no_buffer", False),
]  # fmt: skip
POLICIES = ["write_through", "write_through_selective", "write_back"]


class RefusingArena(HostArena):
    """Refuses allocations that would fit, so many in a hundred."""

    def __init__(self, *, refused_percent: int, seed: int, **sizes) -> None:
        super().__init__(**sizes)
        self._random, self._percent = random.Random(seed), refused_percent

    def alloc(self, *, pages: int, slots: int = 0):
        return None if self._random.randrange(100) < self._percent else super().alloc(pages=pages, slots=slots)


class HostMachine(SchedulerMachine):
    """The traffic of the scheduler's own test, over device pools and host memory that are both far too small."""

    @initialize(
        mode=st.sampled_from(MODES), page_size=st.sampled_from([1, 2, 4]), n_pages=st.integers(12, 40),
        n_running=st.integers(1, 4), spare_slots=st.integers(0, 6), chunk=st.sampled_from([4, 8, 13, None]),
        policy=st.sampled_from(["fcfs", "lpm"]), lazy=st.booleans(), cap=st.sampled_from([-1, 1, 2]),
        host_policy=st.sampled_from(POLICIES), host_bytes=st.sampled_from([40, 150, 400, 2000]),
        page_bytes=st.sampled_from([10, 20, 30]), slot_bytes=st.sampled_from([10, 30, 70]),
        eviction=st.sampled_from(list(EVICTION_POLICIES)),
        quota=st.sampled_from([None, None, 1, 4]), refused_percent=st.sampled_from([0, 0, 20, 60]), seed=st.integers(0, 99),
    )  # fmt: skip
    def build(
        self, mode, page_size, n_pages, n_running, spare_slots, chunk, policy, lazy, cap, host_policy, host_bytes,
        page_bytes, slot_bytes, eviction, quota, refused_percent, seed,
    ) -> None:  # fmt: skip
        strategy, overlap = mode
        self.host_policy = host_policy
        if strategy == "no_buffer":
            page_size = 1
        self.arena = RefusingArena(
            refused_percent=refused_percent, seed=seed, total_bytes=host_bytes, page_bytes=page_bytes,
            slot_bytes=slot_bytes, max_slots=quota,
        )  # fmt: skip
        self.world = make_world(
            n_pages=n_pages, n_slots=n_running * 3 + 1 + spare_slots, page_size=page_size, strategy=strategy, overlap=overlap,
            chunk=chunk, max_running=n_running, lazy=lazy, max_states_per_path=cap, schedule_policy=policy, host=self.arena,
            host_policy=host_policy, eviction_policy=eviction,
        )  # fmt: skip
        let_fail(self.world)
        self.scheduler = self.world.scheduler
        self.requests: dict[int, Request] = {}
        self.said: dict[int, list[int]] = {}
        self.stopped: set[int] = set()
        self.history: list[list[int]] = [[]]

    @rule(data=st.data())
    def evict(self, data) -> None:
        """Something else wants the device's memory: what is cached is demoted."""
        self.world.tree.evict(pages=data.draw(st.integers(0, 12)), slots=data.draw(st.integers(0, 4)))

    @rule(sometimes=st.integers(0, 3))
    def fail(self, sometimes) -> None:
        """The next step is not computed."""
        self.world.executor.fail_next = not sometimes

    @rule(sometimes=st.integers(0, 3))
    def lose(self, sometimes) -> None:
        """The next step's orders are not all obeyed."""
        self.world.executor.lose_next = not sometimes

    @rule(data=st.data(), max_tokens=st.integers(1, 6))
    def go_on(self, data, max_tokens) -> None:
        """The next turn of an earlier request, which resumes from wherever its prefix is now."""
        base = data.draw(st.sampled_from(self.history))
        if 0 < len(base) < self.world.pages.count * self.scheduler.shape.page_size - 2:
            rid = len(self.requests)
            self.requests[rid] = self.world.request(rid, [*base, 1], max_tokens)
            self.said[rid] = []
            self.scheduler.add(self.requests[rid])

    @invariant()
    def blames_the_host(self) -> None:
        """Where every state is to be copied, one that is missed found no room on the host."""
        if hasattr(self, "world") and self.host_policy == "write_through" and self.world.tree.tier is not None:
            assert all("state_evicted" not in dict(request.reuse.gaps) for request in self.requests.values())

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "world"):
            return
        assert self.scheduler.flush()
        self.scheduler.check()
        world = self.world
        assert (world.pages.available, world.slots.available) == (world.pages.count, world.slots.count)
        assert (self.arena.used_pages, self.arena.used_slots) == (0, 0)
        assert (self.arena.page_capacity, self.arena.slot_capacity) == (self.arena.most_pages, self.arena.most_slots)


TestHostTier = HostMachine.TestCase
TestHostTier.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class AmpleMachine(RuleBasedStateMachine):
    """A tree over tiny device pools and host memory for everything: each prefix that ever had a state can be resumed from."""

    @initialize(policy=st.sampled_from(["write_through", "write_back"]), page_size=st.sampled_from([1, 2]))
    def build(self, policy, page_size) -> None:
        self.page = page_size
        self.pages = Pool(name="pages", first=1, count=16)
        self.slots = Pool(name="slots", first=1, count=4)
        self.tree = PrefixTree(
            pages=self.pages, slots=self.slots, page_size=page_size, grid_tokens=page_size,
            host=HostPlan(HostArena(total_bytes=10**6, page_bytes=10, slot_bytes=30), policy, []),
        )  # fmt: skip
        self.resumable: set[tuple[int, ...]] = {()}
        self.keys: list[tuple[int, ...]] = [()]

    def _tokens(self, data) -> tuple[int, ...]:
        base = data.draw(st.sampled_from(self.keys))
        tokens = base[: data.draw(st.integers(0, len(base)))] + tuple(
            data.draw(st.lists(st.integers(0, 1), max_size=6))
        )
        return tokens[:14]

    @staticmethod
    def _key(tokens) -> bytes:
        return np.array(tokens, np.int32).tobytes()

    @rule(data=st.data(), with_state=st.booleans())
    def insert(self, data, with_state) -> None:
        tokens = self._tokens(data)
        n_pages = len(tokens) // self.page
        tokens = tokens[: n_pages * self.page]
        if not n_pages or not (self.tree.room_pages(n_pages) and self.tree.room_slots(1)):
            return
        slot = int(self.slots.alloc(1)[0]) if with_state else None
        done = self.tree.insert(
            self._key(tokens), self.pages.alloc(n_pages), length=len(tokens), owned_from=0, state_slot=slot
        )
        self.pages.free(done.freed_pages)
        if slot is not None and not done.state_taken:
            self.slots.free([slot])
        self.keys.append(tokens)
        if with_state:
            self.resumable.add(tokens)

    @rule(pages=st.integers(0, 16), slots=st.integers(0, 4))
    def evict(self, pages, slots) -> None:
        self.tree.evict(pages=pages, slots=slots)

    @rule(data=st.data(), restore=st.booleans())
    def match(self, data, restore) -> None:
        tokens = self._tokens(data)
        limit = len(tokens) // self.page * self.page
        found = self.tree.match(self._key(tokens), limit_tokens=limit)
        best = max(n for n in range(limit + 1) if tokens[:n] in self.resumable)
        assert max(found.resume_len, found.host_node.depth if found.host_node is not None else 0) == best
        if found.host_node is None or not restore:
            return
        held = self.tree.hold(found.host_node)
        done = self.tree.restore(found.host_node)
        self.tree.let_go(held)
        assert done, "nothing else is locked"
        again = self.tree.match(self._key(tokens), limit_tokens=limit, touch=False)
        assert (again.resume_len, again.host_node) == (best, None)

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()
            tree = self.tree
            assert self.pages.available + tree.evictable_pages + tree.protected_pages == self.pages.count
            assert self.slots.available + tree.evictable_slots + tree.protected_slots == self.slots.count


TestAmpleHost = AmpleMachine.TestCase
TestAmpleHost.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def sessions(world: World, dice: random.Random, *, rounds: int) -> int:
    """Conversations that take turns; checks what each says and returns the tokens that came from the host."""
    histories = [[dice.randrange(1, 6) for _ in range(dice.randint(4, 14))] for _ in range(4)]
    from_host = 0
    for _ in range(rounds):
        asked: list[tuple[int, Request]] = []
        for which in dice.sample(range(4), dice.randint(1, 3)):
            prompt = histories[which] + [dice.randrange(1, 6) for _ in range(dice.randint(0, 3))]
            asked.append((which, world.request(dice.randrange(10**9), prompt[:18], dice.randint(1, 4))))
        world.run(*[request for _, request in asked])
        for which, request in asked:
            if request.finish.reason == "error":
                continue
            tokens = [int(token) for token in request.tokens[: request.n_tokens]]
            prompt, said = tokens[: request.prompt_len], tokens[request.prompt_len :]
            assert said == expected_output(prompt, request.params.max_tokens)
            reuse = request.reuse
            assert reuse.reused + sum(count for _, count in reuse.gaps) == reuse.prompt
            assert 0 <= reuse.from_host <= reuse.reused
            from_host += reuse.from_host
            histories[which] = tokens if len(tokens) <= 18 else histories[which]
    return from_host


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("strategy", "overlap"), MODES)
def test_conversations_come_back_from_the_host(policy, strategy, overlap) -> None:
    from_host = 0
    for seed in range(6):
        dice = random.Random(seed)
        page_size = 1 if strategy == "no_buffer" else dice.choice([1, 2])
        arena = HostArena(total_bytes=1500, page_bytes=10, slot_bytes=30)
        world = make_world(
            n_pages=dice.randint(24, 40) // page_size, n_slots=dice.randint(7, 12), page_size=page_size, strategy=strategy,
            overlap=overlap, grid=page_size, max_running=2, host=arena, host_policy=policy,
        )  # fmt: skip
        from_host += sessions(world, dice, rounds=12)
    assert from_host > 100


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_fail_end_their_requests_and_nothing_else(policy) -> None:
    dice = random.Random(7)
    arena = HostArena(total_bytes=1500, page_bytes=10, slot_bytes=30)
    world = make_world(n_pages=30, n_slots=10, max_running=3, host=arena, host_policy=policy)
    let_fail(world)
    executor = world.executor
    failed = from_host = 0
    prompts = [[dice.randrange(1, 6) for _ in range(12)] for _ in range(6)]
    for rid in range(120):
        request = world.request(rid, dice.choice(prompts), 3)
        executor.fail_next = dice.random() < 0.2
        world.run(request)
        if request.finish.reason == "error":
            assert request.finish.message == "the step could not be computed: RuntimeError: made to fail"
            failed += 1
            continue
        said = [int(token) for token in request.tokens[request.prompt_len : request.n_tokens]]
        assert said == expected_output([int(token) for token in request.tokens[: request.prompt_len]], 3)
        from_host += request.reuse.from_host
    assert failed > 10
    assert from_host > 50
    assert [counts.held + counts.protected for counts in world.scheduler.counts()] == [0, 0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("strategy", "overlap"), MODES)
def test_whichever_step_loses_memory_everybody_says_the_same(policy, strategy, overlap) -> None:
    restarted = undone = 0
    for losing in range(30):
        dice = random.Random(11)
        arena = HostArena(total_bytes=1500, page_bytes=10, slot_bytes=30)
        world = make_world(
            n_pages=36, n_slots=12, strategy=strategy, overlap=overlap, max_running=3, host=arena, host_policy=policy
        )
        let_fail(world)
        world.executor.lose_at = losing
        prompts = [[dice.randrange(1, 6) for _ in range(8 + n)] for n in range(5)]
        asked = [world.request(rid, dice.choice(prompts), 5, ignore_eos=True) for rid in range(12)]
        for n in range(0, 12, 4):
            world.run(*asked[n : n + 4])
            world.tree.evict(pages=99, slots=99)
        for request in asked:
            said = [int(token) for token in request.tokens[request.prompt_len : request.n_tokens]]
            prompt = [int(token) for token in request.tokens[: request.prompt_len]]
            assert (request.finish.reason, said) == ("length", expected_output(prompt, 5, ignore_eos=True))
            undone += "restore_failed" in dict(request.reuse.gaps)
        restarted += sum(request.restarts for request in asked)
    assert restarted > 40
    assert undone > 5


@pytest.mark.parametrize("max_tokens", [3, 20])
def test_an_answer_that_is_complete_is_no_error_when_the_step_after_it_fails(max_tokens) -> None:
    """With overlap one more step is under way when a request ends by its last token: whichever step fails, what was said decides."""
    prompt = next([4, 3, n] for n in range(99) if len(expected_output([4, 3, n], 20)) == 3)
    expected, ends = expected_output(prompt, max_tokens), []
    for failing in range(7):
        world = make_world(host=HostArena(total_bytes=1500, page_bytes=10, slot_bytes=30))
        let_fail(world)
        request = world.request(1, prompt, max_tokens)
        world.scheduler.add(request)
        said: list[int] = []
        for step in range(20):
            world.executor.fail_next = step == failing
            for delta in world.loop.step():
                said += delta.tokens
        assert request.finish.reason == ("stop" if said == expected else "error")
        ends.append(request.finish.reason)
        again = world.request(2, prompt, max_tokens)
        world.executor.fail_next = False
        world.run(again)
        assert [int(token) for token in again.tokens[again.prompt_len : again.n_tokens]] == expected
    assert ends[0] == "error"
    assert ends[-1] == "stop"

"""Conversations over three tiers that are too small, while memory is refused, steps fail, clients leave, processes die and files vanish.

No token changes and nothing leaks. What happened is counted, so that the test cannot be idle.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from tests.disk_worlds import FakeStorage
from tests.failing import FAILED, KINDS, LOST, let_fail
from tests.property.test_host_tier import MODES, POLICIES, RefusingArena
from tests.worlds import expected_output, make_world
from twinpool.errors import BadRequest
from twinpool.request import Request
from twinpool.sched.requeue import MOST_RESTARTS
from twinpool.step import HostCopy

MOST_TOKENS = 44  # of a conversation, before it begins anew


class Chaos:
    """One seed's world, its conversations, and what has happened to it."""

    def __init__(self, seed: int, *, strategy: str, overlap: bool, host_policy: str) -> None:
        self.dice = dice = random.Random(f"{seed} {strategy} {overlap} {host_policy}")
        self.happened: Counter[str] = Counter()
        self.storage = FakeStorage(dice, most_polls=4, lost_percent=10, cut_percent=10)
        self.page_size = 1 if strategy == "no_buffer" else dice.choice([1, 2, 4])
        running = dice.randint(1, 5)
        self.settings = {
            "n_pages": dice.randint(44, 70) // self.page_size, "n_slots": 3 * running + 1 + dice.randint(0, 4),
            "strategy": strategy, "overlap": overlap, "page_size": self.page_size, "chunk": dice.choice([4, 9, 16, None]),
            "max_running": running, "lazy": dice.random() < 0.5, "schedule_policy": dice.choice(["fcfs", "lpm"]),
            "max_states_per_path": dice.choice([-1, -1, 2]), "host_policy": host_policy, "storage": self.storage,
            "schedule_conservativeness": dice.choice([0.0, 0.0, 0.3, 1.0]),
        }  # fmt: skip
        self.host_bytes, self.quota = dice.choice([400, 1500, 4000]), dice.choice([None, None, 6])
        self.refused = dice.choice([0, 0, 15])
        self.histories = [[dice.randrange(1, 6) for _ in range(dice.randint(3, 12))] for _ in range(5)]
        self.boot()

    def boot(self) -> None:
        """A process begins: only the disk has anything."""
        arena = RefusingArena(
            refused_percent=self.refused, seed=self.dice.randrange(99), total_bytes=self.host_bytes, page_bytes=10,
            slot_bytes=20, max_slots=self.quota,
        )  # fmt: skip
        self.world = make_world(host=arena, **self.settings)
        let_fail(self.world)
        self.live: dict[int, tuple[int, Request, list[int]]] = {}  # conversation, request, what it said
        scheduler = self.world.scheduler
        fail = scheduler.fail

        def noted_fail(plan, message):
            self.happened["failed"] += 1
            restores = any(isinstance(order, HostCopy) and not order.to_host for order in plan.orders)
            self.happened["failed in a restoring step"] += restores
            return fail(plan, message)

        scheduler.fail = noted_fail

    def ask(self) -> None:
        """The next turn of a conversation, or of a fork of it."""
        which = self.dice.randrange(len(self.histories))
        base = self.histories[which]
        if len(base) > MOST_TOKENS or self.dice.random() < 0.1:
            base = base[: self.dice.randint(1, 12)]
        prompt = [*base, *(self.dice.randrange(1, 6) for _ in range(self.dice.randint(1, 3)))]
        request = self.world.request(self.dice.randrange(10**9), prompt, self.dice.randint(1, 24), ignore_eos=True)
        try:
            self.world.scheduler.add(request)
        except BadRequest:
            return
        self.live[request.rid] = (which, request, [])

    def step(self) -> None:
        for delta in self.world.loop.step():
            self.hear(delta)
        self.world.scheduler.check()
        self.happened["steps without tiers"] += self.world.tree.tier is None

    def hear(self, delta) -> None:
        """News of a request: its tokens are those that it must say, and its report adds up."""
        which, request, said = self.live[delta.request.rid]
        said.extend(delta.tokens)
        prompt = [int(token) for token in request.tokens[: request.prompt_len]]
        if delta.finish is None:
            return
        del self.live[request.rid]
        expected = expected_output(prompt, request.params.max_tokens, ignore_eos=True)
        assert said == expected[: len(said)]
        assert len(said) == len(expected) or delta.finish.reason in ("abort", "error")
        # The test loses memory without tiers, too, and then there is nothing left to be given up.
        assert LOST not in delta.finish.message or (self.world.tree.tier is None and request.restarts >= MOST_RESTARTS)
        reuse = request.reuse
        assert reuse.prompt == 0 or reuse.reused + sum(count for _, count in reuse.gaps) == reuse.prompt
        assert 0 <= reuse.from_storage <= reuse.from_storage + reuse.from_host <= reuse.reused
        self.happened["resumed from the host"] += reuse.from_host > 0
        self.happened["resumed from the disk"] += reuse.from_storage > 0
        self.happened["retracted"] += request.retractions
        self.happened["retracted, from a tier"] += request.retractions * (reuse.from_host > 0)
        self.happened["begun again"] += request.restarts > 0
        self.happened["begun again in the middle"] += request.restarts > 0 and reuse.reused > 0
        self.happened["restore failed"] += "restore_failed" in dict(reuse.gaps)
        if delta.finish.reason != "error":
            self.histories[which] = [*prompt, *said]

    def abort(self) -> None:
        if not self.live:
            return
        rid = self.dice.choice([*self.storage.waiting, *self.live])
        book = self.world.scheduler.book
        self.happened["aborted while it is read"] += rid in self.storage.waiting
        self.happened["aborted after it was read"] += rid in book.fetched and book.fetched[rid].end > 0
        self.happened["aborted after it was read twice"] += rid in book.fetched and book.fetched[rid].n_looks > 1
        running = book.running.get(rid)
        self.happened["aborted while it is restored"] += (
            running is not None and running.committed == running.lock.node.depth and running.request.reuse.from_host > 0
        )
        self.world.scheduler.abort(rid)

    def kill(self) -> None:
        self.happened["killed while it reads"] += bool(self.storage.waiting)
        self.storage.waiting.clear()
        self.storage.unheard.clear()
        self.boot()

    def lose(self) -> None:
        if self.storage.segments:
            self.happened["lost"] += 1
            del self.storage.segments[self.dice.choice(sorted(self.storage.segments))]

    def trouble(self) -> None:
        """One thing goes wrong."""
        what = self.dice.random()
        if what < 0.35:
            self.world.tree.evict(pages=self.dice.randint(0, 60), slots=self.dice.randint(0, 8))
        elif what < 0.60:
            self.abort()
        elif what < 0.70:
            self.world.executor.fail_next = True
        elif what < 0.75:
            self.world.executor.lose_next = True
        elif what < 0.77:
            self.happened["copies fail for ever"] += 1
            self.world.executor.refuses = KINDS[self.dice.choice(list(KINDS))]
        elif what < 0.88:
            self.lose()
        elif what < 0.96:
            assert self.world.scheduler.flush() == self.world.loop.idle
        else:
            self.kill()
        self.world.scheduler.check()

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            while len(self.live) < 6 and self.dice.random() < 0.5:
                self.ask()
            for _ in range(self.dice.randint(1, 6)):
                self.step()
            if self.dice.random() < 0.5:
                self.trouble()
        for _ in range(5000):
            if self.world.loop.idle and not self.live:
                break
            self.step()
        assert not self.live, "everybody gets an answer"
        assert not self.storage.waiting
        assert {str(failure) for failure in self.world.loop.failures} <= {FAILED, LOST}
        assert [counts.held + counts.protected for counts in self.world.scheduler.counts()] == [0, 0]


@pytest.mark.parametrize(("strategy", "overlap"), MODES)
def test_whatever_goes_wrong_no_token_changes_and_nothing_leaks(request, strategy, overlap) -> None:
    happened: Counter[str] = Counter()
    seeds = range(200 if request.config.getoption("--full") else 10)
    for seed, policy in itertools.product(seeds, POLICIES):
        print(seed, policy)  # shown when it fails
        chaos = Chaos(seed, strategy=strategy, overlap=overlap, host_policy=policy)
        chaos.run(60)
        happened += chaos.happened
    for what in (
        "resumed from the host", "resumed from the disk", "retracted", "failed", "failed in a restoring step", "lost",
        "begun again", "begun again in the middle", "copies fail for ever", "steps without tiers",
        "aborted while it is read", "aborted after it was read", "killed while it reads",
    ):  # fmt: skip
        assert happened[what] > 2, (what, happened)

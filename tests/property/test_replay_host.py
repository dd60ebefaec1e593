"""Replay with a host tier on random traffic: skipping steps changes nothing, and memory of both tiers is conserved at every step."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from tests.property.test_replay import arrivals, outcome, sessions, traffic_of, worlds
from tests.replay_worlds import one_second_steps, replay, uneven_steps
from twinpool.memory.host import HostArena
from twinpool.prefix.tree import PrefixTree
from twinpool.replay.host_link import HostLink
from twinpool.replay.run import Replay, Run
from twinpool.replay.trace import Trace
from twinpool.step import HostCopy, StepPlan

POLICIES = ["write_through", "write_through_selective", "write_back"]
LINK = HostLink(bytes_per_s=37.0, page_bytes=20, slot_bytes=30, n_layers=3, one_way=False, saves_beside=True)
COSTS = {
    "count": None,
    "even": dataclasses.replace(one_second_steps(), host=LINK),
    "uneven": dataclasses.replace(uneven_steps(), host=LINK),
    "one way": dataclasses.replace(uneven_steps(), host=dataclasses.replace(LINK, one_way=True)),
    "before": dataclasses.replace(uneven_steps(), host=dataclasses.replace(LINK, saves_beside=False)),
}


@st.composite
def tiers(draw: st.DrawFn) -> dict[str, object]:
    """Host memory that is too small, or not; sizes of a page and a state either way round."""
    return {
        "total_bytes": draw(st.sampled_from([60, 400, 1500, 6000])), "page_bytes": draw(st.sampled_from([10, 20, 30])),
        "slot_bytes": draw(st.sampled_from([10, 30, 70])), "max_slots": draw(st.sampled_from([None, None, 2, 8])),
    }  # fmt: skip


def host_of(tree: PrefixTree) -> list[tuple[int, int, bool, int]]:
    """(depth, pages, whether there is a state, of the last use) of every copy on the host, sorted."""
    found, nodes = [], [tree.root]
    for node in nodes:
        nodes.extend(node.children.values())
        if node.host_pages is not None or node.host_state:
            n_pages = len(node.host_pages) if node.host_pages is not None else 0
            found.append((node.depth, n_pages, bool(node.host_state), node.last_access))
    return sorted(found)


def everything(run: Run) -> dict[str, object]:
    """Everything a run says, with what the host holds and did."""
    tier = run.scheduler.book.tree.tier
    assert tier is not None
    return outcome(run) | {
        "host": dataclasses.asdict(tier.totals), "copies": host_of(run.scheduler.book.tree),
        "used": (tier.arena.used_pages, tier.arena.used_slots),
    }  # fmt: skip


def made(
    recorded: Trace, world: dict[str, object], tier: dict[str, object], options: dict[str, object], *, policy: str, cost: str,
    skip: bool,
) -> Replay:  # fmt: skip
    world = {**world, "radix": True, "host": HostArena(**tier), "host_policy": policy}
    return replay(recorded, traffic=traffic_of(recorded, options), cost=COSTS[cost], skip=skip, **world)


SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
ANY = {
    "recorded": sessions(), "world": worlds(), "tier": tiers(), "options": arrivals(), "policy": st.sampled_from(POLICIES),
    "cost": st.sampled_from(sorted(COSTS)),
}  # fmt: skip


@SETTINGS
@given(**ANY)
def test_skipping_steps_changes_nothing(recorded, world, tier, options, policy, cost) -> None:
    stepped = made(recorded, world, tier, options, policy=policy, cost=cost, skip=False).run()
    skipped = made(recorded, world, tier, options, policy=policy, cost=cost, skip=True).run()
    assert everything(skipped) == everything(stepped)
    assert skipped.plans <= stepped.plans == stepped.steps


@SETTINGS
@given(**ANY, skip=st.booleans())
def test_both_tiers_conserve_memory_and_every_request_ends(recorded, world, tier, options, policy, cost, skip) -> None:
    machine = made(recorded, world, tier, options, policy=policy, cost=cost, skip=skip)
    plans: list[StepPlan] = []

    def look(plan, result) -> None:
        machine.scheduler.check()
        plans.append(plan)

    machine.observers.append(look)
    run = machine.run()
    for counts in run.scheduler.counts():
        assert counts.held == counts.protected == 0
    for record in run.recorder.records:
        assert 0 <= record.from_host <= record.reused <= record.kv_matched < record.input_tokens
        if not record.refusal:
            assert record.reused + sum(tokens for _, tokens in record.gaps) == record.input_tokens
    for plan in plans:
        assert plan.repeat == 1 or not any(isinstance(order, HostCopy) for order in plan.orders)

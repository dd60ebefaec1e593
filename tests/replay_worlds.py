"""Hand-made traces and machines for replay: sessions in a few lines, pools to count on one's fingers, steps of one second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.worlds import make_world
from twinpool.clock import VirtualClock
from twinpool.prefix.tree import Node, PrefixTree
from twinpool.replay.cost import Calibration, CostModel
from twinpool.replay.disk import SimDisk
from twinpool.replay.run import Replay, Run
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Session, Trace, TraceRequest
from twinpool.replay.traffic import OpenTraffic, Traffic


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of a hand-made session."""

    blocks: Sequence[int]
    input_tokens: int
    output_tokens: int = 1
    arrival_s: float = 0.0
    think_s: float | None = None
    api_time_s: float | None = None


def session(name: str, *turns: Turn, namespace: str = "", parent: str | None = None, **lengths: int) -> Session:
    """A session of these turns."""
    requests = tuple(
        TraceRequest(
            session=name, index=index, arrival_s=turn.arrival_s, think_s=turn.think_s, input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens, blocks=np.array(turn.blocks, np.int64), api_time_s=turn.api_time_s,
        )
        for index, turn in enumerate(turns)
    )  # fmt: skip
    return Session(name, requests, namespace, parent, **lengths)


def trace(*sessions: Session, block_size: int | None = 1, clock: str = "trace") -> Trace:
    """A trace of these sessions."""
    return Trace("hand-made", "test", block_size, "global", clock, sessions)


def one_second_steps(*, step_s: float = 1.0) -> CostModel:
    """Every step takes as long as reading the weights, whatever is in it."""
    return CostModel(
        weight_bytes=step_s, expert_bytes=0.0, n_experts=0, experts_per_token=0, flops_per_token=0.0, attention_flops=0.0,
        kv_bytes_per_token=0.0, slot_bytes=0.0, reduce_bytes_per_token=0.0, flops_per_s=1.0, bandwidth_bytes_per_s=1.0,
        link_bytes_per_s=1.0,
        calibration=Calibration(flops_share=1.0, bandwidth_share=1.0, step_s=0.0, row_s=0.0),
    )  # fmt: skip


def uneven_steps() -> CostModel:
    """Steps whose length depends on everything a plan says, in seconds that no float holds exactly."""
    return CostModel(
        weight_bytes=0.1, expert_bytes=0.3, n_experts=8, experts_per_token=2, flops_per_token=0.017, attention_flops=0.0013,
        kv_bytes_per_token=0.0071, slot_bytes=0.003, reduce_bytes_per_token=0.001, flops_per_s=0.9,
        bandwidth_bytes_per_s=1.1, link_bytes_per_s=0.7,
        calibration=Calibration(flops_share=0.7, bandwidth_share=0.9, step_s=0.013, row_s=0.0007),
    )  # fmt: skip


def replay(
    recorded: Trace, *, traffic: Traffic | None = None, cost: CostModel | None, skip: bool = True,
    disk: dict[str, object] | None = None, **world: object,
) -> Replay:  # fmt: skip
    """A replay that is ready to run in a world of tests.worlds.make_world; arrivals as recorded unless given.

    disk: what a SimDisk below the host takes beside the clock.
    """
    clock = VirtualClock()
    storage = SimDisk(clock=clock, **disk) if disk is not None else None
    scheduler = make_world(storage=storage, clock=clock, **world).scheduler
    return Replay(
        scheduler=scheduler,
        clock=clock,
        tokens=TokenSpace(recorded),
        traffic=traffic or OpenTraffic(recorded, speed=1.0),
        cost=cost,
        disk=storage,
        skip=skip,
    )


def run(recorded: Trace, **options: object) -> Run:
    """Run it to its end."""
    return replay(recorded, **options).run()


def tree_of(tree: PrefixTree) -> list[tuple[bytes, int, int, bool]]:
    """What the prefix tree holds, without page and slot ids: each node's path, depth, pages, and whether it has a state."""
    found: list[tuple[bytes, int, int, bool]] = []

    def visit(node: Node, path: bytes) -> None:
        for child in node.children.values():
            whole = path + child.key
            found.append((whole, child.depth, len(child.pages), bool(child.state)))
            visit(child, whole)

    visit(tree.root, b"")
    return sorted(found)


def keys(recorded: Trace) -> list[tuple[str, int]]:
    """(session, index) of every request of a trace, sorted."""
    return sorted((request.session, request.index) for request in recorded.requests())


def numbers(count: int, *, first: int = 0) -> list[int]:
    """So many block ids from `first` on."""
    return list(range(first, first + count))

"""The cache core on the synthetic agent workload: requests per second of our own request path, beside the reference's.

    python bench/cache_core.py                                     # ours alone
    python bench/cache_core.py --peer PEER_PYTHON PEER_SCRIPT      # both, interleaved, with the ratio
    python bench/cache_core.py --publish-prefill ...               # prompts are published before decode, too, as both schedulers do

A request is matched, locked, given slots and pages, and released into the tree by the very functions the scheduler uses
(sched/admission.py, sched/publish.py); no model runs. PEER_SCRIPT is the bookkeeping peer of the reference (its engine path, Rust
core), which draws the same traffic from the same seed; hit rates must agree. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from twinpool.clock import VirtualClock
from twinpool.memory.pools import Pool
from twinpool.prefix.checkpoint import prefill_checkpoint
from twinpool.prefix.tree import PrefixTree
from twinpool.request import Int32Array, Request, SamplingParams
from twinpool.sched.admission import try_admit
from twinpool.sched.book import Book
from twinpool.sched.publish import pick_track, publish_chunk, release
from twinpool.sched.scheduler import Scheduler
from twinpool.sched.sequence import Sequence, Tracked
from twinpool.sched.shape import SchedulerShape
from twinpool.units import round_down

VOCAB, SYSTEM_TOKENS, MAX_CONTEXT, GRID = 150_000, 2000, 30_000, 64
TOKENS_PER_TURN, OUTPUT_TOKENS, JITTER = 600, 150, 0.25


@dataclass(frozen=True)
class Scenario:
    """One row of the table. share: the pools hold this share of all unique tokens; None for room enough."""

    name: str
    sessions: int
    turns: int
    order: str = "rr"
    page_size: int = 1
    share: float | None = None
    publish_prefill: bool = False


SCENARIOS = (
    Scenario("48 x 40, ample", 48, 40),
    Scenario("500 x 20, 20 %, Zipf", 500, 20, order="zipf", share=0.2),
    Scenario("500 x 20, 20 %, round robin", 500, 20, share=0.2),
    Scenario("2000 x 10, ample, page 64", 2000, 10, page_size=64),
    Scenario("2000 x 10, ample, page 1", 2000, 10),
)


class Traffic:
    """Sessions that take turns on a shared system prompt; the same random draws as the peer makes."""

    def __init__(self, scenario: Scenario, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self.system = self._tokens(SYSTEM_TOKENS)
        spread = self._rng.uniform(1 - JITTER, 1 + JITTER, (scenario.sessions, scenario.turns))
        self._per_turn = np.maximum((spread * TOKENS_PER_TURN).astype(int), 4)
        self._outputs = np.maximum((self._per_turn * (OUTPUT_TOKENS / TOKENS_PER_TURN)).astype(int), 2)
        room = MAX_CONTEXT - SYSTEM_TOKENS
        self.unique_tokens = SYSTEM_TOKENS + int(np.minimum(self._per_turn.sum(axis=1), room).sum())
        self._order = self._draw_order(scenario)

    def _tokens(self, n: int) -> Int32Array:
        return self._rng.integers(1, VOCAB, n, dtype=np.int64).astype(np.int32)

    def _draw_order(self, scenario: Scenario) -> list[tuple[int, int]]:
        if scenario.order == "rr":
            return [(session, turn) for turn in range(scenario.turns) for session in range(scenario.sessions)]
        weights = 1.0 / np.arange(1, scenario.sessions + 1) ** 0.9
        picks = self._rng.choice(scenario.sessions, size=scenario.sessions * scenario.turns, p=weights / weights.sum())
        done = np.zeros(scenario.sessions, int)
        order = []
        for session in picks:
            if done[session] < scenario.turns:
                order.append((int(session), int(done[session])))
                done[session] += 1
        return order

    def __iter__(self) -> Iterator[tuple[Int32Array, Int32Array]]:
        """(prompt, output) of each request in order of arrival."""
        contexts: dict[int, Int32Array] = {}
        for session, turn in self._order:
            context = contexts.get(session, self.system)
            n_new, n_output = int(self._per_turn[session, turn]), int(self._outputs[session, turn])
            if len(context) + n_new > MAX_CONTEXT:
                continue
            prompt = np.concatenate((context, self._tokens(n_new - n_output)))
            output = self._tokens(n_output)
            contexts[session] = np.concatenate((prompt, output))
            yield prompt, output


def pool_sizes(scenario: Scenario, unique_tokens: int) -> tuple[int, int]:
    """(KV tokens, state slots), as the peer sizes its own."""
    page = scenario.page_size
    if scenario.share is not None:
        return int(unique_tokens * scenario.share), int(scenario.sessions * scenario.turns * scenario.share)
    kv_tokens = int(unique_tokens * 1.02 + (scenario.sessions + 64) * page * 2 + MAX_CONTEXT + 4096)
    slots_per_request = 3 if page > 1 else 1
    n_states = scenario.sessions * scenario.turns * (2 if scenario.publish_prefill else 1)
    return -(-kv_tokens // page) * page, n_states + 3 * (slots_per_request + 1) + 16


def build(scenario: Scenario, unique_tokens: int) -> Scheduler:
    """A scheduler over pools of the scenario's size; extra_buffer with pages, no_buffer without, as the reference needs."""
    kv_tokens, n_slots = pool_sizes(scenario, unique_tokens)
    page, with_pages = scenario.page_size, scenario.page_size > 1
    pages = Pool(name="pages", first=1, count=kv_tokens // page)
    slots = Pool(name="slots", first=1, count=n_slots)
    tree = PrefixTree(pages=pages, slots=slots, page_size=page, grid_tokens=GRID if with_pages else 1)
    shape = SchedulerShape(
        page_size=page, grid_tokens=GRID, track_tokens=GRID, strategy="extra_buffer" if with_pages else "no_buffer",
        track_slots=2 if with_pages else 0, radix_cache=True, overlap=with_pages, max_running_requests=5,
        max_queued_requests=None, chunked_prefill_size=None, max_prefill_tokens=1 << 20, prefill_max_requests=None,
        context_len=MAX_CONTEXT + 4096,
    )  # fmt: skip
    return Scheduler(shape=shape, pages=pages, slots=slots, tree=tree, clock=VirtualClock())


def publish_prompt(book: Book, sequence: Sequence) -> None:
    """Leave the prompt's checkpoints in the tree: one on the grid or at the fork, or (no_buffer) at the fork and at the end."""
    shape, start, end, fork = book.shape, sequence.planned, sequence.prefill_end, sequence.branching
    if shape.track_slots:
        positions = [prefill_checkpoint(start=start, end=end, grid_tokens=GRID, branching=fork)]
    else:
        positions = [fork, end] if fork is not None and start < fork < end else [end]
    for at in positions:
        if at is None:
            continue
        slot = pick_track(book, sequence)
        assert slot is not None
        sequence.pending_tracks.discard(slot)
        sequence.planned = sequence.committed = at
        sequence.tracked.append(Tracked(at, slot))
        publish_chunk(book, sequence)


def serve(book: Book, request: Request, output: Int32Array, *, publish_prefill: bool) -> None:
    """One request from the queue to its release, as sched/ does it, its forward steps left out."""
    page = book.shape.page_size
    book.waiting.push(request)
    sequence = try_admit(book, request)
    assert sequence is not None, "the pools are too small for one request"
    end = request.prompt_len + len(output) - 1  # the last token has no KV yet
    short = sequence.pages_short(end, page)
    assert book.tree.room_pages(short)
    ids = book.pages.alloc(short)
    assert ids is not None
    sequence.add_pages(ids)
    if publish_prefill:
        publish_prompt(book, sequence)
    request.tokens[request.prompt_len :] = output
    request.n_tokens = request.prompt_len + len(output)
    sequence.planned = sequence.committed = end
    at = round_down(end, GRID)
    if book.shape.track_slots and at > sequence.owned_from:
        slot = pick_track(book, sequence)
        assert slot is not None
        sequence.pending_tracks.discard(slot)
        sequence.tracked.append(Tracked(at, slot))
    release(book, sequence, publish=True)
    book.orders.clear()
    book.joined.clear()
    book.left.clear()


def run_ours(scenario: Scenario) -> dict[str, float]:
    """Requests per second and token hit rate; the pools are checked at the end."""
    traffic = Traffic(scenario)
    scheduler = build(scenario, traffic.unique_tokens)
    busy_s, n_requests, hit, asked = 0.0, 0, 0, 0
    gc.collect()
    gc.freeze()
    for prompt, output in traffic:
        params = SamplingParams(max_tokens=len(output), temperature=0.0, ignore_eos=True)
        began_s = time.perf_counter()
        request = Request.new(rid=n_requests, prompt=prompt, params=params)
        serve(scheduler.book, request, output, publish_prefill=scenario.publish_prefill)
        busy_s += time.perf_counter() - began_s
        n_requests += 1
        hit += request.reuse.reused
        asked += len(prompt)
    scheduler.check()
    pages, slots = scheduler.counts()
    assert pages.held == slots.held == pages.protected == slots.protected == 0
    gc.unfreeze()
    return {"req_per_s": n_requests / busy_s, "hit_rate": hit / asked}


def run_peer(scenario: Scenario, peer: list[str]) -> dict[str, float]:
    """The same traffic through the reference's engine path with its Rust core."""
    command = [
        *peer, "--sessions", str(scenario.sessions), "--turns", str(scenario.turns), "--order", scenario.order,
        "--page-size", str(scenario.page_size), "--core", "rust", "--path", "engine", "--verify", "--json",
    ]  # fmt: skip
    if scenario.publish_prefill:
        command.append("--checkpoint-prefill")
    if scenario.share is not None:
        kv_tokens, n_slots = pool_sizes(scenario, Traffic(scenario).unique_tokens)
        command += ["--kv-tokens", str(kv_tokens), "--state-slots", str(n_slots)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return {"req_per_s": result["req_per_s"], "hit_rate": result["hit_rate"]}


def main() -> None:
    """Run all scenarios and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--publish-prefill", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains TEXT")
    args = parser.parse_args()
    results = {}
    print(f"{'scenario':28} {'twinpool req/s':>14} {'hit':>6} {'reference':>10} {'hit':>6} {'ratio':>6}")
    for scenario in (s for s in SCENARIOS if args.only in s.name):
        scenario = replace(scenario, publish_prefill=args.publish_prefill)
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(run_ours(scenario))
            if args.peer:
                theirs.append(run_peer(scenario, args.peer))
        mine = {key: statistics.median(run[key] for run in ours) for key in ours[0]}
        row = {"req_per_s": round(mine["req_per_s"]), "hit_rate": round(mine["hit_rate"], 4)}
        line = f"{scenario.name:28} {mine['req_per_s']:14,.0f} {mine['hit_rate']:6.3f}"
        if theirs:
            peer = {key: statistics.median(run[key] for run in theirs) for key in theirs[0]}
            row |= {"peer_req_per_s": peer["req_per_s"], "peer_hit_rate": peer["hit_rate"]}
            row["ratio"] = round(mine["req_per_s"] / peer["req_per_s"], 2)
            line += f" {peer['req_per_s']:10,.0f} {peer['hit_rate']:6.3f} {row['ratio']:6.2f}"
        results[scenario.name] = row
        print(line, flush=True)
    print(json.dumps({"rounds": args.rounds, "publish_prefill": args.publish_prefill, "results": results}))


if __name__ == "__main__":
    main()

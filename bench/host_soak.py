"""Soak of the host and disk tiers: more sessions than all tiers hold, with aborts, flushes and restarts, checked against no cache at all.

    python bench/host_soak.py [--seconds 600] [--policy rotate] [--disk-gb 0.06] [--life-s 60] [--check 0.25]

Sessions of the demo model come back at random, some more often than others, a few at once; some requests are cancelled on the way. The
engine lives for so many seconds (--life-s): it is closed, half the time while requests run, and a new one starts on the same folder, with
the next write policy when they rotate. Whenever nothing runs, every page and slot of device and host must be where the books say, and the
folder within its limit. A share of the answers (--check) is computed again by an engine without a cache and must be the same tokens. The
last line is JSON; the exit status is 1 for a leak or a mismatch.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from twinpool import LLM, SamplingParams
from twinpool.request import Request

N_SESSIONS, AT_ONCE, MAX_TOKENS = 120, 4, 1000
OPENING_TOKENS, TURN_TOKENS, NEW_TOKENS = (100, 400), (5, 60), (4, 40)
ABORTED, FLUSHED = 0.05, 0.005  # shares of requests and of rounds
FIRST_TOKEN, LAST_TOKEN = 300, 2900
# A dozen sessions fit on the device, and some forty with the host.
DEVICE = {
    "device_memory": "512MiB",
    "max_total_tokens": 6144,
    "max_mamba_cache_size": 24,
    "max_running_requests": AT_ONCE,
}
HOST_GB = 0.03
POLICIES = ("write_through", "write_through_selective", "write_back")
DISK_EVENTS = ("written", "read", "evicted", "no_parent", "no_room", "paused", "damaged", "vanished", "failed")


@dataclass
class Turn:
    """A request under way, and what it has said."""

    session: int
    request: Request
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How the engine under test is made: the write policies of its lives in turn, seconds a life, and the folder, if any."""

    policies: tuple[str, ...]
    life_s: float
    folder: str | None
    disk_gb: float
    threads: int

    def boot(self, life: int) -> LLM:
        """The engine of one life."""
        disk: dict[str, Any] = {}
        if self.folder is not None:
            disk = {
                "hicache_storage_backend": "file",
                "hicache_storage_path": self.folder,
                "hicache_storage_size": self.disk_gb,
            }
        return LLM(
            enable_hierarchical_cache=True, hicache_size=HOST_GB, threads=self.threads, poison_freed=True,
            hicache_write_policy=self.policies[life % len(self.policies)], **disk, **DEVICE,
        )  # fmt: skip


@dataclass
class Soak:
    """The run: both engines, the sessions so far, and what has been counted."""

    plan: Plan
    plain: LLM
    rng: np.random.Generator
    check_share: float
    sessions: list[list[int]] = field(default_factory=lambda: [[] for _ in range(N_SESSIONS)])
    counts: Counter[str] = field(default_factory=Counter)
    gaps: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    disk: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.llm = self.plan.boot(0)
        self.born_s = time.monotonic()

    def end_life(self) -> None:
        """Close the engine, keep what it counted, and look at what it has left in the folder."""
        snapshot, disk = self.llm.engine.snapshot(), self.llm.engine.view_disk()
        assert snapshot.host is not None
        self.host.update(asdict(snapshot.host.totals))
        self.host["failed_restores"] += snapshot.totals.failed_restores
        self.counts["lives"] += 1
        self.llm.close()
        if disk is None or self.plan.folder is None:
            return
        disk = self.llm.engine.view_disk()
        assert disk is not None
        self.disk.update({name: getattr(disk.store, name) for name in DISK_EVENTS})
        self.disk.update(late=disk.late_requests, dropped=disk.dropped_segments)
        used_bytes = sum(path.stat().st_size for path in Path(self.plan.folder).iterdir())
        if used_bytes != disk.store.used_bytes or used_bytes > disk.store.limit_bytes:
            self.leaks.append(
                f"the folder has {used_bytes} bytes, the books say {disk.store.used_bytes} of {disk.store.limit_bytes}"
            )

    def next_life(self) -> None:
        """A new engine on the same folder: all that it knows of the sessions is there."""
        self.end_life()
        self.llm = self.plan.boot(self.counts["lives"])
        self.born_s = time.monotonic()

    def tokens(self, bounds: tuple[int, int]) -> list[int]:
        """Some random tokens, as many as a random number within the bounds."""
        return list(self.rng.integers(FIRST_TOKEN, LAST_TOKEN, self.rng.integers(*bounds)).tolist())

    def start(self, session: int) -> Turn:
        """The next turn of a session, or its first one if it is new or has become too long."""
        so_far = self.sessions[session]
        if not so_far or len(so_far) > MAX_TOKENS:
            self.counts["openings"] += 1
            prompt = self.tokens(OPENING_TOKENS)
        else:
            prompt = [*so_far, *self.tokens(TURN_TOKENS)]
        params = SamplingParams(max_tokens=int(self.rng.integers(*NEW_TOKENS)), temperature=0.0, ignore_eos=True)
        (request,) = self.llm.engine.add(prompt, params)
        abort_after = int(self.rng.integers(params.max_tokens)) if self.rng.random() < ABORTED else None
        return Turn(session, request, prompt, params, abort_after)

    def round(self) -> None:
        """A few sessions at once, to their ends or to that of the engine; then the books, and some of the answers."""
        engine = self.llm.engine
        # Squared: low numbers come back often, high ones seldom.
        chosen = {int(N_SESSIONS * self.rng.random() ** 2) for _ in range(AT_ONCE)}
        turns = {turn.request.rid: turn for turn in map(self.start, sorted(chosen))}
        ends = time.monotonic() - self.born_s > self.plan.life_s
        steps = int(self.rng.integers(40)) if ends and self.rng.random() < 0.5 else None
        while engine.has_work and steps != 0:
            for output in engine.step():
                turn = turns[output.request.rid]
                turn.tokens += output.tokens
                if turn.abort_after is not None and len(turn.tokens) > turn.abort_after:
                    engine.abort(turn.request.rid)
            steps = None if steps is None else steps - 1
        if not engine.has_work:
            self.check()
        if ends:
            self.counts["closed_running"] += engine.has_work
            self.next_life()
        for turn in turns.values():
            self.finish(turn)

    def check(self) -> None:
        """Nothing runs: flush now and then, and compare the books."""
        engine = self.llm.engine
        if self.rng.random() < FLUSHED:
            self.counts["flushes"] += engine.flush_cache()
        self.counts["rounds"] += 1
        try:
            engine.check_idle(thorough=self.counts["rounds"] % 10 == 0)
        except AssertionError as error:
            self.leaks.append(str(error))

    def finish(self, turn: Turn) -> None:
        """Count a turn, keep what it said, and compare it if it is one of those."""
        reuse = turn.request.reuse
        self.counts["requests"] += 1
        self.counts["aborted"] += turn.abort_after is not None
        self.counts["prompt"] += reuse.prompt
        self.counts["reused"] += reuse.reused
        self.counts["from_host"] += reuse.from_host
        self.counts["from_storage"] += reuse.from_storage
        self.counts["storage_hits"] += reuse.from_storage > 0
        self.counts["host_hits"] += reuse.from_host > 0
        self.counts["device_hits"] += reuse.reused > 0 and not (reuse.from_host or reuse.from_storage)
        self.gaps.update(dict(reuse.gaps))
        self.sessions[turn.session] = [*turn.prompt, *turn.tokens]
        if turn.tokens and self.rng.random() < self.check_share:
            self.counts["compared"] += 1
            (plain,) = self.plain.generate([turn.prompt], turn.params)
            self.counts["mismatches"] += list(plain.token_ids)[: len(turn.tokens)] != turn.tokens

    def report(self, elapsed_s: float) -> dict[str, Any]:
        """Everything that was counted, over all lives."""
        names = (
            "requests", "openings", "aborted", "flushes", "lives", "closed_running", "device_hits", "host_hits", "storage_hits",
            "compared", "mismatches",
        )  # fmt: skip
        counts = {name: self.counts[name] for name in names}
        tokens = ("reused", "from_host", "from_storage")
        shares = {name: round(self.counts[name] / self.counts["prompt"], 4) for name in tokens}
        return {
            "seconds": round(elapsed_s, 1), **counts, **shares, "gaps": dict(self.gaps), "host": dict(self.host),
            "disk": dict(self.disk), "leaks": len(self.leaks),
        }  # fmt: skip


def main() -> None:
    """Run for so long, then say what happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument(
        "--policy", choices=(*POLICIES, "rotate"), default="rotate", help="rotate: another one each life"
    )
    parser.add_argument("--disk-gb", type=float, default=0.06, help="limit of the disk tier's folder; 0: no disk tier")
    parser.add_argument(
        "--life-s", type=float, default=60.0, help="seconds until the engine is closed and booted again"
    )
    parser.add_argument("--check", type=float, default=0.25, help="share of the answers that are computed again")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    plain = LLM(disable_radix_cache=True, threads=args.threads, **DEVICE)
    with tempfile.TemporaryDirectory(prefix="twinpool-soak-") as folder:
        plan = Plan(
            POLICIES if args.policy == "rotate" else (args.policy,), args.life_s, folder if args.disk_gb else None, args.disk_gb,
            args.threads,
        )  # fmt: skip
        soak = Soak(plan, plain, np.random.default_rng(args.seed), args.check)
        began_s = time.monotonic()
        while time.monotonic() - began_s < args.seconds and not soak.leaks:
            soak.round()
        soak.end_life()
    report = soak.report(time.monotonic() - began_s)
    for name, value in report.items():
        print(f"{name:16}  {value}")
    for leak in soak.leaks:
        print(leak)
    plain.close()
    print(json.dumps({"policy": args.policy, **report}))
    sys.exit(1 if soak.leaks or soak.counts["mismatches"] or soak.disk["damaged"] or soak.disk["failed"] else 0)


if __name__ == "__main__":
    main()

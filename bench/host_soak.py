"""Soak of the host tier: more sessions than device and host hold together, with aborts and flushes, checked against no cache at all.

    python bench/host_soak.py [--seconds 600] [--policy write_through] [--check 0.25]

Sessions of the demo model come back at random, some more often than others, a few at once; some requests are cancelled on the way.
Whenever nothing runs, every page and slot of device and host must be where the books say. A share of the answers (--check) is computed
again by an engine without a cache and must be the same tokens. The last line is JSON; the exit status is 1 for a leak or a mismatch.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
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


@dataclass
class Turn:
    """A request under way, and what it has said."""

    session: int
    request: Request
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None
    tokens: list[int] = field(default_factory=list)


@dataclass
class Soak:
    """The run: both engines, the sessions so far, and what has been counted."""

    llm: LLM
    plain: LLM
    rng: np.random.Generator
    check_share: float
    sessions: list[list[int]] = field(default_factory=lambda: [[] for _ in range(N_SESSIONS)])
    counts: Counter[str] = field(default_factory=Counter)
    gaps: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)

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
        """A few sessions at once, to their ends; then the books, and some of the answers."""
        engine = self.llm.engine
        # Squared: low numbers come back often, high ones seldom.
        chosen = {int(N_SESSIONS * self.rng.random() ** 2) for _ in range(AT_ONCE)}
        turns = {turn.request.rid: turn for turn in map(self.start, sorted(chosen))}
        while engine.has_work:
            for output in engine.step():
                turn = turns[output.request.rid]
                turn.tokens += output.tokens
                if turn.abort_after is not None and len(turn.tokens) > turn.abort_after:
                    engine.abort(turn.request.rid)
        for turn in turns.values():
            self.finish(turn)
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
        self.counts["host_hits"] += reuse.from_host > 0
        self.counts["device_hits"] += reuse.reused > 0 and not reuse.from_host
        self.gaps.update(dict(reuse.gaps))
        self.sessions[turn.session] = [*turn.prompt, *turn.tokens]
        if turn.tokens and self.rng.random() < self.check_share:
            self.counts["compared"] += 1
            (plain,) = self.plain.generate([turn.prompt], turn.params)
            self.counts["mismatches"] += list(plain.token_ids)[: len(turn.tokens)] != turn.tokens

    def report(self, elapsed_s: float) -> dict[str, Any]:
        """Everything that was counted."""
        host = self.llm.engine.snapshot().host
        assert host is not None
        names = ("requests", "openings", "aborted", "flushes", "device_hits", "host_hits", "compared", "mismatches")
        counts = {name: self.counts[name] for name in names}
        shares = {name: round(self.counts[name] / self.counts["prompt"], 4) for name in ("reused", "from_host")}
        totals = {name: getattr(host.totals, name) for name in host.totals.__slots__}
        failed = self.llm.engine.snapshot().totals.failed_restores
        return {
            "seconds": round(elapsed_s, 1), **counts, **shares, "failed_restores": failed, "gaps": dict(self.gaps),
            "host": totals, "leaks": len(self.leaks),
        }  # fmt: skip


def main() -> None:
    """Run for so long, then say what happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--policy", default="write_through")
    parser.add_argument("--check", type=float, default=0.25, help="share of the answers that are computed again")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    llm = LLM(
        enable_hierarchical_cache=True, hicache_size=HOST_GB, hicache_write_policy=args.policy, threads=args.threads,
        poison_freed=True, **DEVICE,
    )  # fmt: skip
    plain = LLM(disable_radix_cache=True, threads=args.threads, **DEVICE)
    soak = Soak(llm, plain, np.random.default_rng(args.seed), args.check)
    began_s = time.monotonic()
    while time.monotonic() - began_s < args.seconds and not soak.leaks:
        soak.round()
    report = soak.report(time.monotonic() - began_s)
    for name, value in report.items():
        print(f"{name:16}  {value}")
    for leak in soak.leaks:
        print(leak)
    llm.close()
    plain.close()
    print(json.dumps({"policy": args.policy, **report}))
    sys.exit(1 if soak.leaks or soak.counts["mismatches"] else 0)


if __name__ == "__main__":
    main()

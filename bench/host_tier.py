"""Time to the first token of a resumed session: from the device, the host, the disk, and computed again; one run, interleaved.

    python bench/host_tier.py [MODEL_FOLDER] [--tokens 8192] [--rounds 7] [--threads 2] [--disk DIR]

A round empties the cache, asks a session's next turn (all of it is computed), asks it again (the device has it), lets other sessions
push it out, and asks once more (the host has it); then memory is emptied as by a restart, the system's copies of the files are dropped,
and it is asked a last time (the disk has it). The answers must be the same token. Nothing is timed while anything is being written.
Medians are printed, the last line is JSON. Without a model folder the demo model is used, without --disk a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twinpool import LLM, SamplingParams
from twinpool.engine.core import StepReport
from twinpool.request import Request
from twinpool.sched.book import Retraction
from twinpool.units import MIB, round_down

NEW_TOKENS = 16  # what a turn adds to the session
N_PUSHING = 3  # sessions that take its place on the device
FIRST_TOKEN, LAST_TOKEN = 300, 2900  # of the demo's vocabulary; any are as good
PLACES = ("recomputed", "device", "host", "disk")
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass
class Copies:
    """An engine observer that adds up the seconds of copies back from the host."""

    load_s: float = 0.0

    def on_step(self, report: StepReport) -> None:
        """A step was committed."""
        self.load_s += report.result.load_s

    def on_finish(self, request: Request) -> None:
        """A request ended."""

    def on_retraction(self, retraction: Retraction) -> None:
        """Requests went back to the queue."""


@dataclass(frozen=True)
class Asked:
    """One answer: seconds to its token, the token, and the prompt tokens that were reused, from the host, and from the disk."""

    seconds: float
    token: int
    reused: int
    from_host: int
    from_disk: int


def wait_for_disk(llm: LLM) -> None:
    """Until everything it was given is written."""
    while (disk := llm.engine.view_disk()) is not None and disk.pending_bytes:
        time.sleep(0.01)


def ask(llm: LLM, prompt: list[int]) -> Asked:
    """The first token of a prompt, once everything before it is written."""
    wait_for_disk(llm)
    began_s = time.perf_counter()
    (answer,) = llm.generate([prompt], ONE_TOKEN)
    took_s, reuse = time.perf_counter() - began_s, answer.reuse
    return Asked(took_s, answer.token_ids[0], answer.cached_tokens, reuse.from_host, reuse.from_storage)


def forget_memory(llm: LLM, folder: Path) -> None:
    """Empty device and host, and the system's copies of the folder's files."""
    assert llm.engine.flush_cache()
    wait_for_disk(llm)
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def play_round(llm: LLM, rng: np.random.Generator, n_tokens: int, folder: Path) -> dict[str, Asked]:
    """The same turn from every place."""

    def session() -> list[int]:
        return list(rng.integers(FIRST_TOKEN, LAST_TOKEN, n_tokens + NEW_TOKENS).tolist())

    assert llm.engine.flush_cache()
    prompt = session()
    found = {"recomputed": ask(llm, prompt), "device": ask(llm, prompt)}
    for _ in range(N_PUSHING):
        ask(llm, session())
    found["host"] = ask(llm, prompt)
    forget_memory(llm, folder)
    found["disk"] = ask(llm, prompt)
    assert len({asked.token for asked in found.values()}) == 1, f"the answer depends on the place: {found}"
    # States lie on a grid, and the last one that lies before the new turn is the least that must be found.
    least = round_down(n_tokens, llm.engine.facts.resolved.grids.checkpoint_tokens)
    places = [[n >= least for n in (asked.reused, asked.from_host, asked.from_disk)] for asked in found.values()]
    assert places == [[False] * 3, [True, False, False], [True, True, False], [True, False, True]], found
    return found


def main() -> None:
    """Run the rounds in a folder for the disk tier."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--host-gb", type=float, default=1.0)
    parser.add_argument("--disk", type=Path, help="a folder that need not exist (default: a temporary one)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.disk is not None:
        run(args, args.disk)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> None:
    """Play the rounds and print the table."""
    llm = LLM(
        args.model, device_memory="2GiB", threads=args.threads, max_running_requests=1, max_mamba_cache_size=8,
        max_total_tokens=args.tokens * 2, enable_hierarchical_cache=True, hicache_size=args.host_gb,
        hicache_storage_backend="file", hicache_storage_path=str(folder), hicache_storage_prefetch_policy="wait_complete",
    )  # fmt: skip
    grid = llm.engine.facts.resolved.grids.checkpoint_tokens
    if (
        args.tokens + NEW_TOKENS
    ) % grid == 0:  # the state at the very end would be one token too deep for the same prompt
        raise SystemExit(
            f"--tokens {args.tokens} and a turn of {NEW_TOKENS} end on the grid of {grid}: use {args.tokens + 1}."
        )
    copies, rng = Copies(), np.random.default_rng(0)
    llm.engine.observers.append(copies)
    play_round(llm, rng, args.tokens, folder)  # warms caches and threads
    loaded_before, copies.load_s = llm.engine.snapshot().host.loaded_bytes, 0.0
    rounds = [play_round(llm, rng, args.tokens, folder) for _ in range(args.rounds)]
    loaded = (
        (llm.engine.snapshot().host.loaded_bytes - loaded_before) / args.rounds / 2
    )  # from the host and from the disk
    load_s = copies.load_s / args.rounds / 2
    seconds = {place: statistics.median(found[place].seconds for found in rounds) for place in PLACES}
    print(f"{args.tokens:,} tokens and a turn of {NEW_TOKENS}, {args.rounds} rounds; time to the first token, median")
    for place in PLACES:
        print(f"  {place:10}  {seconds[place] * 1e3:9.1f} ms   {seconds['recomputed'] / seconds[place]:6.1f} x")
    print(f"  a restore copies {loaded / MIB:.1f} MiB in {load_s * 1e3:.1f} ms")
    llm.engine.check_idle(thorough=True)
    llm.close()
    result = {"tokens": args.tokens, "rounds": args.rounds, "threads": args.threads, "ttft_s": seconds}
    print(json.dumps({**result, "restore_bytes": loaded, "restore_copy_s": load_s}))


if __name__ == "__main__":
    main()

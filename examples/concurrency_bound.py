"""Many short requests: the state pool caps how many run at once while KV idles; a larger state share lifts the cap.

python examples/concurrency_bound.py
"""

from __future__ import annotations

import logging

from twinpool import LLM, SamplingParams

REQUESTS = 32
PROMPTS = [f"And in the {year}th year of the king" for year in range(REQUESTS)]
ANSWER = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


class Peaks:
    """An engine observer that keeps the highest counts."""

    def __init__(self) -> None:
        self.running = 0
        self.kv_usage = 0.0
        self.steps = 0

    def on_step(self, report) -> None:
        """A step was committed."""
        self.steps += 1
        self.running = max(self.running, report.snapshot.n_running)
        self.kv_usage = max(self.kv_usage, report.snapshot.pages.usage)

    def on_finish(self, request) -> None:
        """Not counted here."""

    def on_retraction(self, retraction) -> None:
        """Not counted here."""


def run(ratio: float) -> tuple[dict[str, object], list[str]]:
    """One engine at one state : KV ratio; returns its table row and the answers."""
    peaks = Peaks()
    with LLM(device_memory="64MiB", mamba_full_memory_ratio=ratio) as llm:
        llm.engine.observers.append(peaks)
        answers = [answer.text for answer in llm.generate(PROMPTS, ANSWER)]
        ledger = llm.engine.facts.ledger
    row = {
        "state : KV": ratio, "slots": ledger.max_mamba_cache_size, "KV tokens": ledger.kv_tokens,
        "allowed": ledger.max_running_requests, "ran at once": peaks.running, "KV used": f"{peaks.kv_usage:.0%}", "steps": peaks.steps,
    }  # fmt: skip
    return row, answers


def main() -> None:
    """Print one line a ratio; the answers must not depend on it."""
    logging.disable(logging.WARNING)
    said: list[list[str]] = []
    print(f"{REQUESTS} requests at once, 5 state slots each\n")
    for ratio in (0.3, 0.9, 4.0):
        row, answers = run(ratio)
        if not said:
            print("  ".join(f"{name:>11}" for name in row))
        print("  ".join(f"{value!s:>11}" for value in row.values()))
        said.append(answers)
    assert said[0] == said[1] == said[2], "answers depend on the split"
    print("\nThe states bind long before KV does: raise --mamba-full-memory-ratio (or pin --max-mamba-cache-size).")


if __name__ == "__main__":
    main()

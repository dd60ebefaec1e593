"""More sessions than checkpoints: returning sessions are read again from the start although all their KV would fit.

python examples/residency_bound.py
"""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from twinpool import LLM, SamplingParams

SESSIONS, TURNS, NEW_TOKENS = 12, 4, 70
ANSWER = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def run(slots: int) -> tuple[dict[str, object], list[tuple[int, ...]]]:
    """All sessions take turns on one engine; returns its table row and every answer."""
    rng = np.random.default_rng(0)
    histories: list[list[int]] = [[] for _ in range(SESSIONS)]
    answers: list[tuple[int, ...]] = []
    gaps: Counter[str] = Counter()
    reused = known = 0
    with LLM(device_memory="128MiB", max_mamba_cache_size=slots, max_running_requests=1) as llm:
        for _ in range(TURNS):
            for session, history in enumerate(histories):
                prompt = history + rng.integers(3, 3000, NEW_TOKENS).tolist()
                (answer,) = llm.generate([prompt], ANSWER)
                reused += answer.cached_tokens
                known += len(history)
                gaps.update(dict(answer.reuse.gaps))
                answers.append(answer.token_ids)
                histories[session] = prompt + list(answer.token_ids)
        ledger = llm.engine.facts.ledger
    row = {
        "slots": slots, "KV tokens": ledger.kv_tokens, "all sessions": sum(map(len, histories)),
        "reused": f"{reused / known:.0%}", "state_evicted": gaps["state_evicted"], "kv_evicted": gaps["kv_evicted"],
    }  # fmt: skip
    return row, answers


def main() -> None:
    """Print one line a pool size; the answers must not depend on it."""
    logging.disable(logging.WARNING)
    said: list[list[tuple[int, ...]]] = []
    print(f"{SESSIONS} sessions in turn, {TURNS} turns each, one running at a time (5 slots)\n")
    for slots in (8, 16, 24, 96):
        row, answers = run(slots)
        if not said:
            print("  ".join(f"{name:>13}" for name in row))
        print("  ".join(f"{value!s:>13}" for value in row.values()))
        said.append(answers)
    assert all(answers == said[0] for answers in said), "answers depend on the pool"
    print(
        "\nKV for every session fits in each case. What is missing is checkpoints to resume from: raise --max-mamba-cache-size."
    )


if __name__ == "__main__":
    main()

"""No hit, device hit, host hit and disk hit say the same to the last bit, wherever the shared prefix ends and the prompt is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.agreement.llm_runs import STRATEGIES, checkpoint, greedy, prompt, say_alone
from tests.agreement.test_disk_tier import disk_llm, tier
from tests.agreement.test_host_tier import leave_device
from twinpool import LLM
from twinpool.engine.llm import Completion

N_TOKENS, BASE_TOKENS = 8, 200
NEVER = 1 << 30  # no prefix is worth reading from the disk
# Tokens that a prompt shares with the one before: around pages of 16 and the grid of 64, odd and even; every fourth per commit.
ENDS = (63, 64, 65, 77, 15, 16, 17, 33, 95, 96, 97, 112, 127, 128, 129, 150, 190, 199)
NAMES = ("extra_buffer", "extra_buffer, no overlap", "lazy", "no_buffer")
CHUNKS = {1: (17, 63, 64, 70, 128, -1), 4: (20, 64, 76, -1), 16: (16, 48, 64, 144, -1)}
PER_COMMIT = {
    ("extra_buffer", 1, 63), ("extra_buffer", 16, 48), ("extra_buffer, no overlap", 4, 20), ("lazy", 1, 70), ("lazy", 16, 144),
    ("no_buffer", 1, 17), ("no_buffer", 1, -1),
}  # fmt: skip
CASES = [
    pytest.param(name, page, chunk, marks=() if (name, page, chunk) in PER_COMMIT else pytest.mark.full)
    for name in NAMES
    for page, chunks in CHUNKS.items()
    for chunk in chunks
    if page == 1 or name != "no_buffer"
]


def nowhere(llm: LLM) -> None:
    tier(llm).threshold_tokens = NEVER
    llm.flush_cache()


def on_device(llm: LLM) -> None:
    """It is there since the base was said."""


def on_disk(llm: LLM) -> None:
    tier(llm).writer.flush()
    tier(llm).threshold_tokens = 1
    llm.flush_cache()


# Where the shared prefix is before a prompt is said, and what of it came from there.
PLACES: dict[str, tuple[Callable[[LLM], None], Callable[[Completion], int]]] = {
    "nowhere": (nowhere, lambda done: -done.reuse.reused),
    "device": (on_device, lambda done: done.reuse.by_tier["device"]),
    "host": (leave_device, lambda done: done.reuse.from_host),
    "disk": (on_disk, lambda done: done.reuse.from_storage),
}


def ask(place: str, end: int) -> list[int]:
    """The base up to `end`, and then what no other prompt has."""
    return [*prompt(10, BASE_TOKENS)[:end], *prompt(1000 + 17 * end + list(PLACES).index(place), 9 + end % 4)]


@cache
def alone(ends: tuple[int, ...]) -> dict[tuple[str, int], tuple[tuple[int, ...], tuple[float, ...]]]:
    """What each is answered without any cache."""
    asked = [(place, end) for place in PLACES for end in ends]
    said = say_alone(checkpoint("qwen3_5"), [ask(*one) for one in asked], greedy(N_TOKENS))
    return dict(zip(asked, said, strict=True))


@pytest.mark.parametrize(("name", "page_size", "chunk"), CASES)
def test_a_prefix_is_the_same_wherever_it_lies_and_is_cut(tmp_path: Path, request, name, page_size, chunk) -> None:
    ends = ENDS if request.config.getoption("--full") else ENDS[::4]
    options = {"page_size": page_size, "chunked_prefill_size": chunk, **STRATEGIES[name]}
    found, expected = dict.fromkeys(PLACES, 0), alone(ends)
    with disk_llm(tmp_path, **options) as llm:
        for place, (prepare, came) in PLACES.items():
            tier(llm).threshold_tokens = NEVER
            llm.flush_cache()
            llm.generate([prompt(10, BASE_TOKENS)], greedy(N_TOKENS))
            for end in ends:
                prepare(llm)
                (done,) = llm.generate([ask(place, end)], greedy(N_TOKENS))
                assert (done.token_ids, tuple(one.logprob for one in done.logprobs)) == expected[place, end], (
                    place,
                    end,
                )
                found[place] += came(done)
        assert tier(llm).store.stats.damaged == 0
    assert found["nowhere"] == 0
    assert min(found["device"], found["host"], found["disk"]) >= 64, found

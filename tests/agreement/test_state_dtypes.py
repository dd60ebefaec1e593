"""States of 16 bits for each kind of mixer: what is said depends on the flag, and on no hit from device, host or disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agreement.llm_runs import Said, checkpoint, conversation, greedy, say, tiny_llm
from tests.conftest import MIXERS
from twinpool import LLM

TURN = greedy(12)


def hits(llm: LLM, expected: Said) -> tuple[int, int, int]:
    """Run the conversation in one batch and compare; tokens that came from the cache, of these from the host and from the disk."""
    done = llm.generate(conversation(10), TURN)
    assert [(one.token_ids, tuple(p.logprob for p in one.logprobs)) for one in done] == expected
    return tuple(
        sum(x) for x in zip(*((c.cached_tokens, c.reuse.from_host, c.reuse.from_storage) for c in done), strict=True)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", sorted(MIXERS))
def test_states_of_16_bits(family: str, dtype: str, tmp_path: Path) -> None:
    folder, states = checkpoint(family), {"mamba_ssm_dtype": dtype, "mamba_conv_dtype": dtype}
    uncached = {"disable_radix_cache": True, "chunked_prefill_size": -1}
    tiers = {
        "enable_hierarchical_cache": True, "hicache_size": 0.02, "hicache_storage_backend": "file",
        "hicache_storage_path": str(tmp_path), "hicache_storage_size": 1.0,
        "hicache_storage_prefetch_policy": "wait_complete", "chunked_prefill_size": 96,
    }  # fmt: skip
    with tiny_llm(folder, **uncached) as wide, tiny_llm(folder, **uncached, **states) as llm:
        expected = [say(llm, [ids], TURN)[0] for ids in conversation(10)]
        assert expected != [say(wide, [ids], TURN)[0] for ids in conversation(10)], "the flag changes nothing"
    with tiny_llm(folder, **tiers, **states) as llm:
        llm.engine.scheduler.book.storage.threshold_tokens = 16
        assert hits(llm, expected)[1:] == (0, 0)
        cached, from_host, _ = hits(llm, expected)
        assert (cached > 0, from_host) == (True, 0)
        llm.engine.scheduler.book.tree.evict(pages=10**6, slots=10**6)
        assert hits(llm, expected)[1] > 0
    with tiny_llm(folder, **tiers, **states) as llm:
        llm.engine.scheduler.book.storage.threshold_tokens = 16
        assert hits(llm, expected)[2] > 0

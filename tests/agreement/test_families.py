"""Every family with every cache strategy: shared prefixes, hits, cuts, batches, retraction; and its memory as it is planned."""

from __future__ import annotations

from functools import cache

import pytest

from tests.agreement.llm_runs import Said, checkpoint, conversation, greedy, prompt, say, say_alone, tiny_llm
from tests.tiny_models import FAMILIES
from twinpool.engine.checkpoint import read_spec
from twinpool.errors import ConfigError
from twinpool.models.attention.spec import DsaSpec
from twinpool.models.spec import ModelSpec

STRATEGIES = {
    "extra_buffer": {"mamba_radix_cache_strategy": "extra_buffer"},
    "lazy": {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    "no_buffer": {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
    "off": {"disable_radix_cache": True},
}
TURN = greedy(20)


@cache
def expected(family: str) -> tuple[list[list[int]], Said, list[list[int]], Said]:
    """A conversation's prompts, their answers, the prompts of the next turn and theirs; each prompt by itself."""
    folder, prompts = checkpoint(family), conversation(10)
    first = say_alone(folder, prompts, TURN)
    longer = [p + list(tokens) + prompt(i, 9) for i, (p, (tokens, _)) in enumerate(zip(prompts, first, strict=True))]
    return prompts, first, longer, say_alone(folder, longer, TURN)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_turns_with_shared_prefixes(family: str, strategy: str) -> None:
    options = {"mamba_track_interval": 64, "chunked_prefill_size": 96, **STRATEGIES[strategy]}
    if strategy in ("extra_buffer", "lazy") and not read_spec(checkpoint(family)).supports_extra_buffer:
        with (
            pytest.raises(ConfigError, match=r"is not supported for .*; use no_buffer"),
            tiny_llm(checkpoint(family), **options),
        ):
            pass
        return
    prompts, first, longer, second = expected(family)
    with tiny_llm(checkpoint(family), **options) as llm:
        assert say(llm, prompts, TURN) == first
        assert say(llm, prompts, TURN) == first
        done = llm.generate(longer, TURN)
    assert [(c.token_ids, tuple(p.logprob for p in c.logprobs)) for c in done] == second
    assert (sum(c.cached_tokens for c in done) > 0) == (strategy != "off")


@pytest.mark.parametrize("family", FAMILIES)
def test_retraction(family: str) -> None:
    folder, params = checkpoint(family), greedy(60)
    prompts = [prompt(i, 30 + i) for i in range(4)]
    with tiny_llm(folder, max_total_tokens=230, schedule_conservativeness=0.05) as llm:
        assert say(llm, prompts, params) == say_alone(folder, prompts, params)
        assert llm.engine.snapshot().totals.retracted_requests > 0


def index_bytes(spec: ModelSpec, kv_dtype: str) -> int:
    """Bytes a token that are kept for sparse indices, behind the latents, which have no views."""
    sparse = [layer.attention for layer in spec.layers if isinstance(layer.attention, DsaSpec)]
    return sum(s.kv_bytes_per_token(kv_dtype, 1) - s.latent.kv_bytes_per_token(kv_dtype, 1) for s in sparse)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "dtypes", [{}, {"mamba_ssm_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3"}]
)
def test_memory_is_as_planned(family: str, dtypes: dict[str, str]) -> None:
    spec = read_spec(checkpoint(family))
    with tiny_llm(checkpoint(family), **dtypes) as llm:
        ledger, memory = llm.engine.facts.ledger, llm.engine._executor._memory
        ssm, kv = dtypes.get("mamba_ssm_dtype", "float32"), dtypes.get("kv_cache_dtype", "float32")
        states = sum(view[0].nbytes for states in memory.states for view in (states.conv, states.ssm))
        views = {view.data_ptr(): view[0].nbytes for layer in memory.kv for view in (layer.keys, layer.values)}
        tokens = sum(views.values()) / memory.page_size + index_bytes(spec, kv)
        assert states == ledger.slot_bytes == spec.slot_bytes(ssm_dtype=ssm, conv_dtype="float32")
        assert tokens == spec.kv_bytes_per_token(kv_dtype=kv) == memory.arena.page_bytes / memory.page_size
        pools = sum(ledger.line(name).bytes for name in ("conv states", "ssm states", "padding slot", "KV pool"))
        padding = memory.arena.page_bytes + memory.arena.rounding_bytes  # both out of the slack
        assert memory.buffer.nbytes == (pools + padding) // 4 * 4

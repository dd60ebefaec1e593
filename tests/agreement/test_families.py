"""Every family with every cache strategy in every situation: miss, hit, cut, batch, retraction; and its memory as planned and printed.

The truth is what each prompt says by itself, without prefix cache, overlap or chunks; log-probabilities are compared bit by bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from tests.agreement.llm_runs import (
    STRATEGIES,
    Said,
    checkpoint,
    conversation,
    greedy,
    next_turn,
    prompt,
    say,
    say_alone,
    tiny_llm,
)
from tests.tiny_models import _CLASSES, FAMILIES
from twinpool import LLM, bootlog
from twinpool.engine.checkpoint import read_spec
from twinpool.errors import ConfigError
from twinpool.models.registry import family_of
from twinpool.units import GIB

NAMES = ("extra_buffer", "lazy", "no_buffer", "off")
TURN = greedy(20)
CHUNK = 96
# So many tokens in the pool that not all of the prompts of `retract` can end side by side.
FEW_TOKENS = 230


def supported(family: str, strategy: str) -> bool:
    return strategy in ("no_buffer", "off") or family_of(_CLASSES[family][1]).supports_extra_buffer


CELLS = [(family, strategy) for family in FAMILIES for strategy in NAMES if supported(family, strategy)]


@cache
def alone(family: str) -> dict[tuple[int, ...], tuple[tuple[int, ...], tuple[float, ...]]]:
    """What prompts of a conversation and of its next turn say, each by itself."""
    folder, prompts = checkpoint(family), conversation(10)
    first = say_alone(folder, prompts, TURN)
    longer = next_turn(prompts, first)
    said = [*first, *say_alone(folder, longer, TURN)]
    return dict(zip(map(tuple, [*prompts, *longer]), said, strict=True))


@pytest.fixture(scope="module", params=CELLS, ids="-".join)
def cell(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Family and strategy."""
    family, strategy = request.param
    return family, strategy


@pytest.fixture(scope="module")
def cell_llm(cell: tuple[str, str]) -> Iterator[LLM]:
    """One engine for the situations of a cell; leaks are checked at the end."""
    with tiny_llm(
        checkpoint(cell[0]), mamba_track_interval=64, chunked_prefill_size=CHUNK, **STRATEGIES[cell[1]]
    ) as llm:
        yield llm


@pytest.fixture
def llm(cell_llm: LLM) -> LLM:
    """The cell's engine with nothing cached."""
    cell_llm.flush_cache()
    return cell_llm


def run(llm: LLM, family: str, prompts: Sequence[list[int]]) -> int:
    """Run prompts in one batch and compare; tokens that came from the cache."""
    done = llm.generate(prompts, TURN)
    said = [(one.token_ids, tuple(p.logprob for p in one.logprobs)) for one in done]
    assert said == [alone(family)[tuple(ids)] for ids in prompts]
    return sum(one.cached_tokens for one in done)


def test_miss(cell: tuple[str, str], llm: LLM) -> None:
    ids = conversation(10)[4]
    assert len(ids) < CHUNK
    assert run(llm, cell[0], [ids]) == 0


def test_cut(cell: tuple[str, str], llm: LLM) -> None:
    ids = conversation(10)[1]
    assert len(ids) > 2 * CHUNK
    assert run(llm, cell[0], [ids]) == 0


def test_batch(cell: tuple[str, str], llm: LLM) -> None:
    run(llm, cell[0], conversation(10))


def test_hit(cell: tuple[str, str], llm: LLM) -> None:
    """The same prompts again (a hit where the grid is finer than they are), then each goes on where its answer ended."""
    prompts = conversation(10)
    run(llm, cell[0], prompts)
    run(llm, cell[0], prompts)
    longer = next_turn(prompts, [alone(cell[0])[tuple(ids)] for ids in prompts])
    assert (run(llm, cell[0], longer) > 0) == (cell[1] != "off")


@cache
def alone_for_long(family: str) -> tuple[list[list[int]], Said]:
    prompts = [prompt(i, 30 + i) for i in range(4)]
    return prompts, say_alone(checkpoint(family), prompts, greedy(60))


def test_retract(cell: tuple[str, str]) -> None:
    (family, strategy), options = cell, {"max_total_tokens": FEW_TOKENS, "schedule_conservativeness": 0.05}
    prompts, expected = alone_for_long(family)
    with tiny_llm(checkpoint(family), mamba_track_interval=64, **options, **STRATEGIES[strategy]) as llm:
        assert say(llm, prompts, greedy(60)) == expected
        assert llm.engine.snapshot().totals.retracted_requests > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_strategies_that_a_family_cannot_have_are_refused(family: str) -> None:
    for strategy in NAMES:
        if not supported(family, strategy):
            with (
                pytest.raises(ConfigError, match=r"is not supported for .*; use no_buffer"),
                tiny_llm(checkpoint(family), **STRATEGIES[strategy]),
            ):
                pass


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "dtypes", [{}, {"mamba_ssm_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3"}]
)
def test_memory_is_as_planned(family: str, dtypes: dict[str, str]) -> None:
    with tiny_llm(checkpoint(family), **dtypes) as llm:
        ledger, memory = llm.engine.facts.ledger, llm.engine._executor._memory
        spec = read_spec(checkpoint(family)).with_exact_index(page_tokens=memory.page_size)
        ssm, kv = dtypes.get("mamba_ssm_dtype", "float32"), dtypes.get("kv_cache_dtype", "float32")
        states = sum(view[0].nbytes for states in memory.states for view in (states.conv, states.ssm))
        views = {
            view.data_ptr(): view[0].nbytes for layer in memory.kv for view in (layer.keys, layer.values, layer.index)
        }
        tokens = sum(views.values()) / memory.page_size
        assert states == ledger.slot_bytes == spec.slot_bytes(ssm_dtype=ssm, conv_dtype="float32")
        assert tokens == spec.kv_bytes_per_token(kv_dtype=kv) == memory.arena.page_bytes / memory.page_size
        pools = sum(ledger.line(name).bytes for name in ("conv states", "ssm states", "padding slot", "KV pool"))
        padding = memory.arena.page_bytes + memory.arena.rounding_bytes  # both out of the slack
        assert memory.buffer.nbytes == (pools + padding) // 4 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_boot_log_prints_what_is_allocated(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both pools are large (nothing of them is touched), as the log has two decimals of a GiB."""
    large = {"device_memory": "1GiB", "mem_fraction_static": 0.9, "mamba_full_memory_ratio": 1.0}
    with caplog.at_level(logging.INFO, "twinpool.engine"), LLM(str(checkpoint(family)), **large) as llm:
        memory, ledger = llm.engine._executor._memory, llm.engine.facts.ledger
        (facts,) = bootlog.parse("\n".join(caplog.messages))
        conv, ssm = (
            sum(view.nbytes for view in views) for views in zip(*((s.conv, s.ssm) for s in memory.states), strict=True)
        )
        views = {
            view.data_ptr(): view.nbytes for layer in memory.kv for view in (layer.keys, layer.values, layer.index)
        }
        kv = sum(views.values())
    assert (facts.slots, facts.kv_tokens) == (ledger.max_mamba_cache_size, ledger.kv_tokens)
    assert (facts.conv_gb, facts.ssm_gb) == (round(conv / GIB, 2), round(ssm / GIB, 2))
    # One size where there is one row a token, two where there are keys and values.
    assert (facts.kv_gb is not None) == any(layer.keys is layer.values for layer in memory.kv)
    printed = facts.kv_gb if facts.kv_gb is not None else (facts.k_gb or 0) + (facts.v_gb or 0)
    assert printed == pytest.approx(kv / GIB, abs=0.011)
    assert printed + conv / GIB + ssm / GIB > 0.4

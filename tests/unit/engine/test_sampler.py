"""One row of logits to one token: against naive formulas, and independent of everything but the row, the seed and the
position.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.engine.sampler import RowState, SeenTokens, mix_seed, sample_row, token_logprob, uniform
from twinpool.request import SamplingParams
from twinpool.step import Joined

VOCAB = 37


def state_of(
    *, prompt: list[int] | None = None, output: tuple[int, ...] = (), eos: tuple[int, ...] = (), **params: object
) -> RowState:
    return RowState.of(
        Joined(
            rid=1,
            params=SamplingParams(**{"seed": 7, **params}),
            prompt=np.array(prompt or [0], np.int32),
            output=np.array(output, np.int32),
            eos_token_ids=frozenset(eos),
        )
    )


def logits_of(seed: int, size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def naive_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, by full sorts."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    total, kept = sum(p[i] for i in order), []
    for i in order:
        kept.append(i)
        if params.top_p < 1.0 and sum(p[j] for j in kept) >= params.top_p * total:
            break
    kept = [i for i in kept if p[i] >= params.min_p * p.max()]
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.4},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_drawn_tokens_follow_the_filtered_distribution(params: dict[str, float]) -> None:
    logits, n = logits_of(1), 20_000
    state = state_of(**params)
    drawn = np.bincount([sample_row(logits, state, position=i).token for i in range(n)], minlength=VOCAB) / n
    expected = naive_distribution(logits, state.params)
    assert not drawn[expected == 0].any()
    assert np.abs(drawn - expected).max() < 5 * math.sqrt(0.25 / n)


def test_temperature_zero_and_top_k_one_take_the_first_largest() -> None:
    logits = logits_of(2)
    logits[[5, 11]] = logits.max() + 1
    for params in ({"temperature": 0.0}, {"top_k": 1}):
        assert sample_row(logits, state_of(**params), position=0).token == 5


def test_a_wide_nucleus_falls_back_to_the_whole_vocabulary() -> None:
    logits = np.zeros(5000, np.float32)
    state = state_of(top_p=0.9)
    tokens = {sample_row(logits, state, position=i).token for i in range(3000)}
    assert 2000 < max(tokens) < 4500


@given(seed=st.integers(0, 2**63), position=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_noise_depends_on_seed_and_position_only(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0
    logits = logits_of(3)
    alone = sample_row(logits, state_of(seed=seed), position=position)
    busy = state_of(seed=seed)
    for other in range(5):
        sample_row(logits_of(other), busy, position=other)
    assert sample_row(logits, busy, position=position) == alone


def test_seeds_spread() -> None:
    draws = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(draws) == 2500
    assert abs(np.mean(list(draws)) - 0.5) < 0.02
    assert len({mix_seed(0, i) for i in range(1000)}) == 1000


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_is_bitwise_independent_of_its_batch(data: st.DataObject) -> None:
    rows = np.stack([logits_of(s, 203) for s in data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=6))])
    params = {
        "temperature": data.draw(st.sampled_from([0.0, 0.7])),
        "logprobs": 3,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
    }
    together = [sample_row(row, state_of(prompt=[1, 2], **params), position=4) for row in rows]
    for row, expected in zip(rows, together, strict=True):
        assert sample_row(row.copy(), state_of(prompt=[1, 2], **params), position=4) == expected


def test_penalties_equal_the_naive_formula() -> None:
    prompt, output = [3, 3, 8], [8, 9, 9, 9]
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7)
    seen = SeenTokens(np.array(prompt, np.int32), max_new=10)
    for token in output:
        seen.add(token)
    logits = logits_of(5)
    expected = logits.copy()
    for token in set(prompt + output):
        value = expected[token]
        value = value / np.float32(1.3) if value > 0 else value * np.float32(1.3)
        value = value - np.float32(0.4) * np.float32(output.count(token))
        expected[token] = value - np.float32(0.7) * np.float32(token in output)
    seen.penalise(logits, params)
    assert np.array_equal(logits, expected)


def test_a_retracted_request_continues_with_the_same_penalties() -> None:
    params = {"temperature": 0.9, "frequency_penalty": 1.1, "repetition_penalty": 1.2}
    rows = [logits_of(i) for i in range(8)]
    whole = state_of(prompt=[1], **params)
    tokens = [sample_row(row, whole, position=i).token for i, row in enumerate(rows)]
    again = state_of(prompt=[1], output=tuple(tokens[:5]), **params)
    assert [sample_row(rows[i], again, position=i).token for i in range(5, 8)] == tokens[5:]


def test_min_tokens_masks_what_would_end_the_request() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[4], logits[5], logits[6] = 9, 8, 7
    state = state_of(temperature=0.0, min_tokens=2, eos=(4,), stop_token_ids=(5,))
    assert [sample_row(logits, state, position=i).token for i in (0, 1, 2)] == [6, 6, 4]
    ignoring = state_of(temperature=0.0, min_tokens=2, eos=(4,), ignore_eos=True)
    assert sample_row(logits, ignoring, position=0).token == 4


def test_logit_bias_moves_the_choice_and_not_the_logprob() -> None:
    logits = logits_of(6)
    picked = sample_row(logits, state_of(temperature=0.0, logit_bias=((20, 100.0),), logprobs=2), position=0)
    assert picked.token == 20
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert picked.logprob.logprob == pytest.approx(expected[20], abs=1e-12)
    best = np.argsort(-expected)[:2]
    assert [token for token, _ in picked.logprob.top] == best.tolist()
    assert token_logprob(logits, 3, n_top=0).top == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_an_error_of_that_row(bad: float) -> None:
    logits = logits_of(7)
    logits[3] = bad
    outcome = sample_row(logits, state_of(), position=12)
    assert outcome.token is None
    assert outcome.error == "the model's logits are not finite at output token 12"

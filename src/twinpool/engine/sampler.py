"""From one row of logits to one token. A row is chosen from alone: nothing of its batch mates reaches it.

Order: penalties (repetition, then frequency and presence), logit bias, min_tokens mask; then either the largest logit
(temperature 0 or top_k 1) or: temperature, top-k, top-p of what top-k left, min-p relative to the most likely token,
one draw. The draw uses one uniform number that depends on (seed, position) only. Log-probabilities are the log-softmax
of the model's own logits, before all of the above, as the OpenAI API reports them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinpool.request import Int32Array, SamplingParams
from twinpool.step import Joined, TokenLogprob

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]

_MASK_64 = (1 << 64) - 1
# Most likely tokens that top-p sorts at first; eight times as many whenever they do not hold enough.
_TOP_P_CANDIDATES = 1024


def mix_seed(seed: int, number: int) -> int:
    """A 64-bit seed from a seed and a counter (splitmix64's finaliser): well spread, and the same on every machine."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at output `position` of a request with `seed`."""
    # Hashed twice so that neighbouring seeds and neighbouring positions do not meet on one diagonal.
    return float(mix_seed(mix_seed(seed & _MASK_64, 0), position) >> 11) * 2.0**-53


class SeenTokens:
    """Tokens of a prompt and its output, with how often each is in the output; sparse, grows by at most max_tokens."""

    def __init__(self, prompt: Int32Array, *, max_new: int) -> None:
        distinct = np.unique(prompt)
        capacity = len(distinct) + max_new
        self._ids = np.empty(capacity, np.int64)
        self._counts = np.zeros(capacity, np.float32)
        self._ids[: len(distinct)] = distinct
        self._index = {int(token): i for i, token in enumerate(distinct)}

    def add(self, token: int) -> None:
        """One more output token."""
        place = self._index.setdefault(token, len(self._index))
        self._ids[place] = token
        self._counts[place] += 1.0

    def penalise(self, logits: FloatArray, params: SamplingParams) -> None:
        """Lower the logits of seen tokens, in place. logits: float32 [vocab].

        Repetition: prompt and output; a positive logit is divided by the penalty, a negative one multiplied.
        Frequency: its value times the count in the output. Presence: its value once the token is in the output.
        """
        n_seen = len(self._index)
        ids, counts = self._ids[:n_seen], self._counts[:n_seen]
        values = logits[ids]
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        values = values - np.float32(params.frequency_penalty) * counts
        values = values - np.float32(params.presence_penalty) * (counts > 0).astype(np.float32)
        logits[ids] = values


@dataclass(slots=True)
class RowState:
    """What the sampler keeps for one request while it runs; its seed was given or drawn when it arrived."""

    params: SamplingParams
    seed: int
    stop: npt.NDArray[np.int64]
    bias_ids: npt.NDArray[np.int64]
    bias: FloatArray
    seen: SeenTokens | None

    @staticmethod
    def of(joined: Joined) -> RowState:
        """State of a request that joins, its earlier output (after a retraction) included."""
        params = joined.params
        assert params.seed is not None, "the engine gives every request a seed"
        penalised = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        seen = SeenTokens(joined.prompt, max_new=params.max_tokens + 1) if penalised else None
        if seen is not None:
            for token in joined.output:
                seen.add(int(token))
        return RowState(
            params=params,
            seed=params.seed,
            stop=np.array(sorted(params.end_tokens(joined.eos_token_ids)), np.int64),
            bias_ids=np.array([token for token, _ in params.logit_bias], np.int64),
            bias=np.array([value for _, value in params.logit_bias], np.float32),
            seen=seen,
        )

    def changes_logits(self, position: int) -> bool:
        """Whether anything but temperature acts on the logits of this position."""
        return self.seen is not None or len(self.bias) > 0 or position < self.params.min_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's outcome: a token (with its log-probability if asked for), or why there is none."""

    token: int | None
    logprob: TokenLogprob | None = None
    error: str | None = None


def sample_row(logits: FloatArray, state: RowState, *, position: int) -> Sampled:
    """Choose the token after one row.

    logits: float32 [vocab], contiguous, not changed. position: output tokens before this one. Remembers the token for
    the penalties.
    """
    # One pass: a sum is finite only if every term is.
    with np.errstate(invalid="ignore", over="ignore"):
        is_finite = math.isfinite(float(logits.sum()))
    if not is_finite and not bool(np.isfinite(logits).all()):
        return Sampled(None, error=f"the model's logits are not finite at output token {position}")
    params = state.params
    adjusted = _adjust(logits, state, position) if state.changes_logits(position) else logits
    if params.temperature == 0.0 or params.top_k == 1:
        token = int(adjusted.argmax())
    else:
        token = _draw(adjusted, params, uniform(state.seed, position))
    if state.seen is not None:
        state.seen.add(token)
    logprob = token_logprob(logits, token, n_top=params.logprobs) if params.logprobs is not None else None
    return Sampled(token, logprob)


def _adjust(logits: FloatArray, state: RowState, position: int) -> FloatArray:
    """A copy with penalties, bias and the min_tokens mask applied."""
    adjusted = logits.copy()
    if state.seen is not None:
        state.seen.penalise(adjusted, state.params)
    if len(state.bias):
        np.add.at(adjusted, state.bias_ids, state.bias)
    if position < state.params.min_tokens and len(state.stop) < len(adjusted):
        adjusted[state.stop] = -np.inf
    return adjusted


def _draw(logits: FloatArray, params: SamplingParams, chance: float) -> int:
    """Temperature, filters, and the token at which the cumulative probability passes `chance` in [0, 1)."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= params.temperature
    ids: npt.NDArray[np.int64] | None = None
    if 1 < params.top_k < len(scaled):
        ids = _largest(scaled, params.top_k)
        scaled = scaled[ids]
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if params.min_p > 0.0:
        # The most likely token has weight exp(0) = 1.
        kept = np.flatnonzero(weights >= params.min_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, chance * cumulative[-1], side="right"))
    # chance * total can round up to the total itself; then the last token with any weight is meant.
    place = min(place, int(np.searchsorted(cumulative, cumulative[-1])))
    return place if ids is None else int(ids[place])


def _largest(values: DoubleArray, count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` largest values, best first, ties by lower id (also at the border)."""
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > border)
    equal = np.flatnonzero(values == border)[: count - len(above)]
    ids = np.concatenate((above, equal))
    return ids[np.lexsort((ids, -values[ids]))]


def _nucleus(weights: DoubleArray, top_p: float) -> npt.NDArray[np.int64]:
    """Places of the fewest most likely weights that together hold at least `top_p` of the sum, best first."""
    needed = top_p * float(weights.sum())
    count = 0
    while True:
        count = min(max(_TOP_P_CANDIDATES, count * 8), len(weights))
        order = _largest(weights, count)
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= needed or count == len(weights):
            break
    return order[: int(np.searchsorted(cumulative, needed)) + 1]


def token_logprob(logits: FloatArray, token: int, *, n_top: int) -> TokenLogprob:
    """Log-softmax of raw logits (float32 [vocab]) at `token` and at the `n_top` most likely tokens, best first."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(float(np.exp(shifted).sum()))
    top = _largest(shifted, min(n_top, len(shifted))) if n_top else ()
    return TokenLogprob(token, float(shifted[token]), tuple((int(i), float(shifted[i])) for i in top))

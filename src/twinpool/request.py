"""A request: what was asked (SamplingParams), where it stands (Request), and what its prefix match was worth (Reuse)."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from twinpool.errors import BadRequest

Int32Array = npt.NDArray[np.int32]

# Why matched or unmatched prompt tokens were not reused, in the order they lie in a prompt.
REUSE_GAPS = (
    "restore_failed", "host_state_evicted", "state_evicted", "no_checkpoint", "below_grid", "kv_evicted", "new",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Names are those of the OpenAI API where it has one.

    top_k -1 or 0 means all; temperature 0 means greedy. `stop` holds strings, `stop_token_ids` tokens. `logprobs` is the number of
    alternatives reported beside each token's own log-probability (None: none at all).
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True

    def end_tokens(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that end a request: its own stop tokens, and the model's end tokens unless they are ignored."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))

    def validate(self, *, vocab_size: int | None = None) -> None:
        """Raise BadRequest naming the first field whose value is out of range."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            (
                "min_tokens",
                0 <= self.min_tokens <= self.max_tokens,
                f"must be between 0 and max_tokens={self.max_tokens}",
            ),
            ("temperature", 0.0 <= self.temperature < float("inf"), "must be 0 (greedy) or above"),
            ("top_k", self.top_k >= -1, "must be -1 (all) or at least 1"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be in [0, 1]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 2.0, "must be in (0, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be in [-2, 2]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be in [-2, 2]"),
            ("n", 1 <= self.n <= 128, "must be between 1 and 128"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "must be between 0 and 20"),
            ("stop", all(self.stop) and len(self.stop) <= 16, "must be at most 16 non-empty strings"),
            ("logit_bias", all(math.isfinite(bias) for _, bias in self.logit_bias), "must be finite numbers"),
        )
        for name, fine, rule in checks:
            if not fine:
                raise BadRequest(f"{name}={reprlib.repr(getattr(self, name))}: it {rule}.", field=name)
        if vocab_size is not None:
            for name, ids in (("logit_bias", [i for i, _ in self.logit_bias]), ("stop_token_ids", self.stop_token_ids)):
                bad = [i for i in ids if not 0 <= i < vocab_size]
                if bad:
                    raise BadRequest(
                        f"{name} names token {bad[0]}, but the vocabulary ends at {vocab_size - 1}.", field=name
                    )


class Phase(Enum):
    """Where a request stands. Only the scheduler moves it."""

    WAITING = "waiting"  # in the queue; holds no page, no slot
    PREFILL = "prefill"  # admitted; some of its tokens are not computed yet
    DECODE = "decode"  # one new token each step
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended: reason 'stop' (matched tells by what), 'length', 'abort' or 'error' (message says which; out_of_memory: KV
    ran out although the request was alone)."""

    reason: str
    matched: int | str | None = None
    message: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What the prefix cache was worth to a request, in tokens; `reused` plus all gaps is `prompt`.

    kv_matched: tokens whose KV was found; reused: tokens up to the checkpoint the request resumed from; gaps: (reason, tokens)
    in REUSE_GAPS order without zero entries. from_host, from_storage: the part of `reused` that was brought back from there.
    """

    prompt: int = 0
    kv_matched: int = 0
    reused: int = 0
    from_host: int = 0
    from_storage: int = 0
    gaps: tuple[tuple[str, int], ...] = ()

    @property
    def by_tier(self) -> dict[str, int]:
        """`reused` by where the tokens were: device, host, and storage if any were there (reference 7.2)."""
        tiers = {"device": self.reused - self.from_host - self.from_storage, "host": self.from_host}
        return {**tiers, "storage": self.from_storage} if self.from_storage else tiers


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine. Owned by the scheduler once added.

    tokens: int32 [prompt + max_tokens] buffer of which the first n_tokens are known. prompt_len is the length asked for.
    end_tokens: those that end it. tried: its prefix has been looked for, which counts once as a use of it. restarts: how often it was
    begun again because its memory was lost.
    """

    rid: int
    tokens: Int32Array
    prompt_len: int
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival_s: float = 0.0
    n_tokens: int = 0
    phase: Phase = Phase.WAITING
    finish: Finish | None = None
    reuse: Reuse = field(default_factory=Reuse)
    retractions: int = 0
    restarts: int = 0
    tried: bool = False
    end_tokens: frozenset[int] = field(init=False)
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self) -> None:
        self.end_tokens = self.params.end_tokens(self.eos_token_ids)

    @staticmethod
    def new(
        *,
        rid: int,
        prompt: Int32Array | list[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        arrival_s: float = 0.0,
    ) -> Request:
        """A waiting request over a copy of `prompt` (int32 [prompt tokens], at least one)."""
        length = len(prompt)
        if length == 0:
            raise BadRequest("the prompt is empty: at least one token is needed.", field="prompt")
        tokens = np.empty(length + params.max_tokens, np.int32)
        tokens[:length] = prompt
        return Request(
            rid=rid, tokens=tokens, prompt_len=length, params=params, eos_token_ids=eos_token_ids,
            priority=priority, arrival_s=arrival_s, n_tokens=length,
        )  # fmt: skip

    @property
    def n_output(self) -> int:
        """Output tokens known so far."""
        return self.n_tokens - self.prompt_len

    def key(self, n_tokens: int) -> bytes:
        """The first `n_tokens` tokens as little-endian int32 bytes, the form the prefix tree compares."""
        return self.tokens[:n_tokens].tobytes()

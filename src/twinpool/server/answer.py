"""A sequence's outputs put together, and the facts about it that every route reports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinpool.engine.core import Output
from twinpool.errors import OutOfMemory
from twinpool.request import Finish, Request
from twinpool.server.bridge import Stream
from twinpool.server.http_errors import GenerationFailed
from twinpool.server.service import Job
from twinpool.server.stats import STORAGE_BACKEND
from twinpool.step import TokenLogprob


@dataclass(slots=True, eq=False)
class Answer:
    """What a sequence has said so far."""

    request: Request
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, output: Output) -> None:
        """The next output. Raises OutOfMemory or GenerationFailed if it says that the sequence could not be completed."""
        if output.finish is not None and output.finish.reason not in ("stop", "length"):
            refusal = OutOfMemory if output.finish.out_of_memory else GenerationFailed
            raise refusal(output.finish.message or f"the request ended with '{output.finish.reason}'.")
        self.text += output.text
        self.tokens.extend(output.tokens)
        self.logprobs.extend(output.logprobs)
        self.finish = output.finish


async def collect(job: Job) -> list[Answer]:
    """All sequences of a job to their ends.

    Raises OutOfMemory, GenerationFailed or what the engine failed with; then all are cancelled.
    """
    try:
        return list(await asyncio.gather(*(_whole(stream) for stream in job.streams)))
    finally:
        job.cancel()


async def _whole(stream: Stream) -> Answer:
    answer = Answer(stream.request)
    async for output in stream.outputs():
        answer.add(output)
    return answer


def cached_details(by_tier: Mapping[str, int]) -> dict[str, Any]:
    """Reused tokens by where they were (Reuse.by_tier), and the name of the storage if some came from there (reference 7.2)."""
    return {**by_tier, "storage_backend": STORAGE_BACKEND} if "storage" in by_tier else dict(by_tier)


def usage(job: Job, answers: Sequence[Answer], *, report_cached: bool) -> dict[str, Any]:
    """OpenAI's usage object. A prompt and its cached tokens count once, whatever n is (reference 7.2)."""
    prompt_tokens = sum(len(prompt.tokens) for prompt in job.prompts)
    completion_tokens = sum(len(answer.tokens) for answer in answers)
    details = None
    if report_cached:
        by_tier: Counter[str] = Counter()
        for answer in answers[:: job.n]:
            by_tier.update(answer.request.reuse.by_tier)
        details = {"cached_tokens": by_tier.total(), "cached_tokens_details": cached_details(by_tier)}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }

"""POST /generate: the native route, which says all that is known about a request."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from twinpool.engine.text import Tokenizer
from twinpool.request import Finish, Reuse
from twinpool.server.answer import Answer, cached_details, collect
from twinpool.server.native_protocol import NATIVE_REFUSED, GenerateBody
from twinpool.server.openai_routes import service_of
from twinpool.server.protocol import read
from twinpool.server.service import Ask, Job, Service
from twinpool.server.stream import EventStream, merged, unless_client_leaves

router = APIRouter()


@router.post("/generate")
async def generate(request: Request) -> Response:
    """One prompt or several; an array of replies for several sequences, an object for one."""
    service = service_of(request)
    body = await read(request, GenerateBody, refused=NATIVE_REFUSED)
    service.check_ready()
    with body.naming_its_fields():
        return await _generate(request, service, body)


async def _generate(request: Request, service: Service, body: GenerateBody) -> Response:
    """The reply to a body that has been read."""
    prompts, params = body.prompts(), body.params()
    names = [name or uuid.uuid4().hex for name in body.rids(len(prompts))]
    ask = Ask(prompts=prompts, params=params, max_tokens=params.max_tokens, priority=body.priority or 0)
    shape = _Shape(
        tokenizer=service.engine.tokenizer,
        ids=names if params.n == 1 else [f"{name}_{copy}" for name in names for copy in range(params.n)],
        is_batch=body.is_batch or params.n > 1,
        wants_logprobs=params.logprobs is not None,
        with_text=bool(body.return_text_in_logprobs),
    )
    if body.stream:
        job = await unless_client_leaves(request, service.submit(ask))
        return EventStream(job, _chunks(job, shape))
    return JSONResponse(await unless_client_leaves(request, _whole(service, ask, shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """How the replies look. ids: the name of each sequence."""

    tokenizer: Tokenizer
    ids: Sequence[str]
    is_batch: bool
    wants_logprobs: bool
    with_text: bool

    def reply(self, index: int, answer: Answer) -> dict[str, Any]:
        """All that a sequence has said so far, and all that is known of it (reference 7.2)."""
        request = answer.request
        meta: dict[str, Any] = {
            "id": self.ids[index],
            "finish_reason": _finish(answer),
            "prompt_tokens": request.prompt_len,
            "completion_tokens": len(answer.tokens),
            "cached_tokens": request.reuse.reused,
            "cached_tokens_details": cached_details(request.reuse.by_tier),
            "reuse": _reuse(request.reuse),
        }
        if self.wants_logprobs:
            meta["output_token_logprobs"] = [self._logprob(lp.token, lp.logprob) for lp in answer.logprobs]
            meta["output_top_logprobs"] = [[self._logprob(*pair) for pair in lp.top] for lp in answer.logprobs]
        if request.finished_s is not None:
            meta["e2e_latency"] = request.finished_s - request.arrival_s
        reply = {"text": answer.text, "output_ids": answer.tokens, "meta_info": meta}
        return reply

    def _logprob(self, token: int, logprob: float) -> list[Any]:
        return [logprob, token, self.tokenizer.token_text(token) if self.with_text else None]


def _reuse(reuse: Reuse) -> dict[str, Any]:
    return {
        "kv_matched": reuse.kv_matched,
        "reused": reuse.reused,
        "from_host": reuse.from_host,
        "from_storage": reuse.from_storage,
        "gaps": dict(reuse.gaps),
    }


def _finish(answer: Answer) -> dict[str, Any] | None:
    finish: Finish | None = answer.finish
    if finish is None:
        return None
    if finish.reason == "length":
        return {"type": "length", "length": len(answer.tokens)}
    return {"type": finish.reason, "matched": finish.matched}


async def _whole(service: Service, ask: Ask, shape: _Shape) -> Any:
    answers = await collect(await service.submit(ask))
    replies = [shape.reply(index, answer) for index, answer in enumerate(answers)]
    return replies if shape.is_batch else replies[0]


async def _chunks(job: Job, shape: _Shape) -> AsyncIterator[dict[str, Any]]:
    """Each event holds everything so far, as clients of this route expect; one of several sequences says which it
    is.
    """
    answers = [Answer(stream.request) for stream in job.streams]
    async for index, output in merged(job.streams):
        answers[index].add(output)
        if output.tokens or output.finish is not None:
            reply = shape.reply(index, answers[index])
            yield {"index": index, **reply} if shape.is_batch else reply

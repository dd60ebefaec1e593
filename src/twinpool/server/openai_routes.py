"""POST /v1/chat/completions and /v1/completions, GET /v1/models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from twinpool.server.answer import Answer, collect, usage
from twinpool.server.openai_protocol import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    ChatBody,
    CompletionBody,
    OpenAIBody,
)
from twinpool.server.openai_replies import Shape
from twinpool.server.protocol import read
from twinpool.server.service import Ask, Job, Service
from twinpool.server.stream import EventStream, merged, unless_client_leaves

router = APIRouter()


def service_of(request: Request) -> Service:
    """The server's one Service."""
    service: Service = request.app.state.service
    return service


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """A conversation's next message."""
    service = service_of(request)
    body = await read(request, ChatBody, refused=CHAT_REFUSED)
    service.check_ready()
    logprobs, max_tokens = body.wanted_logprobs(), body.wanted_tokens()
    messages = [message.for_template() for message in body.messages]
    # A template is code of the model's; on a long conversation it takes its time.
    text = await asyncio.to_thread(
        service.engine.tokenizer.render_chat, messages, template_options=body.chat_template_kwargs
    )
    params = _sampling(body, max_tokens, logprobs)
    ask = Ask(prompts=(text,), params=params, max_tokens=max_tokens, priority=body.priority or 0, special_tokens=False)
    return await _answer(request, _Reply(service, body, ask, is_chat=True))


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Texts continued."""
    service = service_of(request)
    body = await read(request, CompletionBody, refused=COMPLETION_REFUSED)
    service.check_ready()
    max_tokens = body.wanted_tokens()
    params = _sampling(body, max_tokens, body.logprobs)
    ask = Ask(prompts=body.prompt, params=params, max_tokens=max_tokens, priority=body.priority or 0)
    return await _answer(request, _Reply(service, body, ask, is_chat=False))


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_card(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The model's card. Raises ModelNotFound for another name."""
    service = service_of(request)
    service.check_model(name)
    return JSONResponse(_card(service))


def _card(service: Service) -> dict[str, Any]:
    name = service.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.created_unix_s,
        "owned_by": "twinpool",
        "root": name,
        "max_model_len": service.engine.facts.context_len,
    }


def _sampling(body: OpenAIBody, max_tokens: int | None, logprobs: int | None) -> Any:
    """Sampling of a body. Without a length limit the service puts the room that is left in place of min_tokens or 1."""
    floor = max_tokens if max_tokens is not None else max(1, body.min_tokens or 0)
    return body.sampling(max_tokens=floor, min_tokens=body.min_tokens, seed=body.seed, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class _Reply:
    """One request on its way to its reply."""

    service: Service
    body: OpenAIBody
    ask: Ask
    is_chat: bool

    def shape(self) -> Shape:
        return Shape(
            id=Shape.new_id(is_chat=self.is_chat),
            created_unix_s=int(time.time()),
            model=self.service.model_name,
            is_chat=self.is_chat,
            tokenizer=self.service.engine.tokenizer,
            wants_logprobs=self.ask.params.logprobs is not None,
        )

    def prefixes(self) -> list[str]:
        """The text before each sequence's own: its prompt if it is to be echoed."""
        if not (isinstance(self.body, CompletionBody) and self.body.echo):
            return [""] * (len(self.ask.prompts) * self.ask.params.n)
        decode = self.service.engine.tokenizer.decode
        texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in self.ask.prompts]
        return [text for text in texts for _ in range(self.ask.params.n)]

    def usage(self, job: Job, answers: Sequence[Answer]) -> dict[str, Any]:
        return usage(job, answers, report_cached=self.service.options.enable_cache_report)


async def _answer(request: Request, reply: _Reply) -> Response:
    """Submit, then stream or collect."""
    reply.service.check_model(reply.body.model)
    include_usage = reply.body.include_usage
    if reply.body.stream:
        job = await unless_client_leaves(request, reply.service.submit(reply.ask))
        return EventStream(job, _chunks(job, reply, include_usage=include_usage))
    return JSONResponse(await unless_client_leaves(request, _whole(reply)))


async def _whole(reply: _Reply) -> dict[str, Any]:
    job = await reply.service.submit(reply.ask)
    answers = await collect(job)
    return reply.shape().whole(answers, prefixes=reply.prefixes(), usage=reply.usage(job, answers))


async def _chunks(job: Job, reply: _Reply, *, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
    """Every sequence's opening, its outputs as they come, and the usage at the end if it was asked for."""
    shape = reply.shape()
    answers = [Answer(stream.request) for stream in job.streams]
    for index, prefix in enumerate(reply.prefixes()):
        if shape.is_chat:
            yield shape.opening(index)
        elif prefix:
            yield shape.echo(index, prefix)
    async for index, output in merged(job.streams):
        offset = len(answers[index].text)
        answers[index].add(output)
        chunk = shape.chunk(index, output, offset=offset)
        if chunk is not None:
            yield chunk
    if include_usage:
        yield shape.closing(reply.usage(job, answers))

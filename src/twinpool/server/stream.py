"""Server-sent events: one JSON object a line, an error as an event of its own, and the client's departure noticed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from twinpool.engine.core import Output
from twinpool.errors import RequestError
from twinpool.server.bridge import Stream
from twinpool.server.http_errors import error_object, object_of
from twinpool.server.service import Job

log = logging.getLogger("twinpool.server")

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientLeft(RequestError):
    """The client closed the connection: there is nobody to answer."""

    status = 499
    code = "client_closed_request"


def event(value: object) -> bytes:
    """One server-sent event with a JSON object."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Chunks as events, then [DONE].

    An error in the middle becomes an error event and the end; a client that leaves ends the job.
    """

    def __init__(self, job: Job, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(_events(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or as much as the client stays for."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield event(chunk)
        yield DONE
    except RequestError as error:
        yield event(object_of(error))
    except Exception as error:
        log.error("bug while streaming", exc_info=error)
        message = f"A bug in the server: {type(error).__name__}; its traceback is in the server's log."
        yield event(error_object(message=message, status=500, code="internal_error"))


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Output]]:
    """Outputs of several sequences as they come, each with the index of its stream.

    Raises RequestError as Stream.outputs does.
    """
    if len(streams) == 1:
        async for output in streams[0].outputs():
            yield 0, output
        return
    news: asyncio.Queue[tuple[int, Output | RequestError]] = asyncio.Queue()

    async def forward(index: int, stream: Stream) -> None:
        try:
            async for output in stream.outputs():
                news.put_nowait((index, output))
        except RequestError as error:
            news.put_nowait((index, error))

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        n_open = len(streams)
        while n_open:
            index, item = await news.get()
            if isinstance(item, RequestError):
                raise item
            n_open -= item.finish is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes first. Raises ClientLeft then, else what it raises.

    The body must have been read: what the connection says after it can only be that it is gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft("the client closed the connection.")
    finally:
        for either in (task, gone):
            if not either.done():
                either.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

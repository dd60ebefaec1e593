"""The application: routes, errors, the key, and the engine's life inside the server's."""

from __future__ import annotations

import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from twinpool.config.options import ServeOptions
from twinpool.engine.core import Engine
from twinpool.server import admin_routes, native_routes, openai_routes
from twinpool.server.http_errors import Unauthorized, install, response_of
from twinpool.server.run import run_until_stopped
from twinpool.server.service import Service

_OPEN_PATHS = ("/health",)
_STOP_WAIT_S = 5.0
_LOG_FORMAT = "[%(asctime)s] %(message)s"


class ApiKeyGate:
    """ASGI middleware: without the key nothing is answered but /health.

    Plain ASGI, so that it does not hide a client's departure.
    """

    def __init__(self, app: ASGIApp, *, api_key: str, service: Service) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 401."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("this server has an --api-key: send it as 'Authorization: Bearer KEY'.")
        self._service.count_refusal(error.code)
        await response_of(error)(scope, receive, send)


def build_app(service: Service) -> FastAPI:
    """The ASGI application; its lifespan starts the engine's thread and ends it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.bridge.start()
        yield
        await service.bridge.stop(timeout_s=_STOP_WAIT_S)
        service.close()

    app = FastAPI(title="twinpool", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.service = service
    install(app)
    app.include_router(openai_routes.router)
    app.include_router(native_routes.router)
    app.include_router(admin_routes.router)
    if service.options.api_key:
        app.add_middleware(ApiKeyGate, api_key=service.options.api_key, service=service)
    return app


def serve(options: ServeOptions, *, boot: Callable[[ServeOptions], Engine] = Engine.boot) -> None:
    """Serve until Ctrl-C or SIGTERM. The socket is open while the model loads; /health says when it is ready.

    Raises ConfigError if the address cannot be bound or the request log not written, and what `boot` raises.
    """
    logging.basicConfig(level=options.log_level.upper(), format=_LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
    service = Service(options=options, boot=lambda: boot(options))
    with contextlib.closing(service):
        run_until_stopped(app=build_app(service), bridge=service.bridge, host=options.host, port=options.port)

"""Every error in the shape of the OpenAI API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from twinpool.errors import BadRequest, RequestError

RETRY_AFTER_S = 1

log = logging.getLogger("twinpool.server")

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    413: "invalid_request_error", 503: "service_unavailable_error",
}  # fmt: skip


class Unauthorized(RequestError):
    """The server has an --api-key and the request does not carry it."""

    status = 401
    code = "invalid_api_key"


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class BodyTooLarge(RequestError):
    """The request's body is longer than the server reads."""

    status = 413
    code = "request_too_large"


class NotEnabled(RequestError):
    """The route is there only with a flag that was not given."""

    status = 404
    code = "not_enabled"


class NotReady(RequestError):
    """The engine is still starting."""

    status = 503
    code = "not_ready"


class EngineDown(RequestError):
    """The engine thread has ended with a bug; nothing can be generated any more."""

    status = 500
    code = "engine_failed"


class GenerationFailed(RequestError):
    """This request could not be computed; others may go on."""

    status = 500
    code = "generation_failed"


def error_object(*, message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error reply, and of an error event in a stream."""
    return {"error": {"message": message, "type": _TYPES.get(status, "server_error"), "param": param, "code": code}}


def object_of(error: RequestError) -> dict[str, Any]:
    """The body for an expected error."""
    param = error.field if isinstance(error, BadRequest) else None
    return error_object(message=str(error), status=error.status, code=error.code, param=param)


def response_of(error: RequestError) -> JSONResponse:
    """The reply to a refused request; one that may be tried again says when."""
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(object_of(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Make every error of `app` OpenAI-shaped: expected ones, unknown routes and methods, and bugs (whose traceback
    is logged).
    """

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        app.state.service.count_refusal(error.code)
        return response_of(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        path, method = request.url.path, request.method
        said = {
            404: (f"There is no route {path} here.", "not_found"),
            405: (f"{path} does not answer {method}.", "method_not_allowed"),
        }
        message, code = said.get(error.status_code, (str(error.detail), "http_error"))
        body = error_object(message=message, status=error.status_code, code=code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        log.error("bug while answering %s %s", request.method, request.url.path, exc_info=error)
        message = f"A bug in the server: {type(error).__name__}; its traceback is in the server's log."
        return JSONResponse(error_object(message=message, status=500, code="internal_error"), status_code=500)

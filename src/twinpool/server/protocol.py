"""Reading a request body: limited JSON into a model that forbids what it does not know, or a sentence that says why."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from starlette.requests import ClientDisconnect

from twinpool.errors import BadRequest
from twinpool.request import SamplingParams
from twinpool.server.http_errors import BodyTooLarge
from twinpool.units import count

MAX_BODY_BYTES = 16 << 20
_INLINE_BYTES = 64 << 10

_INT64 = 1 << 63
_MAX_TOKEN_ID = 1 << 31
_LIMIT_TOKENS = 1 << 31
_BIAS_LIMIT = 100.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A field of a known API that is not honoured here: why, and the values that ask for nothing (null always does)."""

    why: str
    harmless: tuple[object, ...] = ()


class Body(BaseModel):
    """Base of request bodies and of the objects in them: strict types, no unknown field, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


BodyT = TypeVar("BodyT", bound=Body)


async def read_body(request: Request, *, limit_bytes: int) -> bytes:
    """The raw body.

    Raises BodyTooLarge before reading more than `limit_bytes`, BadRequest if the client leaves meanwhile.
    """
    too_large = BodyTooLarge(
        f"the body is larger than the {limit_bytes} bytes that this server reads: send a shorter prompt."
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large
    parts: list[bytes] = []
    size_bytes = 0
    try:
        async for part in request.stream():
            size_bytes += len(part)
            if size_bytes > limit_bytes:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise BadRequest("the client left before the body was complete.") from None
    return b"".join(parts)


async def read(request: Request, model: type[BodyT], *, refused: Mapping[str, Refused]) -> BodyT:
    """A request's body as a `model`; a large one is parsed beside the event loop. Raises BodyTooLarge, BadRequest."""
    raw = await read_body(request, limit_bytes=MAX_BODY_BYTES)
    if len(raw) <= _INLINE_BYTES:
        return parse(raw, model, refused=refused)
    return await asyncio.to_thread(parse, raw, model, refused=refused)


def parse(raw: bytes, model: type[BodyT], *, refused: Mapping[str, Refused]) -> BodyT:
    """`raw` as a `model`.

    Raises BadRequest: not JSON, not an object, a refused or unknown field, a wrong type or value.
    """
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {kind_of(value)}.")
    for name, asked in value.items():
        rule = refused.get(name)
        if rule is not None and asked is not None and not _is_harmless(asked, rule):
            raise BadRequest(f"{name} is not supported: {rule.why}.", field=name)
    kept = {name: asked for name, asked in value.items() if name not in refused}
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise _bad_request(error, model) from None


def _is_harmless(asked: object, rule: Refused) -> bool:
    # 1 == True in Python, not in JSON.
    return any(asked == value and type(asked) is type(value) for value in rule.harmless)


def _bad_request(error: ValidationError, model: type[Body]) -> BadRequest:
    """The first thing that is wrong, as one sentence that names the field."""
    first = error.errors(include_url=False)[0]
    path = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        known = sorted(model.model_fields) if len(first["loc"]) == 1 else []
        near = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {near[0]}?" if near else "."
        return BadRequest(f"{path} is not a field of this request{hint}", field=path)
    if first["type"] == "missing":
        return BadRequest(f"{path} is required.", field=path)
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
    elif first["type"] == "too_short":
        reason = f"it must have at least {count(first['ctx']['min_length'], 'item')}"
    else:
        reason = first["msg"][0].lower() + first["msg"][1:] + f", not {_show(first['input'])}"
    return BadRequest(f"{path}: {reason}." if path else f"{reason}.", field=path or None)


def _path(loc: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') as 'messages[0].role'."""
    text = ""
    for step in loc:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _show(value: object) -> str:
    """A wrong value, cut short, or its kind if it is a structure."""
    if isinstance(value, dict | list):
        return kind_of(value)
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def kind_of(value: object) -> str:
    """JSON's name of a value's type, with its article."""
    names: tuple[tuple[type, str], ...] = (
        (bool, "a boolean"), (int, "a number"), (float, "a number"), (str, "a string"), (list, "an array"),
        (dict, "an object"),
    )  # fmt: skip
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def _stop(value: object) -> tuple[str, ...] | None:
    """stop: null, a string, or a list of strings."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it must be a string or an array of strings")
    return tuple(texts)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...] | None:
    """logit_bias: null, or an object from token ids (as strings, as JSON has it) to numbers from -100 to 100."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("it must be an object from token ids to numbers")
    pairs: list[tuple[int, float]] = []
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and int(key) < _MAX_TOKEN_ID):
            raise ValueError(f"'{key}' is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -_BIAS_LIMIT <= bias <= _BIAS_LIMIT:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


Seed = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
TokenId = Annotated[int, Field(ge=0, lt=_MAX_TOKEN_ID)]
CountTokens = Annotated[int, Field(ge=0, le=_LIMIT_TOKENS)]
Stop = Annotated[tuple[str, ...] | None, PlainValidator(_stop)]
LogitBias = Annotated[tuple[tuple[int, float], ...] | None, PlainValidator(_logit_bias)]


class SamplingBody(Body):
    """Sampling fields that all routes share; null is the default. Ranges are SamplingParams.validate's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    stop: Stop = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None

    def sampling(
        self, *, max_tokens: int, min_tokens: int | None, seed: int | None, logprobs: int | None
    ) -> SamplingParams:
        """As the engine wants it. Raises BadRequest on a value out of range."""
        given: dict[str, Any] = {
            name: value for name in SamplingBody.model_fields if (value := getattr(self, name)) is not None
        }
        given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens or 0, seed=seed, logprobs=logprobs, **given
        )
        params.validate()
        return params

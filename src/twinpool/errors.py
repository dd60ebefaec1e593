"""Every error a user can meet.

    TwinpoolError                expected: one sentence, no traceback
      ConfigError                a flag, option or config key is wrong, unknown or not honoured        exit 2
      ModelError                 a checkpoint cannot be found, read or is of an unknown architecture   exit 2
      MemoryRefusal              it ran fine, but the pools do not fit                                 exit 3
      RankLost                   one of several ranks has ended, and the others with it               exit 1
      RequestError               one request is refused; the server goes on
        BadRequest               wrong, unknown or too long                                            HTTP 400
        QueueFull                more waiting requests than --max-queued-requests                      HTTP 503
        OutOfMemory              the last running request cannot get another page                      HTTP 500
        ShuttingDown             the server is draining                                                HTTP 503

Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class TwinpoolError(Exception):
    """An expected failure: str(error) is the one sentence to show."""

    exit_code = 1


class ConfigError(TwinpoolError):
    """A flag, option or config key is wrong, unknown or not honoured."""

    exit_code = 2


class ModelError(TwinpoolError):
    """A checkpoint cannot be found, read, or is of an unknown architecture."""

    exit_code = 2


class MemoryRefusal(TwinpoolError):
    """The two pools do not fit; the sentence says needed, available, what would fit and which flag."""

    exit_code = 3


class RankLost(TwinpoolError):
    """One of several ranks has ended; a model cannot go on without a share of it."""


class RequestError(TwinpoolError):
    """One request is refused; `status` is its HTTP status, `code` the word in the JSON error."""

    status = 500
    code = "internal_error"


class BadRequest(RequestError):
    """The request is wrong, has an unknown field, or can never fit."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(RequestError):
    """As many requests wait as --max-queued-requests allows."""

    status = 503
    code = "queue_full"


class OutOfMemory(RequestError):
    """Even alone, the request cannot get the KV pages for its next token."""

    status = 500
    code = "out_of_memory"


class ShuttingDown(RequestError):
    """The server is draining and takes no new work."""

    status = 503
    code = "shutting_down"

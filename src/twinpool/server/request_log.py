"""`--request-log FILE`: a line for each finished request, of lengths, keyed block hashes and times; never text or token ids."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import queue
import secrets
import threading
from datetime import UTC, datetime
from pathlib import Path

from twinpool.clock import Clock
from twinpool.engine.core import StepReport
from twinpool.errors import ConfigError
from twinpool.replay.formats.request_log import FORMAT, recognises, write
from twinpool.replay.trace import Session, Trace, TraceRequest
from twinpool.request import Request
from twinpool.sched.book import Retraction
from twinpool.server.conversations import Conversations
from twinpool.units import round_up

log = logging.getLogger("twinpool.server")

_SALT_BYTES = 32
_LEAST_BLOCK_TOKENS = 64  # a hash for each page of one token would be longer than the text
_MOST_WAITING = 256
_CLOSE_S = 5.0


def block_tokens(page_size: int) -> int:
    """Tokens of a block of the log: whole pages of page_size tokens, at least 64 tokens."""
    return round_up(_LEAST_BLOCK_TOKENS, page_size)


class RequestLog:
    """An engine observer. A thread hashes and writes, so that no step waits for a disk; what cannot be written is lost, with one
    warning, and serving goes on.

    Raises ConfigError if the file cannot be appended to or is no request log, or if its salt (FILE.salt) is lost or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        first, ends_whole = _existing(path)
        self._salt = _salt(path, is_new=first is None)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--request-log {path} cannot be written: {error.strerror}.") from error
        self._first_line = first
        self._torn = not ends_whole  # the last write stopped inside a line
        self._lost = 0
        self._queue: queue.Queue[Request | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="twinpool-request-log", daemon=True)

    def start(self, *, page_size: int, clock: Clock) -> None:
        """Begin; call it once, before the first request ends. page_size: tokens; clock: of the requests' times.

        Raises ConfigError if the file has blocks of another size.
        """
        self._block_size = block_tokens(page_size)
        before = json.loads(self._first_line)["block_size"] if self._first_line else self._block_size
        if before != self._block_size:
            raise ConfigError(
                f"--request-log {self._path} has blocks of {before} tokens, and pages of {page_size} make blocks of "
                f"{self._block_size}: name a new file."
            )
        self._conversations = Conversations(salt=self._salt, block_size=self._block_size, prefix=secrets.token_hex(4))
        self._epoch_s = datetime.now(UTC).timestamp() - clock.now_s()
        self._thread.start()

    def on_step(self, report: StepReport) -> None:
        """Steps are not logged."""

    def on_retraction(self, retraction: Retraction) -> None:
        """Retractions are not logged."""

    def on_finish(self, request: Request) -> None:
        """Log a request that ended, for whatever reason, with what it produced."""
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            self._lose("lines are written slower than requests end")

    def close(self) -> None:
        """Write what waits, then end; a disk that hangs is not waited for. Harmless if it was not started."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()
        if self._lost:
            log.warning("--request-log %s lacks %d requests.", self._path, self._lost)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            try:
                self._append(self._line(request))
            except OSError as error:
                self._lose(error.strerror or str(error))

    def _append(self, line: bytes) -> None:
        rest = b"\n" * self._torn + line
        while rest:
            rest = rest[self._file.write(rest) :]
            self._torn = bool(rest)

    def _lose(self, reason: str) -> None:
        self._lost += 1
        if self._lost == 1:
            log.warning("--request-log %s cannot be written (%s): requests are missing in it.", self._path, reason)

    def _line(self, request: Request) -> bytes:
        """The request as the format's own writer writes it."""
        place = self._conversations.place(request.tokens[: request.n_tokens], request.prompt_len)
        logged = TraceRequest(
            session=place.session,
            index=place.index,
            arrival_s=round(self._epoch_s + request.arrival_s, 6),
            think_s=None,
            input_tokens=request.prompt_len,
            output_tokens=request.n_output,
            blocks=place.blocks,
            api_time_s=None if request.finished_s is None else round(request.finished_s - request.arrival_s, 6),
        )
        session = Session(place.session, (logged,), parent=place.parent)
        text = io.StringIO()
        write(Trace(str(self._path), FORMAT.name, self._block_size, "global", "trace", (session,)), text)
        return text.getvalue().encode()


def _existing(path: Path) -> tuple[bytes | None, bool]:
    """(the first line of what is there or None, whether its last line is whole). Raises ConfigError."""
    if not path.parent.is_dir():
        raise ConfigError(f"--request-log {path} cannot be written: there is no folder {path.parent}.")
    try:
        if not path.is_file() or not path.stat().st_size:
            return None, True
        with path.open("rb") as stream:
            first = stream.readline()
            stream.seek(-1, io.SEEK_END)
            ends_whole = stream.read() == b"\n"
    except OSError as error:
        raise ConfigError(f"--request-log {path} cannot be read: {error.strerror}.") from error
    if not recognises(first):
        raise ConfigError(f"--request-log {path} is there and is no request log: name a new file.")
    return first, ends_whole


def _salt(path: Path, *, is_new: bool) -> bytes:
    """The secret of the log's hashes, from FILE.salt; made with a new log. Raises ConfigError."""
    place = path.with_name(path.name + ".salt")
    try:
        if not place.exists():
            if not is_new:
                raise ConfigError(
                    f"{place} is gone, and without it new hashes cannot be compared with those in {path}: put it back or "
                    "name a new file."
                )
            place.touch(mode=0o600, exist_ok=False)
            place.write_text(secrets.token_hex(_SALT_BYTES) + "\n")
        salt = bytes.fromhex(place.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}, the secret of --request-log, cannot be used: {error}.") from error
    if len(salt) != _SALT_BYTES:
        raise ConfigError(f"{place} must hold {_SALT_BYTES} bytes in hexadecimal and holds {len(salt)}.")
    return salt

"""A recorded workload as values: lengths, times and block ids of requests, in sessions; never text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]
Scope = Literal["global", "session"]
Clock = Literal["trace", "session"]

NO_BLOCKS: Blocks = np.empty(0, dtype=np.int64)
NO_BLOCKS.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One recorded request.

    session: id of its session; index: its place there, from 0.
    arrival_s: seconds since the earliest request of the trace (Trace.clock "trace") or since the start of the recorded
    session (clock "session").
    think_s: seconds between the end of the session's previous answer and this request; None for the first request and
    where nobody recorded it. api_time_s: seconds from arrival to the end of the answer, or None.
    blocks: read-only int64 ids of the prompt's blocks, in order, perhaps a view shared with other requests. Ids are
    comparable inside the session's namespace; the tokens of a block are (id, offset). The list covers the prompt up to
    the last full block (some recorders) or up to its end with a partial last block (others); empty where the recorder
    kept lengths only.
    """

    session: str
    index: int
    arrival_s: float
    think_s: float | None
    input_tokens: int
    output_tokens: int
    blocks: Blocks
    api_time_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Requests of one conversation, in order of arrival; each usually extends the one before.

    namespace: where its block ids are comparable; empty: the whole trace. A sub-agent has its parent's namespace.
    parent: id of the session it was started by or forked from, or None.
    tool_tokens, system_tokens: lengths at the head of its first prompt, where the recorder says so; else 0.
    """

    id: str
    requests: tuple[TraceRequest, ...]
    namespace: str = ""
    parent: str | None = None
    tool_tokens: int = 0
    system_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rejection:
    """A record that was left out. where: "file:line", for agent sessions with the request's place in the object."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recorded workload.

    block_size: tokens of a block; None: lengths only, reuse is unknown. scope: whether block ids are comparable in the
    whole trace or inside a namespace only. clock: what arrival_s counts from. sessions: by arrival of their first
    request, or by file and id where every session has a clock of its own. rejected: records left out, in reading order.
    notes: what a reader of numbers from this trace must know, a sentence each.
    """

    name: str
    format: str
    block_size: int | None
    scope: Scope
    clock: Clock
    sessions: tuple[Session, ...]
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()

    def requests(self) -> Iterator[TraceRequest]:
        """Every request, session by session."""
        for session in self.sessions:
            yield from session.requests

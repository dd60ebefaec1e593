"""twinpool's request log, read and written: JSONL of times, lengths and block hashes, never text.

One object a line, one line a request:

    time_s         arrival in seconds, on any clock that only goes forward in the file's recording (0 or more)
    input_tokens   tokens of the prompt (1 to 100,000,000)
    output_tokens  tokens of the answer (0 to 100,000,000)
    block_size     tokens of a block (1 to 100,000,000); the same on every line
    hashes         an integer from 0 to 2^63-1 for each full block of the prompt: a hash of its tokens and of all
                   before them, so that equal hashes mean equal prefixes; the tokens after the last full block have none
    session        optional text: requests with the same one are turns of one conversation
    parent         optional text, on a session's first line: the session it was forked from
    think_s        optional: seconds from the end of the session's previous answer to this request
    duration_s     optional: seconds from arrival to the end of the answer

Unknown fields are refused. Where think_s is missing, it follows from the previous turn's time_s and duration_s.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from twinpool.replay.files import Member
from twinpool.replay.formats.assemble import Draft, build_session, earliest_s, order_note
from twinpool.replay.formats.format import Format, keys_of
from twinpool.replay.formats.records import (
    Rejects,
    Unusable,
    block_ids,
    json_lines,
    length,
    optional_seconds,
    seconds,
    text,
)
from twinpool.replay.trace import Session, Trace, TraceRequest

FIELDS = (
    "time_s", "session", "parent", "input_tokens", "output_tokens", "block_size", "hashes", "think_s", "duration_s"
)  # fmt: skip
_NOTE = "Some requests name no session: each of them is a session of its own."


def recognises(line: bytes) -> bool:
    """Whether a file that starts with this line is one."""
    return {"time_s", "input_tokens", "output_tokens", "hashes"} <= keys_of(line)


def read(name: str, members: Iterable[Member], rejects: Rejects) -> Trace:
    """The trace; block ids are the hashes."""
    log = _Log()
    for member, line, record in json_lines(members, rejects):
        try:
            log.add(member.name, line, record)
        except Unusable as error:
            rejects.add(f"{member.name}:{line}", error)
    drafts = [draft for chain in log.chains.values() for draft in chain]
    sessions = log.sessions(earliest_s(drafts))
    return Trace(
        name=name,
        format=FORMAT.name,
        block_size=log.block_size,
        scope="global",
        clock="trace",
        sessions=tuple(sorted(sessions, key=lambda session: session.requests[0].arrival_s)),
        rejected=tuple(rejects.items),
        notes=(*((_NOTE,) if log.anonymous else ()), *order_note(drafts)),
    )


class _Log:
    """Lines so far, by session."""

    def __init__(self) -> None:
        self.block_size: int | None = None
        self.chains: dict[str, list[Draft]] = {}
        self.parents: dict[str, str] = {}
        self.anonymous = 0

    def add(self, member: str, line: int, record: Mapping[str, Any]) -> None:
        """Take one line. Raises Unusable."""
        unknown = sorted(set(record) - set(FIELDS))
        if unknown:
            raise Unusable(f"{unknown[0]} is not a field of a request log")
        block_size = length(record, "block_size", at_least=1)
        if self.block_size not in (None, block_size):
            raise Unusable(f"block_size is {block_size}, but {self.block_size} on the lines before")
        draft = _draft(member, line, record, block_size)
        parent = text(record, "parent") if "parent" in record else None
        session = text(record, "session") if "session" in record else draft.where
        self.block_size = block_size
        self.anonymous += "session" not in record
        self.chains.setdefault(session, []).append(draft)
        if parent is not None:
            self.parents[session] = parent

    def sessions(self, origin_s: float) -> list[Session]:
        """The sessions; missing think times are worked out."""
        return [
            build_session(session, _with_think_times(chain), origin_s=origin_s, parent=self.parents.get(session))
            for session, chain in self.chains.items()
        ]


def _draft(member: str, line: int, record: Mapping[str, Any], block_size: int) -> Draft:
    input_tokens = length(record, "input_tokens", at_least=1)
    return Draft(
        member=member,
        line=line,
        arrival_s=seconds(record, "time_s"),
        input_tokens=input_tokens,
        output_tokens=length(record, "output_tokens"),
        blocks=block_ids(record, "hashes", input_tokens=input_tokens, block_size=block_size, tail="none"),
        think_s=optional_seconds(record, "think_s"),
        api_time_s=optional_seconds(record, "duration_s"),
    )


def _with_think_times(chain: Sequence[Draft]) -> list[Draft]:
    """The chain in order of time. A request that came before the previous answer had ended keeps None."""
    ordered = sorted(chain, key=lambda draft: draft.order)
    known = ordered[:1]
    for before, draft in itertools.pairwise(ordered):
        think_s = draft.think_s
        if think_s is None and before.api_time_s is not None:
            idle_s = draft.arrival_s - before.arrival_s - before.api_time_s
            think_s = idle_s if idle_s >= 0 else None
        known.append(replace(draft, think_s=think_s))
    return known


def write(trace: Trace, stream: IO[str]) -> int:
    """Write a trace as a request log in order of arrival and return the number of lines.

    The trace must have blocks and one clock; only ids of full blocks are written.
    """
    assert trace.block_size is not None
    assert trace.clock == "trace"
    sessions = {session.id: session for session in trace.sessions}
    ordered = sorted(trace.requests(), key=lambda request: request.arrival_s)
    for request in ordered:
        stream.write(json.dumps(_record(request, sessions[request.session], trace.block_size)) + "\n")
    return len(ordered)


def _record(request: TraceRequest, session: Session, block_size: int) -> dict[str, object]:
    """One line's object; what is unknown is left out."""
    record = {
        "time_s": request.arrival_s,
        "session": request.session,
        "parent": session.parent if request.index == 0 else None,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
        "block_size": block_size,
        "think_s": request.think_s,
        "duration_s": request.api_time_s,
        "hashes": request.blocks[: request.input_tokens // block_size].tolist(),
    }
    return {key: value for key, value in record.items() if value is not None}


FORMAT = Format("request-log", "twinpool's request log: JSONL of times, lengths and block hashes", recognises, read)

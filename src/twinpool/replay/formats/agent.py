"""Agent session JSON: one object a session, sub-agents nested, think times, block ids local to the session."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinpool.replay.files import Member
from twinpool.replay.formats.assemble import Draft, build_session
from twinpool.replay.formats.format import Format, keys_of
from twinpool.replay.formats.records import (
    Rejects,
    Unusable,
    as_object,
    block_ids,
    items,
    length,
    optional_seconds,
    seconds,
    text,
)
from twinpool.replay.trace import Session, Trace

_NOTE = (
    "The public collection of April 2026 in this format is friendlier to caches than the corpus of the official benchmark "
    "(infinite cache: 96.8 % of tokens, later collections 65.6 to 85.8 %); say so beside every hit rate."
)
_SUBAGENT = "subagent"
_BLANK = re.compile(r"\s*")


def recognises(line: bytes) -> bool:
    """Whether a file that starts with this line is one; an object laid out over many lines starts with a brace."""
    return line.strip() == b"{" or {"requests", "block_size"} <= keys_of(line)


def read(name: str, members: Iterable[Member], rejects: Rejects) -> Trace:
    """The trace. A prompt has an id for each full block and none for the tokens after the last one.

    A sub-agent is a session of its own in its parent's namespace; its times count from the parent's start.
    """
    reader = _Reader(rejects)
    for member in members:
        for line, found in _objects(member, rejects):
            reader.add(member.name, line, found)
    return Trace(
        name=name,
        format=FORMAT.name,
        block_size=reader.block_size,
        scope="session",
        clock="session",
        sessions=tuple(session for _, session in sorted(reader.found, key=lambda found: found[0])),
        rejected=tuple(rejects.items),
        notes=(_NOTE,),
    )


def _objects(member: Member, rejects: Rejects) -> Iterator[tuple[int, object]]:
    """(first line, value) of every JSON value in the file: one, or one a line."""
    try:
        content = member.data().decode()
    except UnicodeDecodeError as error:
        rejects.add(f"{member.name}:1", f"not JSON ({error})")
        return
    decoder = json.JSONDecoder()
    at, line = _skip_blank(content, 0, 1)
    while at < len(content):
        try:
            value, end = decoder.raw_decode(content, at)
        except (ValueError, RecursionError) as error:
            rejects.add(f"{member.name}:{line}", f"not JSON ({error})")
            return
        yield line, value
        at, line = _skip_blank(content, end, line + content.count("\n", at, end))


def _skip_blank(content: str, at: int, line: int) -> tuple[int, int]:
    """(place of the next character that is not blank, its line)."""
    found = _BLANK.match(content, at)
    assert found is not None
    return found.end(), line + found[0].count("\n")


class _Reader:
    """Sessions read so far, each with what it is sorted by: file, line, place among its object's sessions."""

    def __init__(self, rejects: Rejects) -> None:
        self.found: list[tuple[tuple[str, int, int], Session]] = []
        self.block_size: int | None = None
        self._rejects = rejects
        self._places: dict[str, str] = {}

    def add(self, member: str, line: int, value: object) -> None:
        """Take one session object with its sub-agents, or reject it as a whole if its head is wrong."""
        where = f"{member}:{line}"
        try:
            record = as_object(value, "a session")
            name = text(record, "id")
            block_size = length(record, "block_size", at_least=1)
            if self.block_size not in (None, block_size):
                raise Unusable(f"block_size is {block_size}, but {self.block_size} in the sessions before")
            if record.get("hash_id_scope") != "local":
                raise Unusable("hash_id_scope must be local")
            self._claim(name, where)
            self.block_size = block_size
            chains = list(self._chains(_Agent(member, line, name, record, block_size, namespace=name)))
        except Unusable as error:
            self._rejects.add(where, error)
            return
        self.found += [((member, line, place), session) for place, session in enumerate(chains)]

    def _claim(self, name: str, where: str) -> None:
        """Take a session's name. Raises Unusable if another session has it."""
        if name in self._places:
            raise Unusable(f"session {name} was given at {self._places[name]}")
        self._places[name] = where

    def _chains(self, agent: _Agent) -> Iterator[Session]:
        """The session and, after it, those of its sub-agents. Raises Unusable if it has no list of requests."""
        drafts: list[Draft] = []
        inner: list[Session] = []
        for index, value in enumerate(items(agent.record, "requests")):
            where = f"{agent.place}requests[{index}]"
            try:
                record = as_object(value, "a request")
                if record.get("type") == _SUBAGENT:
                    sub_agent = _sub_agent(agent, record, place=f"{where}.")
                    self._claim(sub_agent.name, f"{agent.member}:{agent.line}:{where}")
                    inner += self._chains(sub_agent)
                else:
                    drafts.append(_draft(agent, record))
            except Unusable as error:
                self._rejects.add(f"{agent.member}:{agent.line}:{where}", error)
        if drafts:
            yield build_session(
                agent.name,
                drafts,
                origin_s=0.0,
                namespace=agent.namespace,
                parent=agent.parent,
                tool_tokens=length(agent.record, "tool_tokens"),
                system_tokens=length(agent.record, "system_tokens"),
            )
        yield from inner


@dataclass(frozen=True, slots=True)
class _Agent:
    """An object with requests. place: its path inside the file's object; start_s: on the outermost session's clock."""

    member: str
    line: int
    name: str
    record: Mapping[str, Any]
    block_size: int
    namespace: str
    parent: str | None = None
    start_s: float = 0.0
    place: str = ""


def _sub_agent(parent: _Agent, record: Mapping[str, Any], *, place: str) -> _Agent:
    """A sub-agent. Raises Unusable if its id or start is missing."""
    return replace(
        parent,
        name=f"{parent.name}/{text(record, 'agent_id')}",
        record=record,
        parent=parent.name,
        start_s=parent.start_s + seconds(record, "t"),
        place=place,
    )


def _draft(agent: _Agent, record: Mapping[str, Any]) -> Draft:
    """One request. Raises Unusable."""
    input_tokens = length(record, "in", at_least=1)
    return Draft(
        member=agent.member,
        line=agent.line,
        arrival_s=agent.start_s + seconds(record, "t"),
        input_tokens=input_tokens,
        output_tokens=length(record, "out"),
        blocks=block_ids(record, "hash_ids", input_tokens=input_tokens, block_size=agent.block_size, tail="none"),
        think_s=optional_seconds(record, "think_time"),
        api_time_s=optional_seconds(record, "api_time"),
    )


FORMAT = Format("agent", "agent session JSON: think times, sub-agents, block ids of a session", recognises, read)

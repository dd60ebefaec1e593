"""Mooncake JSONL: lengths and block ids of single requests, comparable in the whole trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from twinpool.replay.files import Member
from twinpool.replay.formats.assemble import Draft, order_note, single_sessions
from twinpool.replay.formats.format import Format, keys_of
from twinpool.replay.formats.records import Rejects, Unusable, block_ids, json_lines, length, seconds
from twinpool.replay.trace import Trace

BLOCK_SIZE_TOKENS = 512  # fixed by the format: the published traces hash prompts in blocks of 512 tokens
_MS_PER_S = 1000.0
_NOTE = "The recorder kept no session ids: every request is a session of its own, and think times are unknown."


def recognises(line: bytes) -> bool:
    """Whether a file that starts with this line is one."""
    keys = keys_of(line)
    return {"timestamp", "input_length", "output_length", "hash_ids"} <= keys and "chat_id" not in keys


def read(name: str, members: Iterable[Member], rejects: Rejects) -> Trace:
    """The trace. A request whose prompt ends inside a block has an id for that block too."""
    drafts = []
    for member, line, record in json_lines(members, rejects):
        try:
            drafts.append(_draft(member.name, line, record))
        except Unusable as error:
            rejects.add(f"{member.name}:{line}", error)
    return Trace(
        name=name,
        format=FORMAT.name,
        block_size=BLOCK_SIZE_TOKENS,
        scope="global",
        clock="trace",
        sessions=single_sessions(drafts),
        rejected=tuple(rejects.items),
        notes=(_NOTE, *order_note(drafts)),
    )


def _draft(member: str, line: int, record: Mapping[str, Any]) -> Draft:
    input_tokens = length(record, "input_length", at_least=1)
    return Draft(
        member=member,
        line=line,
        arrival_s=seconds(record, "timestamp") / _MS_PER_S,
        input_tokens=input_tokens,
        output_tokens=length(record, "output_length"),
        blocks=block_ids(record, "hash_ids", input_tokens=input_tokens, block_size=BLOCK_SIZE_TOKENS, tail="partial"),
    )


FORMAT = Format("mooncake", "Mooncake JSONL: single requests with global block ids", recognises, read)

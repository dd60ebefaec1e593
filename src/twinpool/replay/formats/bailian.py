"""Qwen-Bailian JSONL: a tree of chats with lengths and fine block ids, comparable in the whole trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.replay.files import Member
from twinpool.replay.formats.assemble import Draft, build_session, earliest_s, order_note
from twinpool.replay.formats.format import Format, keys_of
from twinpool.replay.formats.records import Rejects, Unusable, block_ids, integer, json_lines, length, seconds
from twinpool.replay.trace import Session, Trace

BLOCK_SIZE_TOKENS = 16  # fixed by the format: the published traces hash prompts in blocks of 16 tokens
NO_PARENT = -1
_NOTE = "The recorder kept no end times: think times are unknown."


@dataclass(frozen=True, slots=True)
class _Chat:
    """One line: a chat is one request, its parent the request before it in the conversation (-1: none)."""

    chat: int
    parent: int
    draft: Draft


def recognises(line: bytes) -> bool:
    """Whether a file that starts with this line is one."""
    return {"chat_id", "parent_chat_id", "input_length", "output_length", "hash_ids"} <= keys_of(line)


def read(name: str, members: Iterable[Member], rejects: Rejects) -> Trace:
    """The trace. A chat continues its parent's session; the second child of a parent starts a fork of that session."""
    chats: dict[int, _Chat] = {}
    for member, line, record in json_lines(members, rejects):
        try:
            chat = _chat(member.name, line, record)
            if chat.chat in chats:
                raise Unusable(f"chat_id {chat.chat} was used at {chats[chat.chat].draft.where}")
            chats[chat.chat] = chat
        except Unusable as error:
            rejects.add(f"{member.name}:{line}", error)
    drafts = [chat.draft for chat in chats.values()]
    ordered = sorted(chats.values(), key=lambda chat: chat.draft.order)
    orphans = sum(chat.parent != NO_PARENT and chat.parent not in chats for chat in ordered)
    return Trace(
        name=name,
        format=FORMAT.name,
        block_size=BLOCK_SIZE_TOKENS,
        scope="global",
        clock="trace",
        sessions=_sessions(ordered, earliest_s(drafts)),
        rejected=tuple(rejects.items),
        notes=(_NOTE, *_orphan_note(orphans), *order_note(drafts)),
    )


def _orphan_note(orphans: int) -> tuple[str, ...]:
    return (f"{orphans} requests follow one that is not in the trace; each starts a session here.",) if orphans else ()


def _sessions(ordered: Sequence[_Chat], origin_s: float) -> tuple[Session, ...]:
    """Chains of the tree, in order of their first request, which names the session."""
    chains: dict[int, list[Draft]] = {}
    parents: dict[int, int | None] = {}
    session_of: dict[int, int] = {}
    continued: set[int] = set()
    for chat in ordered:
        before = session_of.get(chat.parent)
        if before is not None and chat.parent not in continued:
            continued.add(chat.parent)
            session_of[chat.chat] = before
            chains[before].append(chat.draft)
            continue
        session_of[chat.chat] = chat.chat
        chains[chat.chat] = [chat.draft]
        parents[chat.chat] = before
    return tuple(
        build_session(str(first), drafts, origin_s=origin_s, parent=None if above is None else str(above))
        for (first, drafts), above in zip(chains.items(), parents.values(), strict=True)
    )


def _chat(member: str, line: int, record: Mapping[str, Any]) -> _Chat:
    input_tokens = length(record, "input_length", at_least=1)
    draft = Draft(
        member=member,
        line=line,
        arrival_s=seconds(record, "timestamp"),
        input_tokens=input_tokens,
        output_tokens=length(record, "output_length"),
        # The published description does not say whether a partial last block has an id.
        blocks=block_ids(record, "hash_ids", input_tokens=input_tokens, block_size=BLOCK_SIZE_TOKENS, tail="either"),
    )
    return _Chat(integer(record, "chat_id"), integer(record, "parent_chat_id", at_least=NO_PARENT), draft)


FORMAT = Format("bailian", "Qwen-Bailian JSONL: chat trees with global block ids", recognises, read)

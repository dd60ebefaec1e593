"""From records to sessions: order by time, places, time from the first arrival, and prompts that share their blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.replay.trace import Blocks, Session, TraceRequest

_REMEMBERED_CHAINS = 4  # side calls alternate with the main conversation: a few live chains, not one


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A record that passed its checks. member, line: where it stands; arrival_s: on the recorder's clock."""

    member: str
    line: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: Blocks
    think_s: float | None = None
    api_time_s: float | None = None

    @property
    def where(self) -> str:
        """ "file:line"."""
        return f"{self.member}:{self.line}"

    @property
    def order(self) -> tuple[float, str, int]:
        """What records are sorted by: time, then file and line."""
        return (self.arrival_s, self.member, self.line)


def earliest_s(drafts: Iterable[Draft]) -> float:
    """The first arrival on the recorder's clock; 0 without records."""
    return min((draft.arrival_s for draft in drafts), default=0.0)


def order_note(drafts: Sequence[Draft]) -> tuple[str, ...]:
    """A note if records do not stand in order of time; files count in name order."""
    by_place = sorted(drafts, key=lambda draft: (draft.member, draft.line))
    late = sum(b.arrival_s < a.arrival_s for a, b in itertools.pairwise(by_place))
    if not late:
        return ()
    return (f"{late} requests stand after a later one; all are ordered by time here.",)


def single_sessions(drafts: Sequence[Draft]) -> tuple[Session, ...]:
    """A session for each request, in order of time: for formats that do not say which requests follow one another."""
    origin_s = earliest_s(drafts)
    ordered = sorted(drafts, key=lambda draft: draft.order)
    return tuple(build_session(draft.where, [draft], origin_s=origin_s) for draft in ordered)


def build_session(
    session: str,
    drafts: Iterable[Draft],
    *,
    origin_s: float,
    namespace: str = "",
    parent: str | None = None,
    tool_tokens: int = 0,
    system_tokens: int = 0,
) -> Session:
    """A session of these records in order of time, arrivals counted from origin_s. Nothing is left out or changed."""
    ordered = sorted(drafts, key=lambda draft: draft.order)
    blocks = shared_views([draft.blocks for draft in ordered])
    requests = tuple(
        TraceRequest(
            session=session,
            index=index,
            arrival_s=draft.arrival_s - origin_s,
            think_s=draft.think_s if index else None,
            input_tokens=draft.input_tokens,
            output_tokens=draft.output_tokens,
            blocks=blocks[index],
            api_time_s=draft.api_time_s,
        )
        for index, draft in enumerate(ordered)
    )
    return Session(session, requests, namespace, parent, tool_tokens, system_tokens)


def shared_views(prompts: Sequence[Blocks]) -> list[Blocks]:
    """The same ids, but a prompt that a later one extends is a view of it: a conversation is kept once, not per turn."""
    longest: list[Blocks] = []
    shared: list[Blocks] = []
    for prompt in reversed(prompts):
        whole = next((chain for chain in longest if _starts_with(chain, prompt)), None)
        if whole is None:
            longest = [prompt, *longest[: _REMEMBERED_CHAINS - 1]]
        shared.append(prompt if whole is None else whole[: len(prompt)])
    return shared[::-1]


def _starts_with(chain: Blocks, prompt: Blocks) -> bool:
    return len(prompt) <= len(chain) and np.array_equal(chain[: len(prompt)], prompt)

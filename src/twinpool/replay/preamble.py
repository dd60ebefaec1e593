"""Tool and system prompts that several sessions share, where a trace says how long they are but not that they are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from twinpool.replay.trace import Blocks, Session, Trace


def share_preambles(trace: Trace) -> Trace:
    """The same trace in one namespace, in which sessions with preambles of the same length begin with the same blocks.

    An assumption, and a generous one: equal lengths are taken for equal text. Only whole blocks are shared.
    """
    if trace.block_size is None:
        return trace
    numbers = _Numbers()
    for session in trace.sessions:
        numbers.share(session, block_size=trace.block_size)
    sessions = tuple(numbers.renamed(session) for session in trace.sessions)
    note = "Tool and system prompts of equal length were taken to be the same text in all sessions."
    return replace(trace, sessions=sessions, scope="global", notes=(*trace.notes, note))


class _Numbers:
    """Block ids that are unique over all namespaces, those of preambles by the preamble's length and their place in it."""

    def __init__(self) -> None:
        self._number: dict[tuple[str, int], int] = {}
        self._preamble: dict[tuple[int, int], int] = {}

    def share(self, session: Session, *, block_size: int) -> None:
        """Give the blocks of a session's preamble the numbers of all preambles of its length."""
        length = session.tool_tokens + session.system_tokens
        for place, block in enumerate(session.requests[0].blocks[: length // block_size].tolist()):
            self._number.setdefault(
                (session.namespace, block), self._preamble.setdefault((length, place), -1 - len(self._preamble))
            )

    def renamed(self, session: Session) -> Session:
        """The session with its blocks renumbered, in the trace's one namespace."""
        requests = tuple(
            replace(request, blocks=self._renumbered(session.namespace, request.blocks)) for request in session.requests
        )
        return replace(session, requests=requests, namespace="")

    def _renumbered(self, namespace: str, blocks: Blocks) -> Blocks:
        unique, where = np.unique(blocks, return_inverse=True)
        named = [self._number.setdefault((namespace, block), len(self._number)) for block in unique.tolist()]
        return np.array(named, np.int64)[where] if named else blocks

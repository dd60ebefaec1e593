"""What lies on the host now: how much of its KV can be resumed from, and how many sessions that is."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.prefix.node import Node


@dataclass(frozen=True, slots=True)
class HostView:
    """kv_tokens: KV on the host; resumable_tokens: the part with a state at its end or below it, on host or device.

    sessions: branches of the tree whose KV is on the host to their ends; resumable_sessions: those that end in a state.
    """

    kv_tokens: int
    resumable_tokens: int
    sessions: int
    resumable_sessions: int

    @property
    def resumable_share(self) -> float:
        """resumable_tokens / kv_tokens, 1.0 for an empty host: the rest is KV that only a later state could use."""
        return self.resumable_tokens / self.kv_tokens if self.kv_tokens else 1.0


def host_view(root: Node, *, page_size: int) -> HostView:
    """Walk the whole tree under `root`, in the thread that owns it; pages hold `page_size` tokens."""
    order = [root]
    for node in order:  # it grows while it is read: parents before their children
        order.extend(node.children.values())
    leads_to_state: set[Node] = set()
    kv_tokens = resumable_tokens = sessions = resumable_sessions = 0
    for node in reversed(order):
        ends_in_state = bool(node.state or node.host_state)
        resumable = ends_in_state or node in leads_to_state
        if resumable and node.parent is not None:
            leads_to_state.add(node.parent)
        if node.host_pages is None:
            continue
        tokens = len(node.host_pages) * page_size
        kv_tokens += tokens
        resumable_tokens += tokens * resumable
        if not node.children:
            sessions += 1
            resumable_sessions += ends_in_state
    return HostView(kv_tokens, resumable_tokens, sessions, resumable_sessions)

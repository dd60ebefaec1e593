"""Why a prompt's tokens were not reused: a bounded memory of evicted edges, and the attribution rule.

0 ....... resume ....... gone ....... grid ....... kv ....... ghost ....... prompt
  reused   | state_evicted | no_checkpoint | below_grid | kv_evicted | new
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from twinpool.prefix.node import TOKEN_BYTES, Ghost, Node
from twinpool.prefix.walk import common_bytes
from twinpool.request import Reuse
from twinpool.units import round_down

# Evicted keys that are remembered; the oldest are forgotten first. Each is charged for its object and its place in a dict, too.
GHOST_BYTES, _OVERHEAD_BYTES = 16 << 20, 256


class Ghosts:
    """Evicted edges, hung where they were: a ghost under a live node, or under the ghost of its parent."""

    def __init__(self, limit_bytes: int = GHOST_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._age: deque[tuple[dict[bytes, Ghost], bytes, Ghost]] = deque()

    def remember(self, parent: Node, first_page: bytes, evicted: Node) -> None:
        """`evicted` has just left `parent`; what was already a ghost below it comes along."""
        self._hang(parent.ghosts, first_page, Ghost(evicted.key, evicted.ghosts))

    def _hang(self, home: dict[bytes, Ghost], first_page: bytes, ghost: Ghost) -> None:
        home[first_page] = ghost
        self._age.append((home, first_page, ghost))
        self._bytes += len(ghost.key) + _OVERHEAD_BYTES
        while self._bytes > self._limit_bytes:
            home, first_page, oldest = self._age.popleft()
            self._bytes -= len(oldest.key) + _OVERHEAD_BYTES
            if home.get(first_page) is oldest:
                del home[first_page]

    def revive(self, parent: Node, inserted: Node, page_bytes: int) -> None:
        """`inserted` is back under `parent`: ghosts along its edge go, those past its end hang below it from now on."""
        key, position, ghosts = inserted.key, 0, parent.ghosts
        while ghosts:
            ghost = ghosts.pop(key[position : position + page_bytes], None)
            if ghost is None:
                return
            shared = common_bytes(ghost.key, key, position, len(key)) // page_bytes * page_bytes
            position += shared
            if position == len(key):
                if shared == len(ghost.key):
                    inserted.ghosts = ghost.children
                else:
                    rest = ghost.key[shared:]
                    self._hang(inserted.ghosts, rest[:page_bytes], Ghost(rest, ghost.children))
                return
            if shared < len(ghost.key):
                return
            ghosts = ghost.children

    @staticmethod
    def evicted_tokens(node: Node, key: bytes, position: int, page_bytes: int) -> int:
        """Tokens of `key` from `position` (bytes) on that were once cached below `node`."""
        start, ghosts, end = position, node.ghosts, len(key)
        while ghosts:
            ghost = ghosts.get(key[position : position + page_bytes])
            if ghost is None:
                break
            shared = common_bytes(ghost.key, key, position, end)
            position += shared
            if shared < len(ghost.key):
                break
            ghosts = ghost.children
        return (position - start) // TOKEN_BYTES

    def clear(self) -> None:
        """Forget everything."""
        self._age.clear()
        self._bytes = 0


def restored(reuse: Reuse, *, tokens: int, from_storage: int = 0) -> Reuse:
    """The report when so many tokens past the device's checkpoint were brought back from the host, some of them read from the disk
    for this request.
    """
    return replace(
        reuse, reused=reuse.reused + tokens, from_host=tokens - from_storage, from_storage=from_storage,
        gaps=_without(reuse, tokens),
    )  # fmt: skip


def restore_failed(reuse: Reuse, *, tokens: int) -> Reuse:
    """The report when so many tokens could have been brought back and there was no room for them on the device."""
    return replace(reuse, gaps=(("restore_failed", tokens), *_without(reuse, tokens)))


def restore_undone(reuse: Reuse) -> Reuse:
    """The report of a request that lost what it had resumed from, and computed it."""
    if not reuse.reused:
        return reuse
    gaps = dict(reuse.gaps)
    failed = gaps.pop("restore_failed", 0) + reuse.reused
    return Reuse(prompt=reuse.prompt, kv_matched=reuse.kv_matched, gaps=(("restore_failed", failed), *gaps.items()))


def _without(reuse: Reuse, tokens: int) -> tuple[tuple[str, int], ...]:
    """The gaps behind the first `tokens` unreused ones."""
    kept: list[tuple[str, int]] = []
    for reason, count in reuse.gaps:
        taken = min(tokens, count)
        tokens -= taken
        if count > taken:
            kept.append((reason, count - taken))
    return tuple(kept)


def attribute(
    *, prompt: int, limit: int, kv: int, resume: int, gone: int, grid: int, evicted: int, from_host: bool = False
) -> Reuse:
    """Split a prompt's tokens by why they were or were not reused (all in tokens; the parts add up to `prompt`).

    gone: deepest length ≤ kv whose state was evicted, 0 for none; grid: distance of checkpoints; evicted: tokens past kv that were
    cached once; from_host: it was evicted there; limit: tokens that may be matched at all (the last one is always computed again).
    """
    after_gone = max(resume, gone)
    after_grid = max(after_gone, round_down(kv, grid))
    evicted = min(evicted, max(0, limit - kv))
    parts = (
        ("host_state_evicted" if from_host else "state_evicted", after_gone - resume),
        ("no_checkpoint", after_grid - after_gone),
        ("below_grid", kv - after_grid),
        ("kv_evicted", evicted),
        ("new", prompt - kv - evicted),
    )
    return Reuse(prompt=prompt, kv_matched=kv, reused=resume, gaps=tuple(part for part in parts if part[1]))

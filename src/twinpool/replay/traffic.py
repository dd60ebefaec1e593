"""When requests arrive: as recorded, scaled, in order only, or in a closed loop of sessions that wait for their answers."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from twinpool.errors import ConfigError
from twinpool.replay.trace import Session, Trace


def parents(trace: Trace) -> dict[str, str | None]:
    """Id of every session to that of the one it starts after; None: it starts by itself.

    A parent that was left out of the trace, or stands behind the session there, is none.
    """
    found: dict[str, str | None] = {}
    for session in trace.sessions:
        found[session.id] = session.parent if session.parent in found else None
    return found


def trees(trace: Trace) -> dict[str, str]:
    """Id of every session to that of the root of its tree, itself for a root; in the order of the trace."""
    found: dict[str, str] = {}
    for session, parent in parents(trace).items():
        found[session] = session if parent is None else found[parent]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request that arrives at due_s (virtual seconds). warm_up: it only fills the cache and counts in no report."""

    session: Session
    index: int
    due_s: float
    warm_up: bool = False


class Traffic:
    """Arrivals by time. `due` gives what has arrived; `finished` tells that an answer is complete."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Arrival]] = []
        self._pushed = 0

    @property
    def next_s(self) -> float | None:
        """When the next known arrival is; None when none is known now."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> Iterable[Arrival]:
        """Arrivals up to now, in order; those among them that `finished` brings meanwhile (of a request that was refused at once)."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[2]

    def finished(self, arrival: Arrival, now_s: float) -> None:
        """An answer is complete (or its request was refused); a closed loop goes on from here."""

    def _push(self, arrival: Arrival) -> None:
        heapq.heappush(self._heap, (arrival.due_s, self._pushed, arrival))
        self._pushed += 1


class OpenTraffic(Traffic):
    """Arrivals at their recorded times divided by `speed`, whatever the server does."""

    def __init__(self, trace: Trace, *, speed: float) -> None:
        super().__init__()
        if trace.clock == "session" and sum(parent is None for parent in parents(trace).values()) > 1:
            raise ConfigError(
                f"{trace.name}: every session has a clock of its own, so there are no arrival times to replay; use "
                "--sessions N (closed loop)."
            )
        arrivals = [
            Arrival(session, request.index, request.arrival_s / speed)
            for session in trace.sessions
            for request in session.requests
        ]
        for arrival in sorted(arrivals, key=lambda one: one.due_s):
            self._push(arrival)


@dataclass(slots=True)
class _Tree:
    """A session and its sub-agents: how many of its members have not ended, and by parent the sub-agents that wait for one of its
    requests (its index, seconds after its answer, the sub-agent).
    """

    members: int = 1
    waiting: dict[str, list[tuple[int, float, Session]]] = field(default_factory=dict)


class ClosedTraffic(Traffic):
    """N session trees alive. A session's next request follows its previous answer by its think time (at most `idle_cap_s`);
    when a tree has ended the next one of the trace starts. Sub-agents start after the request of their parent that they
    followed in the recording.

    seed: order of the trees, and with `start_anywhere` the request at which each of the first N begins: what came before
    it is sent as one warm-up prompt (its own history), so that the run starts in the middle of things.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        alive: int,
        idle_cap_s: float,
        seed: int,
        start_anywhere: bool,
        default_think_s: float = 0.0,
    ) -> None:
        super().__init__()
        parent_of = parents(trace)
        roots = [session for session in trace.sessions if parent_of[session.id] is None]
        self._children: dict[str, list[Session]] = {}
        for session in trace.sessions:
            parent = parent_of[session.id]
            if parent is not None:
                self._children.setdefault(parent, []).append(session)
        generator = random.Random(seed)
        generator.shuffle(roots)
        self._roots = roots[::-1]
        self._idle_cap_s, self._think_s = idle_cap_s, default_think_s
        self._trees: dict[str, _Tree] = {}
        self._tree_of: dict[str, str] = {}
        self.peak_alive = 0
        for _ in range(min(alive, len(roots))):
            root = self._roots[-1]
            first = generator.randrange(len(root.requests)) if start_anywhere else 0
            self._start_next(0.0, first=first)

    def finished(self, arrival: Arrival, now_s: float) -> None:
        """Push the session's next request, start its sub-agents that waited for this one, and a new tree if this one is over."""
        session, index = arrival.session, arrival.index
        tree = self._trees[self._tree_of[session.id]]
        waiting = tree.waiting.pop(session.id, [])
        for after, delay_s, child in waiting:
            if after <= index:
                self._tree_of[child.id] = self._tree_of[session.id]
                self._push(Arrival(child, 0, now_s + delay_s))
        if later := [one for one in waiting if one[0] > index]:
            tree.waiting[session.id] = later
        if index + 1 < len(session.requests):
            self._push(Arrival(session, index + 1, now_s + self._think(session, index + 1)))
            return
        tree.members -= 1
        if tree.members == 0:
            del self._trees[self._tree_of[session.id]]
            self._start_next(now_s, first=0)

    def _start_next(self, now_s: float, *, first: int) -> None:
        """The next tree of the trace, from a request of its root on; the one before that goes ahead as warm-up."""
        if not self._roots:
            return
        root = self._roots.pop()
        tree = _Tree()
        self._trees[root.id] = tree
        self._tree_of[root.id] = root.id
        self._plan_children(root, tree, first)
        self.peak_alive = max(self.peak_alive, len(self._trees))
        self._push(Arrival(root, max(0, first - 1), now_s, warm_up=first > 0))

    def _plan_children(self, root: Session, tree: _Tree, first: int) -> None:
        """Sub-agents that start after a request of the root from `first` on, and theirs; forks of forks may go deep."""
        open_parents = [root]
        while open_parents:
            parent = open_parents.pop()
            found = [self._planned(parent, child) for child in self._children.get(parent.id, ())]
            kept = [one for one in found if parent is not root or one[0] >= first]
            if kept:
                tree.waiting[parent.id] = kept
                tree.members += len(kept)
                open_parents += [child for _, _, child in kept]

    def _planned(self, parent: Session, child: Session) -> tuple[int, float, Session]:
        """Which request of its parent a sub-agent waits for, how long after the answer it starts, and itself."""
        began_s = child.requests[0].arrival_s
        before = [request for request in parent.requests if request.arrival_s <= began_s]
        if not before:
            return 0, 0.0, child
        last = before[-1]
        end_s = last.arrival_s + (last.api_time_s or 0.0)
        return last.index, min(max(0.0, began_s - end_s), self._idle_cap_s), child

    def _think(self, session: Session, index: int) -> float:
        think_s = session.requests[index].think_s
        return min(self._think_s if think_s is None else max(0.0, think_s), self._idle_cap_s)

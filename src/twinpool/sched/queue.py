"""Waiting requests and the order in which they are tried (--schedule-policy)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from twinpool.request import Request

# Beyond this many waiting requests, probing the tree for each costs more than the better order brings: FCFS is used.
LPM_QUEUE_LIMIT = 128


class WaitQueue:
    """FIFO of waiting requests; retracted ones come back to the front, oldest first.

    policy 'fcfs': arrival order; 'lpm': longest resumable prefix first, on device or host, arrival order among equals.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Add a new request at the end."""
        self._requests.append(request)

    def push_front(self, request: Request) -> None:
        """Put a retracted request before everything that arrived later."""
        self._requests.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a request out (admitted, aborted)."""
        if self._requests and self._requests[0] is request:
            self._requests.popleft()
        else:
            self._requests.remove(request)

    def find(self, rid: int) -> Request | None:
        """The waiting request with this id."""
        return next((request for request in self._requests if request.rid == rid), None)

    def ordered(self, reusable_tokens: Callable[[Request], int]) -> list[Request]:
        """Requests in the order to try. `reusable_tokens` probes the prefix cache (used by 'lpm' only)."""
        if self._policy == "lpm" and 1 < len(self._requests) <= LPM_QUEUE_LIMIT:
            return sorted(self._requests, key=reusable_tokens, reverse=True)
        return list(self._requests)

"""The other ranks as rank 0 has them: processes of this machine, each at the end of a connection."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from twinpool.config.resolve import Resolved
from twinpool.engine.rank_segments import StorePart
from twinpool.errors import RankLost, TwinpoolError
from twinpool.memory.host import HostArena
from twinpool.memory.ledger import Ledger
from twinpool.models.spec import ModelSpec
from twinpool.step import Order, StepPlan

log = logging.getLogger("twinpool.engine")

_END_S = 10.0  # that a rank has to end by itself
_NAME_S = 2.0  # until a broken connection is known as the end of a process


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a rank is told first. meeting: the file over which ranks meet; threads: of its kernels."""

    rank: int
    folder: Path
    spec: ModelSpec
    resolved: Resolved
    pre_load_bytes: int
    threads: int
    meeting: Path


@dataclass(frozen=True, slots=True)
class Pools:
    """What all ranks allocate: the same pages and slots, and the same host tier."""

    ledger: Ledger
    tier: HostArena | None


@dataclass(frozen=True, slots=True)
class Told:
    """A step, or orders without one (plan None), and the tokens sampled since the last step: (request, token)."""

    tokens: tuple[tuple[int, int], ...]
    orders: tuple[Order, ...]
    plan: StepPlan | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The last word of a rank that ends: an expected error, or a sentence about another."""

    error: TwinpoolError | str


class _Peer:
    """One rank's process and its connection."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "twinpool.engine.follower", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.connection = Connection(ours.detach())

    def end(self, *, patience_s: float) -> None:
        """Wait for the process, then kill it."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Ranks:
    """Ranks 1 to n - 1. One that ends before `close` takes all others with it, and every call after that raises RankLost.

    `collect` and `send` belong to one thread at a time.
    """

    def __init__(self, ranks: int) -> None:
        """Start their processes; they wait to be told what to be. ranks: with rank 0."""
        self._folder = tempfile.TemporaryDirectory(prefix="twinpool-ranks-")
        self.meeting = Path(self._folder.name) / "meeting"
        self._peers: list[_Peer] = []
        self._lost: RankLost | None = None
        self._closing = False
        self._is_lost = threading.Event()
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._on_lost: Callable[[], object] = lambda: None
        self._on_part: Callable[[int, StorePart], None] | None = None
        self.count = ranks
        for rank in range(1, ranks):
            self._peers.append(_Peer(rank))

    def send(self, message: object) -> None:
        """Send the same to every rank."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for peer in self._peers:
            self._send_bytes(peer, data)

    def send_each(self, messages: Sequence[object]) -> None:
        """Send each rank its own, in their order."""
        for peer, message in zip(self._peers, messages, strict=True):
            self._send_bytes(peer, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _send_bytes(self, peer: _Peer, data: bytes) -> None:
        self.check()
        try:
            peer.connection.send_bytes(data)
        except OSError as error:
            self._is_lost.wait(_NAME_S)
            raise self._lose(self._last_word(peer)) from error

    def collect(self) -> list[Any]:
        """One message of every rank, in their order. Raises what a rank failed with, or RankLost."""
        found: dict[int, Any] = {}
        waiting = {peer.connection: peer for peer in self._peers}
        while waiting:
            for connection in wait(list(waiting)):
                peer = waiting.pop(connection)  # type: ignore[call-overload]  # of the kind that went in
                message = self._receive(peer)
                if isinstance(message, TwinpoolError):
                    raise message
                found[peer.rank] = message
        return [found[peer.rank] for peer in self._peers]

    def _receive(self, peer: _Peer) -> Any:
        """A message, or the error that was the last one; None at the end of a rank that was told to end."""
        try:
            message = peer.connection.recv()
        except (EOFError, OSError):
            return None if self._closing else self._lose(self._last_word(peer))
        if not isinstance(message, Failed):
            return message
        if isinstance(message.error, TwinpoolError):
            return message.error
        # One that has ended makes others fail, which may be heard of first.
        ended = next((one for one in self._peers if one is not peer and one.process.poll() is not None), None)
        return self._lose(f"rank {peer.rank} has failed ({message.error})" if ended is None else self._last_word(ended))

    def _last_word(self, peer: _Peer) -> str:
        peer.end(patience_s=_NAME_S)
        code = peer.process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process of rank {peer.rank} has ended ({how})"

    def forget_meeting(self) -> None:
        """All have met: the file is not needed, and nobody would remove it if this process were killed."""
        self._folder.cleanup()

    def watch(self, on_part: Callable[[int, StorePart], None] | None = None) -> None:
        """From now on nobody collects: what comes of a rank is its part of a segment for the disk, or its end.

        on_part: called in a thread of its own, with the rank.
        """
        self._on_part = on_part
        self._watcher = threading.Thread(target=self._watch, name="twinpool-ranks", daemon=True)
        self._watcher.start()

    def on_lost(self, call: Callable[[], object]) -> None:
        """Call this, from any thread, when a rank is lost, or now if one is."""
        with self._lock:
            self._on_lost = call
            lost = self._lost
        if lost is not None:
            call()

    def _watch(self) -> None:
        peers = {peer.connection: peer for peer in self._peers}
        while peers:
            for connection in wait(list(peers)):
                peer = peers[connection]  # type: ignore[index]  # of the kind that went in
                message = self._receive(peer)
                if isinstance(message, StorePart):
                    assert self._on_part is not None, "ranks that are told to store have somebody to take it"
                    self._on_part(peer.rank, message)
                elif message is None:
                    del peers[peer.connection]
                else:
                    return

    def lose(self, error: Exception) -> None:
        """A step failed in rank 0, so that ranks no longer agree; if another rank has ended, that is the reason."""
        if not self._is_lost.wait(_NAME_S):
            self._lose(f"rank 0 could not compute a step ({type(error).__name__}: {error})")

    def _lose(self, sentence: str) -> RankLost:
        """Note the first loss, end all ranks, tell who wants to know."""
        with self._lock:
            if self._lost is not None:
                return self._lost
            self._lost = RankLost(f"{sentence}, and no rank can go on without the others: start again.")
        for peer in self._peers:
            peer.process.kill()
        self._is_lost.set()
        self._on_lost()
        return self._lost

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """End all ranks; their steps are done."""
        self._closing = True
        if self._lost is None:
            for peer in self._peers:
                with contextlib.suppress(OSError):
                    peer.connection.send(None)
        for peer in self._peers:
            peer.end(patience_s=_END_S if self._lost is None else 0.0)
        if self._watcher is not None:
            self._watcher.join()
        for peer in self._peers:
            peer.connection.close()
        self._folder.cleanup()

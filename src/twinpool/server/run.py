"""From an open socket to a drained stop: uvicorn, signals, and the order in which things end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from twinpool.errors import ConfigError, RankLost
from twinpool.server.bridge import Bridge, State

log = logging.getLogger("twinpool.server")

_BACKLOG = 2048
_STOP_WAIT_S = 1.0
_CLOSE_WAIT_S = 125.0  # a disk tier writes what waits for a minute, and gives the file that it is writing another one
_ATTEMPT = " (while attempting"  # create_server names the address after its reason


def run_until_stopped(*, app: FastAPI, bridge: Bridge, host: str, port: int) -> None:
    """Serve `app` on the calling thread.

    Raises ConfigError if the address cannot be bound, what the engine's boot raised, and RankLost.
    """
    listener = _listen(host, port)
    with contextlib.closing(listener):
        asyncio.run(_main(app, bridge, listener))
    if isinstance(bridge.failure, RankLost) or (bridge.failure is not None and not bridge.was_ready):
        raise bridge.failure


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the slow part begins so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({reason.partition(_ATTEMPT)[0]}): choose another with --host and --port."
        ) from error
    # Connections inherit it. asyncio sets it only on sockets made with an explicit protocol number, which this one is
    # not, and without it a reply's second write waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


async def _main(app: FastAPI, bridge: Bridge, listener: socket.socket) -> None:
    """Everything on the event loop. The bridge's life is here, not in the app's lifespan: uvicorn skips that one's end
    when it is told to stop at once."""
    config = uvicorn.Config(app, log_config=None, access_log=False, log_level="warning", lifespan="off", loop="asyncio")
    server = _Server(config)
    stopping, at_once = asyncio.Event(), asyncio.Event()
    n_signals = 0

    def on_signal() -> None:
        nonlocal n_signals
        n_signals += 1
        if n_signals == 1:
            log.info("Stopping: no new requests are taken; those that run are finished first. Again to stop at once.")
            bridge.drain()
            stopping.set()
        else:
            server.force_exit = server.should_exit = True
            at_once.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    bridge.start()
    watchers = [
        asyncio.create_task(_announce(server, bridge, listener)),
        asyncio.create_task(_stop_when_drained(server, bridge, stopping)),
        asyncio.create_task(_stop_when_rank_lost(server, bridge)),
    ]
    try:
        await server.serve(sockets=[listener])
    finally:
        for watcher in watchers:
            watcher.cancel()
        await _end(bridge, at_once)
        await asyncio.gather(*watchers, return_exceptions=True)


async def _end(bridge: Bridge, at_once: asyncio.Event) -> None:
    """Let the engine write what it has for the disk, unless it has none or has failed, or somebody is in a hurry."""
    ending = asyncio.create_task(bridge.stop(timeout_s=_CLOSE_WAIT_S))
    hurry = asyncio.create_task(at_once.wait())
    if bridge.was_ready and bridge.failure is None:
        await asyncio.wait((ending, hurry), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((ending,), timeout=_STOP_WAIT_S)
    for task in (ending, hurry):
        task.cancel()
    await asyncio.gather(ending, hurry, return_exceptions=True)


async def _announce(server: _Server, bridge: Bridge, listener: socket.socket) -> None:
    """Say when requests are taken; a boot that failed ends the server."""
    await bridge.booted()
    if bridge.state is State.FAILED:
        server.should_exit = True
        return
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info(
        "twinpool is ready: http://%s:%d/v1 takes requests, http://%s:%d/health says how it is.",
        shown,
        port,
        shown,
        port,
    )


async def _stop_when_rank_lost(server: _Server, bridge: Bridge) -> None:
    """Whoever waits has been told; the others are better off with a server that is started again."""
    await bridge.rank_lost()
    server.should_exit = True


async def _stop_when_drained(server: _Server, bridge: Bridge, stopping: asyncio.Event) -> None:
    """After the first signal: wait for the last answer, then let uvicorn close what is left."""
    await stopping.wait()
    await bridge.drained()
    server.should_exit = True

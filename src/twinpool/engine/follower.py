"""A rank other than rank 0: a process that holds its share of the model and of both pools, and repeats rank 0's steps."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from twinpool import bootlog
from twinpool.engine.executor import TorchExecutor
from twinpool.engine.rank import allocate, forward_of, left_bytes, load_rank
from twinpool.engine.rank_segments import StorePart
from twinpool.engine.ranks import Failed, Pools, Start
from twinpool.engine.restore import LayerParts
from twinpool.errors import TwinpoolError
from twinpool.models.group import Group
from twinpool.models.native import set_threads, use_native
from twinpool.models.shard import Share
from twinpool.step import StoreCopy


def follow(connection: Connection) -> None:
    """Load, agree on the memory, then repeat what rank 0 tells. Raises EOFError when it says stop, and when it is gone."""
    start: Start = _told(connection)
    resolved, lines = start.resolved, list[str]()
    set_threads(start.threads)
    torch.set_num_threads(1 if use_native(torch.device(resolved.device)) else start.threads)
    pre_load_bytes = start.pre_load_bytes
    model = load_rank(start.folder, resolved, pre_load_bytes=pre_load_bytes, rank=start.rank, say=lines.append).model
    connection.send(start.rank)
    _told(connection)  # all ranks have loaded: what is free now stays free
    connection.send(left_bytes(resolved, pre_load_bytes=pre_load_bytes, weight_bytes=model.weight_bytes))
    pools: Pools = _told(connection)
    memory = allocate(start.spec, resolved, pools.ledger, pools.tier)
    lines += bootlog.pool_lines(pools.ledger, kv_dtype=resolved.kv_cache_dtype, latent=start.spec.latent)
    connection.send(lines)
    model.join(Group.join(Share(start.rank, resolved.tp_size), meeting=start.meeting, device=resolved.device))
    connection.send(start.rank)

    def store(order: StoreCopy, kv: memoryview, state: memoryview) -> None:
        del order  # rank 0 has it
        connection.send(StorePart(bytes(kv), bytes(state)))

    layers = LayerParts.of(start.spec, memory)
    executor = TorchExecutor(forward=forward_of(model, memory), memory=memory, store=store, layers=layers)
    while True:
        executor.follow(_told(connection))


def _told(connection: Connection) -> Any:
    """What rank 0 says next. Raises EOFError when that is to stop, as when rank 0 is gone."""
    message = connection.recv()
    if message is None:
        raise EOFError
    return message


def main(file_descriptor: int) -> int:
    """Be the rank at the end of an inherited socket; returns the exit code. What goes wrong is told to rank 0."""
    # Who stops the server stops rank 0, which drains first; the others end when it says so, or when it is gone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(file_descriptor)
    try:
        follow(connection)
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        expected = isinstance(error, TwinpoolError)
        try:
            connection.send(Failed(error if isinstance(error, TwinpoolError) else f"{type(error).__name__}: {error}"))
        except OSError:
            return 0  # rank 0 is gone, which is the reason
        if not expected:
            traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(int(sys.argv[1])))

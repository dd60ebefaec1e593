"""Many experiments on one trace: in this process, over its cores, or over machines with Ray; results as they finish."""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.errors import ConfigError, MemoryRefusal
from twinpool.replay.bound import bounds
from twinpool.replay.cost import Calibration
from twinpool.replay.disk_link import USUAL, DiskLink
from twinpool.replay.experiment import Experiment, run_experiment
from twinpool.replay.sweep import Measured, Point, measured_of
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """What all points have in common; tokens are numbered once. bounds: hold points that ask for it against an infinite cache.

    disk: how fast one is, where a point has one.
    """

    trace: Trace
    tokens: TokenSpace
    calibration: Calibration
    skip: bool = True
    bounds: bool = True
    disk: DiskLink = USUAL


# A number, or the sentence with which the engine refuses to start.
Outcome = Measured | str
Finished = tuple[int, Outcome]


def run_point(shared: Shared, point: Point) -> Outcome:
    """One run, here and now."""
    if point.sizing is None:
        return point.refusal
    experiment = Experiment(
        trace=shared.trace, sizing=point.sizing, traffic=point.traffic, calibration=shared.calibration, disk=shared.disk,
        skip=shared.skip,
    )  # fmt: skip
    try:
        result = run_experiment(experiment, tokens=shared.tokens)
    except (ConfigError, MemoryRefusal) as error:
        return str(error)
    infinite = None
    if shared.bounds and point.bounded and shared.trace.block_size is not None:
        infinite = bounds(experiment, result, shared.tokens).infinite_token_share
    return measured_of(result, infinite)


def spread(
    shared: Shared, points: Mapping[int, Point], *, workers: int | None = None, ray: str | None = None
) -> Iterator[Finished]:
    """(number, outcome) of each point as it finishes. workers: processes, None: one a core; ray: address of a cluster instead.

    Closing the iterator, or an exception such as KeyboardInterrupt, stops what still runs. Raises ConfigError when Ray is
    not installed or not there.
    """
    if ray is not None:
        return _over_machines(shared, points, address=ray)
    processes = min(workers or multiprocessing.cpu_count(), len(points))
    if processes > 1:
        return _over_cores(shared, points, processes=processes)
    return ((number, run_point(shared, point)) for number, point in points.items())


_held: list[Shared] = []  # of a worker process: put there once, before its first point


def _hold(shared: Shared) -> None:
    """First thing in a worker. Ctrl-C reaches the whole group of processes: the parent alone decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _held.append(shared)


def _run_held(point: Point) -> Outcome:
    return run_point(_held[0], point)


def _over_cores(shared: Shared, points: Mapping[int, Point], *, processes: int) -> Iterator[Finished]:
    # A forked worker has the trace already, without a copy; elsewhere it is sent to each worker once.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    others = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context(method), initializer=_hold, initargs=(shared,)
    )
    try:
        numbers = {pool.submit(_run_held, point): number for number, point in points.items()}
        for future in concurrent.futures.as_completed(numbers):
            yield numbers[future], future.result()
    except BaseException:  # KeyboardInterrupt and GeneratorExit too: a point may take minutes that nobody waits for
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    pool.shutdown()


def _over_machines(shared: Shared, points: Mapping[int, Point], *, address: str) -> Iterator[Finished]:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("--ray needs the ray package, which is not installed: pip install twinpool[ray].") from error
    _check_listening(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--ray {address}: there is no Ray cluster ({error}).") from error
    try:
        held = ray.put(shared)
        task = ray.remote(run_point)
        numbers = {task.remote(held, point): number for number, point in points.items()}
        while numbers:
            (done,), _ = ray.wait(list(numbers), num_returns=1)
            yield numbers.pop(done), ray.get(done)
    finally:
        ray.shutdown()  # ends the tasks of this job that still run


def _check_listening(address: str) -> None:
    """Ray itself tries for minutes before it says that nobody is at HOST:PORT. Its other addresses (auto, ray://) it checks at once."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray {address}: there is no Ray cluster ({error}).") from error

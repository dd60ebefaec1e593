"""One experiment: a trace, a sized machine and traffic options, run and summarised. Sweeps are many of these."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinpool.clock import VirtualClock
from twinpool.config.field import options_of
from twinpool.errors import ConfigError
from twinpool.plan.sizing import Sizing
from twinpool.replay.cost import Calibration
from twinpool.replay.disk_link import INSTANT, USUAL, DiskLink
from twinpool.replay.machine import cost_model, disk_of, scheduler_of
from twinpool.replay.options import TrafficOptions
from twinpool.replay.preamble import share_preambles
from twinpool.replay.result import ReplayResult, Setup, summarise
from twinpool.replay.run import Replay, Run
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace
from twinpool.replay.traffic import ClosedTraffic, OpenTraffic, Traffic, trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Everything a run depends on. arrival: recorded, closed or count (never auto). disk: how fast one is, if there is one."""

    trace: Trace
    sizing: Sizing
    traffic: TrafficOptions
    calibration: Calibration
    disk: DiskLink = USUAL
    skip: bool = True


def prepare(trace: Trace, options: TrafficOptions) -> tuple[Trace, TrafficOptions]:
    """The part of the trace that is used, with preambles shared if asked for, and the arrival mode decided."""
    if not trace.sessions:
        raise ConfigError(f"{trace.name} has no usable request: {len(trace.rejected)} records were left out.")
    if options.limit is not None:
        trace = first_trees(trace, options.limit)
    if options.shared_preamble:
        trace = share_preambles(trace)
    if options.arrival == "auto":
        own_clocks = trace.clock == "session"
        options = replace(options, arrival="closed" if own_clocks else "recorded")
    _check_arrival(options)
    return trace, options


_CLOSED_ONLY = ("sessions", "idle_cap_s", "think_s", "start_anywhere")


def _check_arrival(options: TrafficOptions) -> None:
    """A flag that would do nothing is refused: whoever gave it believes in other traffic than what would run."""
    idle = ("speed",) if options.arrival == "closed" else _CLOSED_ONLY
    for option in options_of(TrafficOptions):
        if option.field in idle and getattr(options, option.field) != option.default:
            fitting = "recorded" if options.arrival == "closed" else "closed"
            raise ConfigError(
                f"{option.name} does nothing with --arrival {options.arrival}: it is for --arrival {fitting}."
            )


def first_trees(trace: Trace, count: int) -> Trace:
    """The first sessions without a parent, and their sub-agents."""
    root_of = trees(trace)
    kept = set(list(dict.fromkeys(root_of.values()))[:count])
    return replace(trace, sessions=tuple(session for session in trace.sessions if root_of[session.id] in kept))


def run_experiment(experiment: Experiment, *, tokens: TokenSpace | None = None) -> ReplayResult:
    """Run it. tokens: the trace's, if they were numbered before (sweeps). Raises MemoryRefusal where the engine would not start,
    ConfigError for a trace that cannot arrive as asked.
    """
    return summarise(*replay_of(experiment, tokens=tokens))


def replay_of(experiment: Experiment, *, tokens: TokenSpace | None = None) -> tuple[Run, Setup]:
    """(the finished run, its set-up)."""
    sizing, traffic = experiment.sizing, experiment.traffic
    clock = VirtualClock()
    counting = traffic.arrival == "count"
    disk = disk_of(sizing, clock, INSTANT if counting else experiment.disk)
    scheduler = scheduler_of(sizing, clock, disk)
    replay = Replay(
        scheduler=scheduler,
        clock=clock,
        tokens=tokens or TokenSpace(experiment.trace),
        traffic=_arrivals(experiment.trace, traffic),
        cost=None if counting else cost_model(sizing, experiment.calibration),
        disk=disk,
        skip=experiment.skip,
    )
    return replay.run(), setup_of(experiment)


def _arrivals(trace: Trace, options: TrafficOptions) -> Traffic:
    if options.arrival == "closed":
        return ClosedTraffic(
            trace, alive=options.sessions, idle_cap_s=options.idle_cap_s, seed=options.seed,
            start_anywhere=options.start_anywhere, default_think_s=options.think_s,
        )  # fmt: skip
    return OpenTraffic(trace, speed=options.speed)


def setup_of(experiment: Experiment) -> Setup:
    """The names and sizes that a result carries."""
    sizing, traffic = experiment.sizing, experiment.traffic
    ledger, request, resolved = sizing.ledger, sizing.request, sizing.resolved
    assert ledger is not None
    return Setup(
        trace=experiment.trace.name, model=sizing.model.name, machine=f"{sizing.machine.ranks} × {sizing.machine.name}",
        engine=sizing.rules.name, slots=ledger.max_mamba_cache_size, kv_tokens=ledger.kv_tokens, page_size=ledger.page_size,
        slots_per_request=ledger.slots_per_request, max_running_requests=ledger.max_running_requests,
        slot_bytes=request.stage_slot_bytes + request.stage_extra_bytes, kv_bytes_per_token=request.kv_bytes_per_token,
        strategy=resolved.strategy if resolved.radix_cache else "off", arrival=traffic.arrival,
        sessions_alive=traffic.sessions if traffic.arrival == "closed" else None, seed=traffic.seed,
        calibration=experiment.calibration.source,
        write_policy=resolved.hicache_write_policy if resolved.enable_hierarchical_cache else None,
        prefetch_policy=resolved.hicache_storage_prefetch_policy if resolved.hicache_storage_backend is not None else None,
    )  # fmt: skip

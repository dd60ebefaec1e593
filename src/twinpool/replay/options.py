"""What `twinpool replay` takes beside the flags of a launch line and of the planner's machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from twinpool.config.field import Flag, options_of
from twinpool.config.options import MOST_GB
from twinpool.errors import ConfigError
from twinpool.plan.options import LaunchFile, MachineOptions
from twinpool.replay.disk_link import USUAL, DiskLink
from twinpool.units import GB


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """Traffic"""

    trace_format: Annotated[
        str | None, Flag("Format of the trace (twinpool trace info).", name="--format", default_text="told from its content")
    ] = None  # fmt: skip
    strict: Annotated[bool, Flag("Stop at the first record that cannot be used instead of leaving it out.")] = False
    arrival: Annotated[
        Literal["auto", "recorded", "closed", "count"],
        Flag(
            "recorded: at the recorded times divided by --speed; closed: --sessions are alive and each waits for its answers; "
            "count: in recorded order and no step takes time, so that counts depend on nothing else. "
            "auto: closed for sessions with clocks of their own, else recorded."
        ),
    ] = "auto"
    speed: Annotated[
        float, Flag("Recorded times are divided by this.", metavar="X", at_least=1e-6, at_most=1e6)
    ] = 1.0  # fmt: skip
    sessions: Annotated[int, Flag("Sessions alive in a closed loop.", metavar="N", at_least=1)] = 32
    idle_cap_s: Annotated[
        float,
        Flag("Longest pause between an answer and the session's next request, in seconds.", metavar="S", at_least=0, at_most=1e9),
    ] = 10.0  # fmt: skip
    think_s: Annotated[
        float, Flag("Pause where the trace has none, in seconds.", metavar="S", at_least=0, at_most=1e9)
    ] = 0.0  # fmt: skip
    start_anywhere: Annotated[
        bool, Flag("The first sessions begin at a random request, with their history as one warm-up prompt.")
    ] = False
    seed: Annotated[int, Flag("Order of sessions and where they begin.", metavar="N", at_least=0)] = 0
    limit: Annotated[
        int | None,
        Flag("Use only the first N session trees of the trace.", metavar="N", at_least=1, default_text="all"),
    ] = None
    shared_preamble: Annotated[
        bool,
        Flag("Tool and system prompts of equal length are the same text in all sessions (agent traces do not say)."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class TimeOptions:
    """Time"""

    calibration: Annotated[
        str | None, Flag("File written by twinpool replay calibrate.", metavar="FILE", default_text="assumed shares of the peaks")
    ] = None  # fmt: skip
    disk_read_gb_s: Annotated[
        float,
        Flag("Disk tier: GB (10^9 bytes) read a second.", metavar="GB", above=0, at_most=MOST_GB),
    ] = USUAL.read_bytes_per_s / GB
    disk_write_gb_s: Annotated[
        float, Flag("Disk tier: GB written a second.", metavar="GB", above=0, at_most=MOST_GB)
    ] = USUAL.write_bytes_per_s / GB
    disk_latency_ms: Annotated[
        float,
        Flag("Disk tier: milliseconds before the first byte of each file.", metavar="MS", at_least=0, at_most=1e6),
    ] = USUAL.latency_s * 1000
    no_skip: Annotated[bool, Flag("Plan every decode step on its own (same results, slower).")] = False


@dataclass(frozen=True, kw_only=True)
class ReplayOutputOptions:
    """Output"""

    json: Annotated[bool, Flag("Print JSON (docs/replay.md) instead of tables.")] = False
    records: Annotated[bool, Flag("With --json, also one object a request.")] = False
    html: Annotated[str | None, Flag("Write a page with plots to this file; it needs no network.", metavar="FILE")] = (
        None
    )
    chrome_trace: Annotated[
        str | None,
        Flag("Write requests and pools over time for chrome://tracing or Perfetto to this file.", metavar="FILE"),
    ] = None
    no_bounds: Annotated[bool, Flag("Leave out the upper bounds (infinite cache, clairvoyant eviction).")] = False
    launch: LaunchFile = None
    engine: Annotated[
        Literal["sglang", "sglang-unpadded", "twinpool"] | None,
        Flag("Whose rules size the pools; the scheduler is always twinpool's.", default_text="as twinpool plan"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(TrafficOptions, TimeOptions, ReplayOutputOptions, MachineOptions):
    """All of them. Raises ConfigError naming the flag whose value has the wrong type or is out of range."""

    def __post_init__(self) -> None:
        for option in options_of(ReplayOptions):
            option.check(getattr(self, option.field))


def disk_link(options: TimeOptions, *, has_disk: bool, timed: bool) -> DiskLink:
    """How fast the disk is. Raises ConfigError for a flag that would do nothing: whoever gave it believes in a disk."""
    for option in options_of(TimeOptions):
        if option.field.startswith("disk_") and getattr(options, option.field) != option.default:
            if not has_disk:
                raise ConfigError(
                    f"{option.name} does nothing without a disk tier: give --enable-hierarchical-cache and "
                    "--hicache-storage-backend file."
                )
            if not timed:
                raise ConfigError(f"{option.name} does nothing with --arrival count, where nothing takes time.")
    return DiskLink(
        read_bytes_per_s=options.disk_read_gb_s * GB, write_bytes_per_s=options.disk_write_gb_s * GB,
        latency_s=options.disk_latency_ms / 1000,
    )  # fmt: skip


GROUPS: tuple[type, ...] = (ReplayOutputOptions, TrafficOptions, TimeOptions, MachineOptions)

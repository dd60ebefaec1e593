"""What `twinpool plan` takes beside the flags of a launch line: the text beside a field is its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from twinpool.config.field import Flag, options_of

LaunchFile = Annotated[str | None, Flag("A file with the launch line; or put the line after --.", metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Machine and model"""

    gpu: Annotated[str | None, Flag("Device of each rank, from the table (--list-gpus).", metavar="NAME")] = None
    pre_load_memory: Annotated[
        int | None,
        Flag("Free memory of a rank before weights are loaded, such as 78.5GiB.", metavar="SIZE", at_least=1, size=True,
             default_text="the device's, less what its context takes"),
    ] = None  # fmt: skip
    post_weights_memory: Annotated[
        int | None,
        Flag("Free memory of a rank after weights are loaded, as a boot log says it; weights are then not estimated.",
             metavar="SIZE", at_least=0, size=True),
    ] = None  # fmt: skip
    weights: Annotated[
        int | None,
        Flag("Bytes of weights on one rank.", metavar="SIZE", at_least=0, size=True,
             default_text="from the checkpoint's files, else from its config"),
    ] = None  # fmt: skip
    pool_memory: Annotated[
        int | None,
        Flag("Memory of both pools together on one rank, whatever the device and the weights.", metavar="SIZE", at_least=1, size=True),
    ] = None  # fmt: skip
    activations: Annotated[
        int | None,
        Flag(
            "For vllm: activation peak and graphs of a rank.",
            metavar="SIZE",
            at_least=0,
            size=True,
            default_text="2GiB",
        ),
    ] = None
    state_bytes_per_slot: Annotated[
        int | None,
        Flag("For a model that is not known: bytes of one state on one rank.", metavar="BYTES", at_least=1, size=True),
    ] = None
    kv_bytes_per_token: Annotated[
        int | None, Flag("For a model that is not known: bytes of one token's KV on one rank.", metavar="BYTES", at_least=0, size=True)
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Workload"""

    running: Annotated[
        int | None, Flag("Requests that should run at once.", metavar="N", at_least=1, default_text="--max-running-requests")
    ] = None  # fmt: skip
    tokens_per_request: Annotated[
        int | None, Flag("Average context of a request, input and output, in tokens.", metavar="TOKENS", at_least=1)
    ] = None
    idle_sessions: Annotated[
        int, Flag("Sessions between two turns that should stay resumable, beside the running requests.", metavar="N", at_least=0)
    ] = 0  # fmt: skip
    checkpoints_per_session: Annotated[
        int, Flag("Checkpoints kept for each idle session; one is enough to resume.", metavar="N", at_least=1)
    ] = 1
    workload_origin: str = "flag"  # what a trace was summarised to, when it was one
    trace: Annotated[
        str | None, Flag("Take the workload from recorded traffic (twinpool trace info FILE).", metavar="FILE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Sweep (twinpool plan sweep)"""

    over: Annotated[Literal["slots", "ratio"], Flag("What is varied.")] = "slots"
    points: Annotated[int, Flag("Points of the sweep.", metavar="N", at_least=2, at_most=2000)] = 24
    sweep_from: Annotated[
        float | None,
        Flag("First value.", name="--from", metavar="X", above=0, at_most=1e15, default_text="the least that serves"),
    ] = None
    sweep_to: Annotated[
        float | None,
        Flag("Last value.", name="--to", metavar="X", above=0, at_most=1e15, default_text="the most that serves"),
    ] = None
    html: Annotated[str | None, Flag("Write a page with plots to this file; it needs no network.", metavar="FILE")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Input and output"""

    engine: Annotated[
        Literal["sglang", "sglang-unpadded", "twinpool", "vllm"] | None,
        Flag("Whose rules divide the memory. sglang-unpadded: versions that do not charge the padding slot.",
             default_text="the launch line's, else sglang, or twinpool for --gpu cpu"),
    ] = None  # fmt: skip
    launch: LaunchFile = None
    boot_log: Annotated[
        str | None, Flag("Read the numbers off a boot log and check them; - is standard input.", metavar="FILE")
    ] = None
    json: Annotated[bool, Flag("Print JSON (docs/plan-json.md) instead of tables.")] = False
    list_models: Annotated[bool, Flag("List the built-in shapes.")] = False
    list_gpus: Annotated[bool, Flag("List the devices.")] = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions(MachineOptions, WorkloadOptions, SweepOptions, OutputOptions):
    """All of them. Raises ConfigError naming the flag whose value has the wrong type or is out of range."""

    def __post_init__(self) -> None:
        for option in options_of(PlanOptions):
            option.check(getattr(self, option.field))


GROUPS: tuple[type, ...] = (OutputOptions, MachineOptions, WorkloadOptions, SweepOptions)

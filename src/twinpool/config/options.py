"""Everything `twinpool serve` and `LLM(...)` take: the text beside a field is its help, the default is its default.

A wish, not a result: None means that the model, the machine or a rule decides (config/resolve.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from twinpool.config.field import Flag, Option, options_of

FLOAT_DTYPES = ("auto", "bfloat16", "float16", "float32")
MOST_GB = 10**9  # of any memory or disk, and of a ratio: an exabyte, whose bytes every integer holds
STRATEGY_CHOICES = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
STRATEGY_HELP = (
    "How checkpoints of states are taken. "
    "no_buffer: the working state is handed over, needs page size 1 and no overlap; "
    "extra_buffer: states are also tracked while a request runs, in two more slots (one without overlap); "
    "extra_buffer_lazy: the second of them only when needed. auto: extra_buffer where the model allows it."
)
EvictionPolicy = Literal["lru", "lfu", "slru", "fifo", "mru", "filo", "priority"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model"""

    model_path: Annotated[
        str | None,
        Flag(
            "A local folder in Hugging Face format, or a hub id.",
            aliases=("--model",), metavar="PATH", default_text="the demo model that ships with twinpool",
        ),
    ] = None  # fmt: skip
    tokenizer_path: Annotated[
        str | None,
        Flag("Where the tokenizer is, if not with the model.", metavar="PATH", default_text="the model path"),
    ] = None
    served_model_name: Annotated[
        str | None,
        Flag(
            "The model's name in /v1/models and in responses.", metavar="NAME", default_text="the model path, or demo"
        ),
    ] = None
    revision: Annotated[
        str | None, Flag("Branch, tag or commit of a hub id.", metavar="NAME", default_text="the hub's default branch")
    ] = None
    chat_template: Annotated[
        str | None,
        Flag("A file with the chat template to use (Jinja).", metavar="FILE", default_text="the tokenizer's own"),
    ] = None
    context_length: Annotated[
        int | None,
        Flag("Longest prompt plus output, in tokens.", metavar="TOKENS", at_least=2, default_text="the model's"),
    ] = None
    dtype: Annotated[
        str, Flag("Data type of weights and activations; auto: the checkpoint's.", choices=FLOAT_DTYPES)
    ] = "auto"
    device: Annotated[str, Flag("Where to compute.", choices=("cpu",))] = "cpu"
    threads: Annotated[
        int | None,
        Flag(
            "CPU threads of the forward pass; tokens do not depend on it.",
            metavar="N",
            at_least=1,
            at_most=256,
            default_text="the usable cores",
        ),
    ] = None
    random_seed: Annotated[
        int,
        Flag("Seed of the sampling of requests that bring none.", metavar="N", at_least=0, at_most=(1 << 63) - 1),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory: the two pools"""

    device_memory_bytes: Annotated[
        int | None,
        Flag(
            "Device memory to divide, such as 4GiB.",
            name="--device-memory", metavar="SIZE", at_least=1, size=True, default_text="the available host memory",
        ),
    ] = None  # fmt: skip
    mem_fraction_static: Annotated[
        float | None,
        Flag(
            "Share of device memory for weights and both pools; the rest is left for activations.",
            metavar="F", above=0, at_most=1, default_text="from the device memory and the prefill size",
        ),
    ] = None  # fmt: skip
    mamba_full_memory_ratio: Annotated[
        float | None,
        Flag(
            "State pool : KV pool, of what is left after weights. "
            "Larger: more running requests and more checkpoints, fewer tokens.",
            metavar="R", above=0, default_text="0.9 unless the model has its own",
        ),
    ] = None  # fmt: skip
    max_mamba_cache_size: Annotated[
        int | None,
        Flag(
            "State slots, instead of the ratio; KV takes the rest.",
            metavar="SLOTS",
            at_least=1,
            default_text="from the ratio",
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None, Flag("Cap on the tokens of the KV pool.", metavar="TOKENS", at_least=1, default_text="no cap")
    ] = None
    page_size: Annotated[
        int | None,
        Flag("Tokens of a KV page.", metavar="TOKENS", at_least=1, default_text="1 unless the model has its own"),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Flag(
            "Data type of cached keys and values; auto: that of the model; fp8_e4m3: without scales, which changes results slightly.",
            choices=(*FLOAT_DTYPES, "fp8_e4m3"),
        ),
    ] = "auto"
    mamba_ssm_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Flag("Data type of recurrent states; bfloat16 halves a slot.", default_text="the model's, or float32"),
    ] = None
    mamba_conv_dtype: Annotated[
        str,
        Flag(
            "Data type of convolution windows; auto: bfloat16, but the model's own for float32 and float16 models.",
            choices=FLOAT_DTYPES,
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Prefix cache"""

    disable_radix_cache: Annotated[bool, Flag("Never reuse a prefix; every request costs one state slot.")] = False
    mamba_radix_cache_strategy: Annotated[str, Flag(STRATEGY_HELP, choices=STRATEGY_CHOICES)] = "auto"
    mamba_track_interval: Annotated[
        int, Flag("Tokens between checkpoints during decode.", metavar="TOKENS", at_least=1)
    ] = 256
    mamba_max_states_per_path: Annotated[
        int,
        Flag(
            "Checkpoints kept along one conversation; shallow ones go first. -1: unlimited.",
            metavar="N",
            minus_one="unlimited",
        ),
    ] = -1
    radix_eviction_policy: Annotated[EvictionPolicy, Flag("Which cached KV goes first.")] = "lru"


@dataclass(frozen=True, kw_only=True)
class HostTierOptions:
    """Host tier: evicted prefixes in host memory"""

    enable_hierarchical_cache: Annotated[
        bool,
        Flag("Keep prefixes in host memory when the device evicts them.", aliases=("--enable-hicache",)),
    ] = False
    hicache_ratio: Annotated[
        float | None,
        Flag(
            "Host memory : memory of both device pools.",
            metavar="R", above=0, at_most=MOST_GB, default_text="2.0, limited by the host",
        ),
    ] = None  # fmt: skip
    hicache_size: Annotated[
        float,
        Flag(
            "Host memory in GB (10^9 bytes) for KV and states together, instead of the ratio.",
            default_text="0: from the ratio", metavar="GB", at_least=0, at_most=MOST_GB,
        ),
    ] = 0.0  # fmt: skip
    hicache_host_memory_fraction: Annotated[
        float,
        Flag(
            "Share of the available host memory that the tier may take when neither ratio nor size is given.",
            metavar="F", above=0, at_most=1,
        ),
    ] = 0.8  # fmt: skip
    hicache_write_policy: Annotated[
        Literal["write_through", "write_through_selective", "write_back"],
        Flag(
            "When a prefix is copied to the host. write_through: when it is first kept; write_through_selective: when it is "
            "used again; write_back: when the device evicts it."
        ),
    ] = "write_through"
    hicache_storage_backend: Annotated[
        Literal["file"] | None,
        Flag("A tier below the host's that survives restarts; file: a folder.", default_text="none"),
    ] = None
    hicache_storage_path: Annotated[
        str | None, Flag("The folder; servers of the same model may share it.", metavar="DIR", default_text="none")
    ] = None
    hicache_storage_size: Annotated[
        float, Flag("Most that it may hold, in GB (10^9 bytes).", metavar="GB", above=0, at_most=MOST_GB)
    ] = 10.0
    hicache_storage_prefetch_policy: Annotated[
        Literal["timeout", "best_effort", "wait_complete"],
        Flag(
            "How long a request waits for what is read for it. timeout: 1 s, and 0.25 s for each 1024 tokens; best_effort: not "
            "at all; wait_complete: until it is read."
        ),
    ] = "timeout"
    hicache_mamba_size_gb: Annotated[
        float | None,
        Flag(
            "GB (10^9 bytes) of the host memory for states, a fixed quota.",
            metavar="GB", above=0, at_most=MOST_GB, unset="auto",
            default_text="auto: states and KV share it, so that they cover the same sessions",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Scheduling"""

    max_running_requests: Annotated[
        int | None,
        Flag(
            "Requests that run at once; state slots and KV may allow fewer.",
            metavar="N",
            at_least=1,
            default_text="what fits",
        ),
    ] = None
    max_queued_requests: Annotated[
        int | None,
        Flag("Requests that may wait; the next is answered 503.", metavar="N", at_least=0, default_text="no limit"),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Flag(
            "Tokens of one step: decode rows and prefill chunks together. -1: prompts are never cut.",
            metavar="TOKENS", minus_one="prompts are never cut", default_text="from the device memory",
        ),
    ] = None  # fmt: skip
    max_prefill_tokens: Annotated[
        int, Flag("Prefill tokens of one step; a single longer prompt still runs.", metavar="TOKENS", at_least=1)
    ] = 16384
    prefill_max_requests: Annotated[
        int | None, Flag("Requests prefilled in one step.", metavar="N", at_least=1, default_text="no limit")
    ] = None
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        Flag("Order of the waiting requests. fcfs: arrival; lpm: longest reusable prefix first."),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float, Flag("Above 1: admit fewer requests and retract less often; below 1 the reverse.", metavar="F", above=0)
    ] = 1.0
    retraction_policy: Annotated[
        Literal["length", "priority"],
        Flag("Who gives way when KV runs short. length: the shortest output; priority: the lowest priority."),
    ] = "length"
    disable_overlap_schedule: Annotated[bool, Flag("Do not plan the next step while the current one runs.")] = False


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Sizes that enter the budget; serving takes --tp-size and the defaults of the others"""

    tp_size: Annotated[
        int, Flag("Tensor parallel ranks.", aliases=("--tp", "--tensor-parallel-size"), metavar="N", at_least=1)
    ] = 1
    dp_size: Annotated[
        int, Flag("Data parallel workers.", aliases=("--dp", "--data-parallel-size"), metavar="N", at_least=1)
    ] = 1
    pp_size: Annotated[
        int, Flag("Pipeline stages.", aliases=("--pp", "--pipeline-parallel-size"), metavar="N", at_least=1)
    ] = 1
    dcp_size: Annotated[int, Flag("Decode context parallel ranks.", metavar="N", at_least=1)] = 1
    speculative_num_draft_tokens: Annotated[
        int, Flag("Draft tokens of a speculative step.", metavar="N", at_least=0)
    ] = 0


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Server and reports"""

    host: Annotated[str, Flag("Address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Flag("Port to listen on; 0: any free one.", metavar="PORT", at_least=0, at_most=65535)] = 30000
    api_key: Annotated[
        str | None,
        Flag("Key that every request must bring as a bearer token.", metavar="KEY", default_text="none is asked for"),
    ] = field(default=None, repr=False)
    enable_cache_report: Annotated[bool, Flag("Report cached tokens in the usage of OpenAI responses.")] = False
    enable_metrics: Annotated[bool, Flag("Serve Prometheus metrics at /metrics.")] = False
    request_log: Annotated[
        str | None,
        Flag(
            "Append a line for each finished request to this file, for twinpool replay: lengths, times and keyed hashes of "
            "blocks, never text.",
            metavar="FILE",
            default_text="none is written",
        ),
    ] = None
    decode_log_interval: Annotated[int, Flag("Decode steps between two log lines.", metavar="STEPS", at_least=1)] = 40
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag("Least severe messages to log.")] = "info"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(
    ModelOptions, MemoryOptions, CacheOptions, HostTierOptions, ScheduleOptions, ParallelOptions, ServerOptions
):
    """All options. Raises ConfigError naming the flag whose value has the wrong type or is out of range.

    given: fields that the caller set, even to their default (for the origin column of the boot table). logged: those of them that
    were read off a boot log.
    """

    given: frozenset[str] = field(default=frozenset(), compare=False)
    logged: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        kind: type = type(self)
        for option in options_of(kind):
            option.check(getattr(self, option.field))


GROUPS: tuple[type, ...] = (
    ModelOptions, MemoryOptions, CacheOptions, HostTierOptions, ScheduleOptions, ParallelOptions, ServerOptions,
)  # fmt: skip


def all_options() -> tuple[Option, ...]:
    """Every option, in the order of help."""
    return tuple(option for group in GROUPS for option in options_of(group))

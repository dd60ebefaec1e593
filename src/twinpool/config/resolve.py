"""Options + model + device give Resolved: every value that boot and server use, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from twinpool.config.defaults import chunked_prefill_tokens, decode_graph_requests, model_default, static_fraction
from twinpool.config.engines import TWINPOOL, EngineRules
from twinpool.config.options import ServeOptions, all_options
from twinpool.config.strategy import choose_strategy
from twinpool.errors import ConfigError
from twinpool.models.spec import ModelSpec
from twinpool.prefix.checkpoint import Grids, grids, slots_per_request, track_slots
from twinpool.units import format_bytes, round_down, round_up

Origin = Literal["flag", "model default", "default", "derived", "measured", "log"]
T = TypeVar("T")
DEMO_NAME = "demo"
# Values that an option of another name decides.
OPTION_OF = {
    "context_len": "context_length", "radix_cache": "disable_radix_cache", "strategy": "mamba_radix_cache_strategy",
    "overlap": "disable_overlap_schedule",
}  # fmt: skip
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What was found on the device: memory that can be divided (None: not known) and its kind, such as cpu."""

    memory_bytes: int | None
    kind: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What runs. Names are those of the flags where there is one.

    model_path: None for the demo model. context_len, chunked_prefill_size (None: off), max_prefill_tokens, page_size,
    max_total_tokens (None: no cap), mamba_track_interval: tokens. max_mamba_cache_size: slots (None: by ratio).
    strategy: a row of prefix/checkpoint.py; slots_per_request (S) and track_slots: slots of one running request.
    max_running_requests, max_queued_requests, prefill_max_requests, threads: None for no limit of ours.
    origins: field to where its value comes from. warnings: sentences to log at boot.
    """

    model_path: str | None
    tokenizer_path: str | None
    served_model_name: str
    revision: str | None
    chat_template: str | None
    context_len: int
    dtype: str
    device: str
    threads: int | None
    random_seed: int

    device_memory_bytes: int | None
    mem_fraction_static: float
    mamba_full_memory_ratio: float
    max_mamba_cache_size: int | None
    max_total_tokens: int | None
    page_size: int
    kv_cache_dtype: str
    mamba_ssm_dtype: str
    mamba_conv_dtype: str

    radix_cache: bool
    strategy: str
    slots_per_request: int
    track_slots: int
    grids: Grids
    mamba_track_interval: int
    mamba_max_states_per_path: int
    radix_eviction_policy: str

    enable_hierarchical_cache: bool
    hicache_ratio: float | None
    hicache_size: float
    hicache_host_memory_fraction: float
    hicache_write_policy: str
    hicache_mamba_size_gb: float | None
    hicache_storage_backend: str | None
    hicache_storage_path: str | None
    hicache_storage_size: float
    hicache_storage_prefetch_policy: str

    overlap: bool
    max_running_requests: int | None
    max_queued_requests: int | None
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    prefill_max_requests: int | None
    schedule_policy: str
    schedule_conservativeness: float
    retraction_policy: str

    tp_size: int
    dp_size: int
    pp_size: int
    dcp_size: int
    speculative_num_draft_tokens: int

    host: str
    port: int
    api_key: str | None
    enable_cache_report: bool
    enable_metrics: bool
    request_log: str | None
    decode_log_interval: int
    log_level: str

    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()

    def rows(self) -> tuple[tuple[str, str, Origin], ...]:
        """(name, value for people, origin) of every value, for the table at boot. The API key is not shown."""
        names = [item.name for item in fields(self) if item.name in self.origins]
        return tuple((name, self._shown(name), self.origins[name]) for name in names)

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        if value is None:
            return "off" if name == "chunked_prefill_size" else "-"
        if name == "api_key":
            return "set"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, Grids):
            return f"checkpoint {value.checkpoint_tokens}, track {value.track_tokens}"
        return format_bytes(value) if name.endswith("_bytes") else str(value)


class _Decisions:
    """Values decided so far, each with its origin."""

    def __init__(self, options: ServeOptions) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self._options = options

    def put(self, name: str, value: T, origin: Origin) -> T:
        if origin == "flag" and OPTION_OF.get(name, name) in self._options.logged:
            origin = "log"
        self.values[name], self.origins[name] = value, origin
        return value

    def pick(self, name: str, flag: T | None, otherwise: T, origin: Origin) -> T:
        """The flag's value if it was given, else the other one."""
        return self.put(name, otherwise, origin) if flag is None else self.put(name, flag, "flag")

    def copy_rest(self) -> None:
        """Take over, unchanged, every option that is a value of Resolved and was not decided."""
        known = {item.name for item in fields(Resolved)}
        for option in all_options():
            if option.field in known and option.field not in self.values:
                value = getattr(self._options, option.field)
                given = option.field in self._options.given or value != option.default
                self.put(option.field, value, "flag" if given else "default")


def resolve(options: ServeOptions, spec: ModelSpec, device: DeviceFacts, *, rules: EngineRules = TWINPOOL) -> Resolved:
    """Decide every value (reference 1.2, 3.2, 3.5): a flag beats the model's default, which beats the general one.

    rules: of the engine that will run. Raises ConfigError where values contradict each other or the model.
    """
    decided = _Decisions(options)
    _resolve_model(decided, options, spec, rules)
    _resolve_page_size(decided, options, spec, rules)
    _resolve_memory(decided, options, spec, device, rules)
    _resolve_running(decided, options, rules)
    warnings = _resolve_cache(decided, options, spec, device, rules)
    decided.copy_rest()
    return Resolved(**decided.values, origins=decided.origins, warnings=(*spec.warnings, *warnings))


def _resolve_model(decided: _Decisions, options: ServeOptions, spec: ModelSpec, rules: EngineRules) -> None:
    decided.pick("served_model_name", options.served_model_name, options.model_path or DEMO_NAME, "derived")
    if options.context_length is not None and options.context_length > spec.context_len:
        raise ConfigError(
            f"--context-length {options.context_length} is longer than the model's {spec.context_len} tokens; "
            f"use at most {spec.context_len}."
        )
    decided.pick("context_len", options.context_length, spec.context_len, "model default")
    if options.dtype == "auto" and spec.dtype not in COMPUTE_DTYPES:
        raise ConfigError(
            f"The checkpoint's data type {spec.dtype} is not one of {', '.join(COMPUTE_DTYPES)}; choose with --dtype."
        )
    dtype = decided.pick("dtype", _unless_auto(options.dtype), spec.dtype, "model default")
    calibrated = spec.checkpoint_kv_dtype if rules.kv_follows_checkpoint else None
    kv_flag = _unless_auto(options.kv_cache_dtype)
    decided.pick("kv_cache_dtype", kv_flag, calibrated or dtype, "model default" if calibrated else "derived")
    decided.pick("mamba_ssm_dtype", options.mamba_ssm_dtype, spec.ssm_dtype, "model default")
    # The reference's windows are bfloat16 whatever the model; that would round the inputs of float32 or float16 ones.
    conv_dtype = rules.conv_dtype or dtype
    decided.pick("mamba_conv_dtype", _unless_auto(options.mamba_conv_dtype), conv_dtype, "derived")


def _unless_auto(value: str) -> str | None:
    return None if value == "auto" else value


def _resolve_page_size(decided: _Decisions, options: ServeOptions, spec: ModelSpec, rules: EngineRules) -> None:
    value, own = model_default("page_size", architecture=spec.architecture, family=spec.family, engine=rules.name)
    if options.mamba_radix_cache_strategy == "no_buffer":
        value, own = 1, False  # asking for it is asking for the only page size that it works with
    decided.pick("page_size", options.page_size, int(value), "model default" if own else "default")


def _resolve_memory(
    decided: _Decisions, options: ServeOptions, spec: ModelSpec, device: DeviceFacts, rules: EngineRules
) -> None:
    capacity = decided.pick("device_memory_bytes", options.device_memory_bytes, device.memory_bytes, "measured")
    ratio, own = model_default(
        "mamba_full_memory_ratio", architecture=spec.architecture, family=spec.family, engine=rules.name
    )
    decided.pick(
        "mamba_full_memory_ratio", options.mamba_full_memory_ratio, float(ratio), "model default" if own else "default"
    )
    chunk = _resolve_chunk(decided, options, capacity)
    fraction = static_fraction(
        capacity,
        prefill_tokens=options.max_prefill_tokens if chunk is None else chunk,
        ranks=options.tp_size * options.pp_size,
        graph_requests=decode_graph_requests(capacity, tp=options.tp_size, running=options.max_running_requests)
        if rules.graphs
        else None,
    )
    decided.pick("mem_fraction_static", options.mem_fraction_static, fraction, "derived")


def _resolve_running(decided: _Decisions, options: ServeOptions, rules: EngineRules) -> None:
    otherwise = rules.default_running_with_drafts if options.speculative_num_draft_tokens else None
    decided.pick("max_running_requests", options.max_running_requests, otherwise, "default")


def _resolve_chunk(decided: _Decisions, options: ServeOptions, capacity_bytes: int | None) -> int | None:
    tree_page: int = decided.values["page_size"] * options.dcp_size
    asked = options.chunked_prefill_size
    if asked == -1:
        return decided.put("chunked_prefill_size", None, "flag")
    if asked is not None and asked % tree_page:
        below, above = round_down(asked, tree_page), round_up(asked, tree_page)
        fits = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"--chunked-prefill-size {asked} is not a multiple of the page of {tree_page} tokens; use {fits}."
        )
    default = max(tree_page, round_down(chunked_prefill_tokens(capacity_bytes), tree_page))
    return decided.pick("chunked_prefill_size", asked, default, "derived")


def _resolve_cache(
    decided: _Decisions, options: ServeOptions, spec: ModelSpec, device: DeviceFacts, rules: EngineRules
) -> tuple[str, ...]:
    """Strategy, overlap, slots and grids; returns the warnings."""
    page_size: int = decided.values["page_size"]
    radix = not options.disable_radix_cache
    choice = choose_strategy(options, spec, page_size=page_size, device_kind=device.kind)
    explicit = options.mamba_radix_cache_strategy != "auto" and radix
    decided.put("radix_cache", radix, "default" if radix else "flag")
    decided.put("strategy", choice.strategy, "flag" if explicit else "derived")
    overlap_origin: Origin = (
        "default" if choice.overlap else ("flag" if options.disable_overlap_schedule else "derived")
    )
    decided.put("overlap", choice.overlap, overlap_origin)
    skips = rules.skip_decode_lock
    slots = slots_per_request(choice.strategy, overlap=choice.overlap, radix=radix, skip_decode_lock=skips)
    decided.put("slots_per_request", slots, "derived")
    decided.put("track_slots", track_slots(choice.strategy, overlap=choice.overlap), "derived")
    if not radix:  # no checkpoint is kept, so nothing needs to lie on a grid
        decided.put("grids", Grids(page_size, spec.chunk_tokens, page_size, page_size), "derived")
        return ()
    grid = grids(
        page_tokens=page_size,
        chunk_tokens=spec.chunk_tokens,
        track_interval_tokens=options.mamba_track_interval,
        dcp=options.dcp_size,
    )
    decided.put("grids", grid, "derived")
    chunk = decided.values["chunked_prefill_size"]
    if choice.strategy == "no_buffer" or chunk is None or chunk >= grid.chunk_tokens:
        return ()
    return (
        f"--chunked-prefill-size {chunk} is below the state chunk of {grid.chunk_tokens} tokens: "
        "parts of a prompt that reach no checkpoint position leave no state to resume from.",
    )

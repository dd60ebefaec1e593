"""What a launch line says about memory, whichever engine it starts: the server's options, and those that only others honour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from twinpool.config.field import Flag, Option, options_of
from twinpool.config.options import STRATEGY_CHOICES, STRATEGY_HELP, ServeOptions, ServerOptions
from twinpool.errors import ConfigError

KV_DTYPES = (
    "auto", "bfloat16", "bf16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "mxfp8", "fp4_e2m1", "nvfp4",
)  # fmt: skip
SYNONYMS = {"bf16": "bfloat16", "half": "float16", "float": "float32", "fp8": "fp8_e4m3", "nvfp4": "fp4_e2m1"}
# Options that no pool's size depends on, on the device or on the host, beside those of ServerOptions.
_NOT_OF_POOLS = frozenset({
    "tokenizer_path", "served_model_name", "chat_template", "threads", "random_seed", "mamba_max_states_per_path",
    "radix_eviction_policy", "hicache_write_policy", "hicache_storage_backend", "hicache_storage_path", "hicache_storage_size",
    "hicache_storage_prefetch_policy", "max_queued_requests", "prefill_max_requests", "schedule_policy",
    "schedule_conservativeness", "retraction_policy",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Speculation"""

    speculative_algorithm: Annotated[
        str | None,
        Flag(
            "Speculative decoding; draft states and draft KV are charged.",
            aliases=("--speculative-algo",),
            metavar="NAME",
        ),
    ] = None
    speculative_num_steps: Annotated[int | None, Flag("Steps of the draft model.", metavar="N", at_least=0)] = None
    speculative_eagle_topk: Annotated[int | None, Flag("Branches of a draft step.", metavar="N", at_least=1)] = None
    enable_linear_replayssm: Annotated[bool, Flag("States are kept as replay rings.")] = False
    enable_linear_replayssm_spec: Annotated[bool, Flag("No state is kept per draft step.")] = False
    linear_replayssm_cache_len: Annotated[int, Flag("Records of a replay ring.", metavar="N", at_least=1)] = 16


@dataclass(frozen=True, kw_only=True)
class Deployment(ServeOptions, SpeculationOptions):
    """All of it. Raises ConfigError naming the flag whose value has the wrong type or is out of range."""

    dtype: Annotated[
        str,
        Flag(
            "Data type of weights and activations; auto: the checkpoint's.",
            choices=("auto", "bfloat16", "float16", "half", "float32", "float"),
        ),
    ] = "auto"
    device: Annotated[
        str, Flag("Where to compute.", choices=("cuda", "cpu", "hip", "xpu", "npu", "hpu", "musa", "mps"))
    ] = "cuda"
    kv_cache_dtype: Annotated[
        str, Flag("Data type of cached keys and values; auto: that of the checkpoint.", choices=KV_DTYPES)
    ] = "auto"
    mamba_radix_cache_strategy: Annotated[
        str, Flag(STRATEGY_HELP, aliases=("--mamba-scheduler-strategy",), choices=STRATEGY_CHOICES)
    ] = "auto"
    quantization: Annotated[str | None, Flag("Quantisation of the weights.", metavar="NAME")] = None
    enable_dp_attention: Annotated[
        bool, Flag("The data parallel workers share the tensor parallel ranks; slots and requests are divided.")
    ] = False
    ep_size: Annotated[
        int, Flag("Expert parallel ranks.", aliases=("--ep", "--expert-parallel-size"), metavar="N", at_least=1)
    ] = 1
    disaggregation_mode: Annotated[
        Literal["null", "prefill", "decode"], Flag("A prefill worker keeps no states per draft step.")
    ] = "null"
    skip_decode_lock: Annotated[
        bool,
        Flag("The matched prefix is not locked during decode (S is one less): SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1."),
    ] = False

    @property
    def replicas(self) -> int:
        """Servers of their own: --dp-size without --enable-dp-attention."""
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def attention_dp(self) -> int:
        """Workers that slots and requests are divided by: --dp-size only with --enable-dp-attention (reference 1.8)."""
        return self.dp_size if self.enable_dp_attention else 1


def deployment_options() -> tuple[Option, ...]:
    """Every option of a launch line."""
    return options_of(Deployment)


def bears_on_pools(field: str) -> bool:
    """Whether the size of a pool may depend on an option, by its field."""
    return field not in _NOT_OF_POOLS and field not in {option.field for option in options_of(ServerOptions)}


@dataclass(frozen=True, slots=True)
class OtherValue:
    """A flag with a value that another engine takes and twinpool does not, as written; why: the sentence that would refuse it."""

    shown: str
    why: str


def without_other_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[OtherValue, ...]]:
    """(fields of Deployment whose values are known, the others that bear on no pool): what an engine of its own may have.

    A bad value that bears on a pool stays, to be refused.
    """
    kept, others = dict(values), []
    for option in deployment_options():
        if option.field not in kept or bears_on_pools(option.field):
            continue
        try:
            option.check(kept[option.field])
        except ConfigError as error:
            others.append(OtherValue(f"{option.name} {kept.pop(option.field)}", str(error)))
    backend = kept.get("hicache_storage_backend")
    if backend is not None and not kept.get("enable_hierarchical_cache"):
        shown = f"--hicache-storage-backend {kept.pop('hicache_storage_backend')}"
        others.append(OtherValue(shown, f"{shown} needs --enable-hierarchical-cache."))
    return kept, tuple(others)

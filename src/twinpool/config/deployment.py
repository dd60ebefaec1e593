"""What a launch line says about memory, whichever engine it starts: the server's options, and those that only others honour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from twinpool.config.field import Flag, Option, options_of
from twinpool.config.options import STRATEGY_CHOICES, STRATEGY_HELP, ServeOptions

KV_DTYPES = (
    "auto", "bfloat16", "bf16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "mxfp8", "fp4_e2m1", "nvfp4",
)  # fmt: skip
SYNONYMS = {"bf16": "bfloat16", "half": "float16", "float": "float32", "fp8": "fp8_e4m3", "nvfp4": "fp4_e2m1"}


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

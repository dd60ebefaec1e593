"""The flags of a vLLM launch line that decide over its block pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from twinpool.config.field import Flag, options_of


@dataclass(frozen=True, kw_only=True)
class VllmFlags:
    """vLLM; None: its own default. Raises ConfigError naming the flag whose value is wrong."""

    model: Annotated[str | None, Flag("Hub id or folder.", metavar="MODEL")] = None
    tensor_parallel_size: Annotated[int, Flag("Tensor parallel ranks.", aliases=("-tp",), at_least=1)] = 1
    pipeline_parallel_size: Annotated[int, Flag("Pipeline stages.", aliases=("-pp",), at_least=1)] = 1
    data_parallel_size: Annotated[int, Flag("Data parallel replicas.", aliases=("-dp",), at_least=1)] = 1
    gpu_memory_utilization: Annotated[
        float | None, Flag("Share of the device that vLLM may use.", above=0, at_most=1, default_text="0.92")
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None, Flag("Bytes of the block pool, instead of the share.", at_least=1, size=True)
    ] = None
    num_gpu_blocks_override: Annotated[int | None, Flag("Blocks, instead of what fits.", at_least=1)] = None
    max_model_len: Annotated[int | None, Flag("Longest prompt plus output, in tokens.", at_least=1)] = None
    max_num_seqs: Annotated[int | None, Flag("Requests that run at once.", at_least=1)] = None
    max_num_batched_tokens: Annotated[int | None, Flag("Tokens of a step.", at_least=1)] = None
    block_size: Annotated[int | None, Flag("Tokens of an attention block, before it is raised.", at_least=1)] = None
    mamba_block_size: Annotated[int | None, Flag("Tokens between cached states.", at_least=1)] = None
    mamba_cache_mode: Annotated[
        Literal["none", "all", "align"] | None, Flag("Which states are cached.", default_text="by prefix caching")
    ] = None
    mamba_cache_dtype: Annotated[str, Flag("Data type of convolution windows.")] = "auto"
    mamba_ssm_cache_dtype: Annotated[str, Flag("Data type of recurrent states.")] = "auto"
    kv_cache_dtype: Annotated[str, Flag("Data type of cached keys and values.")] = "auto"
    dtype: Annotated[str, Flag("Data type of weights and activations.")] = "auto"
    quantization: Annotated[str | None, Flag("Quantisation of the weights.", aliases=("-q",))] = None
    enable_prefix_caching: Annotated[bool, Flag("Keep prefixes (on unless switched off).")] = False
    no_enable_prefix_caching: Annotated[bool, Flag("Keep no prefixes.")] = False
    speculative_config: Annotated[str | None, Flag("Draft model, as JSON.", metavar="JSON")] = None

    def __post_init__(self) -> None:
        for option in options_of(VllmFlags):
            option.check(getattr(self, option.field))

"""vLLM engine profile: how one block pool divides device memory for a hybrid model, and what its boot lines will say."""

from __future__ import annotations

import math
from dataclasses import replace

from twinpool.errors import ConfigError, MemoryRefusal
from twinpool.models.attention.spec import DsaSpec, MlaSpec
from twinpool.models.spec import ModelSpec
from twinpool.plan.vllm_blocks import BlockLayout
from twinpool.plan.vllm_layers import hybrid_layers
from twinpool.plan.vllm_ledger import (
    DEFAULT_KERNEL_ALIGNMENT_TOKENS,
    DEFAULT_UTILIZATION,
    LATENT_KERNEL_ALIGNMENT_TOKENS,
    VllmLedger,
    VllmRequest,
)
from twinpool.plan.vllm_warnings import warnings_of
from twinpool.units import GIB, format_bytes

__all__ = ["VllmLedger", "VllmRequest", "plan_vllm", "vllm_request"]

# EngineArgs.get_batch_defaults (vllm/engine/arg_utils.py): 1024 sequences on devices of 70 GiB or more, else 256; an
# A100 of 80 GB, which vLLM tells by its name, counts as a small one there and needs the flag here.
LARGE_DEVICE_BYTES = 70 * GIB
DEFAULT_SEQS_LARGE, DEFAULT_SEQS = 1024, 256


def vllm_request(
    spec: ModelSpec,
    *,
    total_bytes: int,
    non_kv_bytes: int,
    tp: int,
    kv_dtype: str,
    ssm_dtype: str,
    conv_dtype: str,
    max_model_len: int | None = None,
    utilization: float = DEFAULT_UTILIZATION,
    kv_cache_memory_bytes: int | None = None,
    num_gpu_blocks_override: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int | None = None,
    mamba_block_size: int | None = None,
    mamba_cache_mode: str | None = None,
    prefix_caching: bool = True,
    retention_interval: int | None = 0,
    kernel_alignment: int | None = None,
    num_speculative_tokens: int = 0,
    draft_attention_layers: int = 0,
) -> VllmRequest:
    """A request for a model on one of `tp` ranks; units as in VllmRequest.

    max_model_len None: the model's context; mamba_cache_mode None: "align" with prefix caching, else "none";
    draft_attention_layers: of a drafter in the same pool, 1 for the model's own multi-token head;
    kernel_alignment None: that of a GPU's attention kernels.
    Raises ConfigError and ModelError: a dtype or tp that does not fit, layers of unequal size.
    """
    return VllmRequest(
        total_bytes=total_bytes,
        non_kv_bytes=non_kv_bytes,
        max_model_len=spec.context_len if max_model_len is None else max_model_len,
        layers=hybrid_layers(
            spec,
            tp=tp,
            kv_dtype=kv_dtype,
            ssm_dtype=ssm_dtype,
            conv_dtype=conv_dtype,
            speculative_tokens=num_speculative_tokens,
            draft_attention_layers=draft_attention_layers,
        ),
        utilization=utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=num_gpu_blocks_override,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        mamba_block_size=mamba_block_size,
        mamba_cache_mode=mamba_cache_mode or ("align" if prefix_caching else "none"),
        prefix_caching=prefix_caching,
        retention_interval=retention_interval,
        kernel_alignment=kernel_alignment or _kernel_alignment(spec),
        chunk_tokens=spec.chunk_tokens,
        num_speculative_tokens=num_speculative_tokens,
    )


def _kernel_alignment(spec: ModelSpec) -> int:
    """Tokens that an attention block is a multiple of (vllm/platforms/interface.py)."""
    latent = any(isinstance(layer.attention, MlaSpec | DsaSpec) for layer in spec.layers)
    return LATENT_KERNEL_ALIGNMENT_TOKENS if latent else DEFAULT_KERNEL_ALIGNMENT_TOKENS


def plan_vllm(request: VllmRequest) -> VllmLedger:
    """What vLLM makes of the request. Raises MemoryRefusal where it would not start, ConfigError on wrong flags."""
    layout = request.layout
    _check_batch(request, layout)
    kv_bytes = _kv_bytes(request, layout)
    num_blocks = kv_bytes // layout.block_bytes
    length = request.max_model_len
    needed = layout.blocks_per_request(length)
    if needed > num_blocks:
        raise _too_long(request, layout, num_blocks)
    max_num_seqs, bound = _max_num_seqs(request, num_blocks)
    concurrency = num_blocks / needed
    ledger = VllmLedger(
        request=request,
        layout=layout,
        num_blocks=num_blocks,
        kv_cache_size_tokens=int(concurrency * length),
        old_kv_cache_size_tokens=num_blocks // (layout.attention_groups + layout.state_groups) * layout.block_tokens,
        max_concurrency=concurrency,
        max_num_seqs=max_num_seqs,
        max_num_seqs_bound=bound,
        running_requests=min(max_num_seqs, (num_blocks - 1) // layout.blocks_per_request(1)),
        smallest_prefix_tokens=_smallest_prefix_tokens(request, layout),
        checkpoint_blocks=layout.state_groups,
        usable_tokens=_usable_tokens(request, layout, num_blocks),
        lines=_lines(request, kv_bytes=kv_bytes, pool_bytes=num_blocks * layout.block_bytes),
        warnings=(),
    )
    return replace(ledger, warnings=tuple(warnings_of(ledger)))


def _kv_bytes(request: VllmRequest, layout: BlockLayout) -> int:
    """Bytes of the pool's budget. Raises MemoryRefusal when nothing is left, or more than there is was asked for."""
    free_bytes = request.total_bytes - request.non_kv_bytes
    asked_bytes, flag = request.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    if request.num_gpu_blocks_override is not None:
        asked_bytes, flag = request.num_gpu_blocks_override * layout.block_bytes, "--num-gpu-blocks-override"
    if asked_bytes is not None:
        if asked_bytes > free_bytes:
            raise MemoryRefusal(
                f"The KV cache needs {format_bytes(asked_bytes)}, but {format_bytes(max(0, free_bytes))} are left beside "
                f"weights, activations and graphs: lower {flag} to that."
            )
        return asked_bytes
    left_bytes = int(request.total_bytes * request.utilization) - request.non_kv_bytes
    if left_bytes < layout.block_bytes:
        least = (request.non_kv_bytes + layout.block_bytes) / request.total_bytes
        remedy = "use a larger device or a higher -tp" if least > 1 else f"raise it to at least {_up(least):.2f}"
        raise MemoryRefusal(
            f"--gpu-memory-utilization {request.utilization:g} leaves {format_bytes(max(0, left_bytes))} beside weights, "
            f"activations and graphs, but one block needs {format_bytes(layout.block_bytes)}: {remedy}."
        )
    return left_bytes


def _up(fraction: float) -> float:
    """Rounded up to two decimals, so that following the advice is enough."""
    return math.ceil(fraction * 100) / 100


def _too_long(request: VllmRequest, layout: BlockLayout, num_blocks: int) -> MemoryRefusal:
    """The refusal of max_model_len: blocks needed and there, the longest that fits."""
    needed = layout.blocks_per_request(request.max_model_len)
    longest = layout.longest_request_tokens(num_blocks)
    remedy = f"lower --max-model-len to {longest}" if longest else "leave more memory or use a higher -tp"
    return MemoryRefusal(
        f"One request of --max-model-len {request.max_model_len} tokens needs {needed} blocks "
        f"({format_bytes(needed * layout.block_bytes)}), but {num_blocks} blocks "
        f"({format_bytes(num_blocks * layout.block_bytes)}) fit: {remedy}."
    )


def _check_batch(request: VllmRequest, layout: BlockLayout) -> None:
    """Mode "align" steps by whole blocks, so a prefill batch must hold one. Raises ConfigError."""
    batch = request.max_num_batched_tokens
    if layout.mode == "align" and batch is not None and batch < layout.block_tokens:
        raise ConfigError(
            f"--mamba-cache-mode align needs a batch of at least one block, {layout.block_tokens} tokens, but "
            f"--max-num-batched-tokens is {batch}: raise it to {layout.block_tokens}."
        )


def _max_num_seqs(request: VllmRequest, num_blocks: int) -> tuple[int, str]:
    """The value to pass and why. Raises MemoryRefusal: vLLM wants at least one block per sequence at start.

    vLLM compares the flag with all blocks of the pool ("max_num_seqs ({}) exceeds available Mamba cache blocks ({})",
    vllm/config/compilation.py) and does so for its own default too.
    """
    default = DEFAULT_SEQS_LARGE if request.total_bytes >= LARGE_DEVICE_BYTES else DEFAULT_SEQS
    asked = default if request.max_num_seqs is None else request.max_num_seqs
    bounded = request.layers.linear_layers > 0 and asked > num_blocks
    if bounded and request.max_num_seqs is not None:
        raise MemoryRefusal(
            f"--max-num-seqs {asked} needs {asked} blocks for states, but the pool has {num_blocks}: "
            f"lower --max-num-seqs to {num_blocks}."
        )
    if bounded:
        return num_blocks, f"vLLM's default of {default} is above the pool's {num_blocks} blocks"
    if request.max_num_seqs is None:
        return default, f"vLLM's default for a device of {format_bytes(request.total_bytes)}"
    return asked, "--max-num-seqs"


def _smallest_prefix_tokens(request: VllmRequest, layout: BlockLayout) -> int | None:
    """The shortest prefix that a later request can reuse, in tokens.

    One block, and one more with speculation, which drops the last matching block
    (MambaManager.find_longest_cache_hit, vllm/v1/core/single_type_kv_cache_manager.py).
    """
    if not request.prefix_caching:
        return None
    return layout.block_tokens * (2 if request.num_speculative_tokens else 1)


def _usable_tokens(request: VllmRequest, layout: BlockLayout, num_blocks: int) -> int:
    """Tokens of sequences of max_model_len that the pool keeps: running ones, or cached ones with their checkpoints.

    One block less than the pool has: vLLM keeps the null block.
    """
    length = request.max_model_len
    if not request.prefix_caching:
        return (num_blocks - 1) * length // layout.blocks_per_request(length)
    blocks = layout.cached_blocks(length, retention_tokens=request.retention_tokens)
    if blocks == 0:
        return 0
    return (num_blocks - 1) * (length // layout.block_tokens * layout.block_tokens) // blocks


def _lines(request: VllmRequest, *, kv_bytes: int, pool_bytes: int) -> tuple[tuple[str, int], ...]:
    """The device's memory by use; the last line is what nothing was promised."""
    return (
        ("Weights, activations and graphs", request.non_kv_bytes),
        ("Blocks of attention KV and states", pool_bytes),
        ("Rest smaller than a block", kv_bytes - pool_bytes),
        ("Not given to vLLM", request.total_bytes - request.non_kv_bytes - kv_bytes),
    )

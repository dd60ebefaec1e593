"""vLLM engine profile: how one block pool divides device memory for a hybrid model, and what its boot lines will say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from twinpool.errors import ConfigError, MemoryRefusal
from twinpool.models.spec import ModelSpec
from twinpool.plan.vllm_blocks import BlockLayout, HybridLayers, block_layout, checkpoint_spacing_tokens
from twinpool.plan.vllm_layers import hybrid_layers
from twinpool.units import GIB, format_bytes

DEFAULT_UTILIZATION = 0.92  # of vLLM since 0.20; 0.90 before
DEFAULT_KERNEL_ALIGNMENT_TOKENS = 16  # FlashAttention; MLA kernels use 64, the CPU build its --block-size of 128
# EngineArgs.get_batch_defaults (vllm/engine/arg_utils.py): 1024 sequences on devices of 70 GiB or more, else 256.
LARGE_DEVICE_BYTES = 70 * GIB
DEFAULT_SEQS_LARGE, DEFAULT_SEQS = 1024, 256
WORTH_SAYING = 0.05  # padding or overstatement below this share goes without a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRequest:
    """One rank's memory, the flags of `vllm serve`, and what the layers keep.

    total_bytes: of the device; utilization: --gpu-memory-utilization; non_kv_bytes: weights, activation peak and
    graphs; kv_cache_memory_bytes: --kv-cache-memory-bytes, replaces what utilization leaves; num_gpu_blocks_override:
    blocks; max_model_len, block_size, mamba_block_size, max_num_batched_tokens, kernel_alignment, chunk_tokens: tokens;
    max_num_seqs: requests, None for vLLM's own default; retention_interval: tokens between kept checkpoints, 0 for the
    last boundary only (vLLM's default), None for one at every block.
    """

    total_bytes: int
    non_kv_bytes: int
    max_model_len: int
    layers: HybridLayers
    utilization: float = DEFAULT_UTILIZATION
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    mamba_block_size: int | None = None
    mamba_cache_mode: str = "align"
    prefix_caching: bool = True
    retention_interval: int | None = 0
    kernel_alignment: int = DEFAULT_KERNEL_ALIGNMENT_TOKENS
    chunk_tokens: int = 64
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse what vLLM would not start with. Raises ConfigError."""
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization is {self.utilization}; it must be above 0 and at most 1.")
        if self.max_model_len < 1:
            raise ConfigError(f"--max-model-len is {self.max_model_len}; it must be at least 1 token.")
        if self.prefix_caching and self.mamba_cache_mode == "none" and self.layers.linear_layers:
            raise ConfigError("--enable-prefix-caching needs --mamba-cache-mode align or all; the mode is none.")

    @property
    def retention_tokens(self) -> int | None:
        """Tokens between checkpoints: the retention interval, or --mamba-block-size where every block is kept."""
        if self.retention_interval is not None:
            return self.retention_interval
        return checkpoint_spacing_tokens(self.layout.block_tokens, self.mamba_block_size)

    @property
    def layout(self) -> BlockLayout:
        """Block size and groups. Raises ConfigError: unknown mode or no attention layer."""
        return block_layout(
            self.layers,
            mode=self.mamba_cache_mode,
            kernel_alignment=self.kernel_alignment,
            block_size=self.block_size,
            chunk_tokens=self.mamba_block_size or self.chunk_tokens,
            speculative_blocks=self.num_speculative_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLedger:
    """What the request comes to on one rank.

    num_blocks: of the pool, one of them vLLM's own null block; kv_cache_size_tokens, max_concurrency: as logged;
    old_kv_cache_size_tokens: as logged up to vLLM 0.19; max_num_seqs: what to pass; max_num_seqs_bound: why;
    running_requests: how many can hold their states and one token block each; smallest_prefix_tokens: the shortest
    reusable prefix, None without prefix caching; checkpoint_blocks: blocks of one checkpoint; usable_tokens: of
    sequences of max_model_len that stay in the pool with their checkpoints; lines: (name, bytes), their sum is the
    device's total.
    """

    request: VllmRequest
    layout: BlockLayout
    num_blocks: int
    kv_cache_size_tokens: int
    old_kv_cache_size_tokens: int
    max_concurrency: float
    max_num_seqs: int
    max_num_seqs_bound: str
    running_requests: int
    smallest_prefix_tokens: int | None
    checkpoint_blocks: int
    usable_tokens: int
    lines: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...]

    def blocks_per_request(self, length_tokens: int) -> int:
        """Blocks that one running request of `length_tokens` tokens holds. Raises ConfigError below one token."""
        return self.layout.blocks_per_request(length_tokens)

    def cached_prefix_tokens(self, length_tokens: int) -> int:
        """Tokens of a repeated prompt of `length_tokens` tokens that are not computed again; 0 without prefix caching.

        At least one token is always computed, and with speculation the last matching block is dropped.
        """
        if self.smallest_prefix_tokens is None:
            return 0
        blocks = (length_tokens - 1) // self.layout.block_tokens
        dropped = 1 if self.request.num_speculative_tokens else 0
        return max(0, blocks - dropped) * self.layout.block_tokens


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
    kernel_alignment: int = DEFAULT_KERNEL_ALIGNMENT_TOKENS,
    num_speculative_tokens: int = 0,
    draft_attention_layers: int = 0,
) -> VllmRequest:
    """A request for a model on one of `tp` ranks; units as in VllmRequest.

    max_model_len None: the model's context; mamba_cache_mode None: "align" with prefix caching, else "none";
    draft_attention_layers: of a drafter in the same pool, 1 for the model's own multi-token head.
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
        kernel_alignment=kernel_alignment,
        chunk_tokens=spec.chunk_tokens,
        num_speculative_tokens=num_speculative_tokens,
    )


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
    return replace(ledger, warnings=tuple(_warnings(ledger)))


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
    asked = request.max_num_seqs or default
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


def _warnings(ledger: VllmLedger) -> Iterator[str]:
    """Sentences about what is refused, changed or wasted without an error."""
    request, layout = ledger.request, ledger.layout
    if request.block_size is not None and layout.block_tokens != request.block_size:
        yield (
            f"--block-size {request.block_size} becomes {layout.block_tokens} tokens, so that one attention page holds "
            "one state."
        )
    if layout.padding_fraction > WORTH_SAYING:
        yield f"Each state is padded by {layout.padding_fraction:.2%}: {format_bytes(layout.padding_bytes)} a layer."
    if layout.padding_layers:
        yield f"{layout.padding_layers} padding layers fill the groups up to {layout.layers_per_group} layers each."
    yield from _capacity_warnings(ledger)
    yield from _prefix_warnings(ledger)


def _capacity_warnings(ledger: VllmLedger) -> Iterator[str]:
    """Sentences about how many requests can run."""
    request, layout = ledger.request, ledger.layout
    if request.max_num_seqs is None and "above the pool" in ledger.max_num_seqs_bound:
        yield f"vLLM does not start with its default: {ledger.max_num_seqs_bound}; pass --max-num-seqs {ledger.max_num_seqs}."
    if ledger.running_requests < ledger.max_num_seqs:
        yield (
            f"Only {ledger.running_requests} of {ledger.max_num_seqs} sequences can run at once: each needs at least "
            f"{layout.blocks_per_request(1)} of {ledger.num_blocks - 1} free blocks."
        )
    if layout.blocks_per_request(request.max_model_len) == ledger.num_blocks:
        yield (
            f"A request of {request.max_model_len} tokens needs all {ledger.num_blocks} blocks, but vLLM keeps 1 as its "
            f"null block: such a request never ends; lower --max-model-len to "
            f"{layout.longest_request_tokens(ledger.num_blocks - 1)}."
        )


def _prefix_warnings(ledger: VllmLedger) -> Iterator[str]:
    """Sentences about prefix reuse and what its checkpoints cost."""
    request, smallest = ledger.request, ledger.smallest_prefix_tokens
    if smallest is None:
        return
    if smallest >= request.max_model_len:
        yield (
            f"No prefix is ever reused: the smallest is {smallest} tokens and --max-model-len is {request.max_model_len}."
        )
    elif ledger.layout.state_groups:
        yield f"A shared prefix below {smallest} tokens is never reused."
    if ledger.usable_tokens < ledger.kv_cache_size_tokens * (1 - WORTH_SAYING):
        yield (
            f"vLLM logs {ledger.kv_cache_size_tokens} tokens, but with their checkpoints only {ledger.usable_tokens} tokens "
            "stay cached."
        )
    spacing, block = request.mamba_block_size, ledger.layout.block_tokens
    if request.retention_interval is not None and spacing is not None and ledger.layout.mode == "align":
        yield (
            f"--mamba-block-size {spacing} spaces no checkpoints while --prefix-cache-retention-interval is "
            f"{request.retention_interval}."
        )
    elif spacing is not None and ledger.layout.mode == "align" and spacing % block:
        yield f"--mamba-block-size {spacing} is no multiple of the block: checkpoints are {request.retention_tokens} tokens apart."

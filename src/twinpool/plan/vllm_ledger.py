"""The request and the ledger of the vLLM profile: values that the planner passes and prints."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ConfigError
from twinpool.plan.vllm_blocks import BlockLayout, HybridLayers, block_layout, checkpoint_spacing_tokens

DEFAULT_UTILIZATION = 0.92  # CacheConfig of vLLM 0.25 to 0.30; 0.90 in older ones
DEFAULT_KERNEL_ALIGNMENT_TOKENS = 16  # FlashAttention
LATENT_KERNEL_ALIGNMENT_TOKENS = 64  # MLA kernels
CPU_BLOCK_TOKENS = 128  # the CPU build's own --block-size


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
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs is {self.max_num_seqs}; it must be at least 1.")
        if self.prefix_caching and self.mamba_cache_mode == "none" and self.layers.linear_layers:
            raise ConfigError("--enable-prefix-caching needs --mamba-cache-mode align or all; the mode is none.")
        if self.mamba_block_size is not None and not self.prefix_caching:
            raise ConfigError(f"--mamba-block-size {self.mamba_block_size} needs --enable-prefix-caching; it is off.")

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

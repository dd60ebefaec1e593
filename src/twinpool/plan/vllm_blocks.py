"""vLLM's one block pool for attention pages and recurrent states: block size, padding, groups, blocks of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinpool.errors import ConfigError
from twinpool.units import ceil_div, round_down, round_up

CACHE_MODES = ("none", "align", "all")
# Below this ratio of the larger to the smaller layer count, groups take the larger count and pad the others
# (vllm/v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size).
PAD_TO_LARGER_BELOW = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridLayers:
    """What the layers of one rank keep.

    attention_layers, linear_layers: counts; kv_bytes_per_token: of one attention layer; conv_bytes, ssm_bytes: of one
    state of one linear layer, the conv window widened by the speculative tokens.
    """

    attention_layers: int
    linear_layers: int
    kv_bytes_per_token: int
    conv_bytes: int
    ssm_bytes: int

    @property
    def state_bytes(self) -> int:
        """One state of one linear layer, before padding."""
        return self.conv_bytes + self.ssm_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The pool's geometry: every block is `layers_per_group` pages, and one page is a token block or one state.

    block_tokens: tokens of an attention block; page_bytes, state_bytes: of one layer; mode: one of CACHE_MODES;
    speculative_blocks: further states that a running request holds in each state group; padding_layers: layers that a
    group pays for without having them.
    """

    block_tokens: int
    page_bytes: int
    state_bytes: int
    layers_per_group: int
    attention_groups: int
    state_groups: int
    padding_layers: int
    mode: str
    speculative_blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a page in each layer of a group."""
        return self.page_bytes * self.layers_per_group

    @property
    def padding_bytes(self) -> int:
        """Bytes of a state's page that nothing uses; 0 without linear layers."""
        return self.page_bytes - self.state_bytes if self.state_groups else 0

    @property
    def padding_fraction(self) -> float:
        """Padding over the state, as vLLM logs it ("Padding mamba page size by {}%")."""
        return self.padding_bytes / self.state_bytes if self.state_groups else 0.0

    @property
    def state_blocks_per_request(self) -> int:
        """Blocks for the states of one running request of any length; its states in mode "all" grow instead: 0.

        MambaSpec.max_memory_usage_bytes (vllm/v1/kv_cache_interface.py): 1 state per layer in mode "none", 2 in mode
        "align" (the last boundary and the running one), each time plus one per speculative token.
        """
        if self.mode == "all":
            return 0
        return self.state_groups * ((2 if self.mode == "align" else 1) + self.speculative_blocks)

    @property
    def growing_groups(self) -> int:
        """Groups that need one block more for each further block of tokens."""
        return self.attention_groups + (self.state_groups if self.mode == "all" else 0)

    def blocks_per_request(self, length_tokens: int) -> int:
        """Blocks that one running request of `length_tokens` tokens holds. Raises ConfigError below one token."""
        if length_tokens < 1:
            raise ConfigError(f"A request of {length_tokens} tokens holds nothing; give a length of at least 1.")
        return self.growing_groups * ceil_div(length_tokens, self.block_tokens) + self.state_blocks_per_request

    def longest_request_tokens(self, blocks: int) -> int:
        """The longest request that `blocks` blocks hold; 0 when not even one token fits."""
        return max(0, blocks - self.state_blocks_per_request) // self.growing_groups * self.block_tokens

    def checkpoints(self, length_tokens: int, *, retention_tokens: int | None) -> int:
        """States kept, in each state group, of a cached sequence of `length_tokens` tokens.

        retention_tokens: None keeps one at every block boundary, 0 only the last boundary, n > 0 one every n tokens
        and the last boundary (MambaManager.reachable_block_mask, vllm/v1/core/single_type_kv_cache_manager.py).
        """
        boundaries = length_tokens // self.block_tokens
        if retention_tokens is None or boundaries == 0:
            return boundaries
        if retention_tokens == 0:
            return 1
        blocks_apart = max(1, retention_tokens // self.block_tokens)
        spaced = boundaries // blocks_apart
        return spaced + (1 if boundaries % blocks_apart else 0)

    def cached_blocks(self, length_tokens: int, *, retention_tokens: int | None) -> int:
        """Blocks that keep a finished sequence reusable: its full token blocks and its checkpoints."""
        kept = self.checkpoints(length_tokens, retention_tokens=retention_tokens)
        return self.attention_groups * (length_tokens // self.block_tokens) + self.state_groups * kept


def block_tokens(
    layers: HybridLayers, *, mode: str, kernel_alignment: int, block_size: int | None, chunk_tokens: int
) -> int:
    """Tokens of an attention block after vLLM has raised it until one page holds one state.

    kernel_alignment, block_size, chunk_tokens: tokens. The block is a multiple of the larger of the kernel's
    alignment and --block-size; in mode "all" also of the state kernel's chunk
    (Platform._align_hybrid_block_size, vllm/platforms/interface.py).
    """
    unit = max(kernel_alignment, block_size or 0)
    if mode == "all" and layers.linear_layers:
        unit = math.lcm(unit, chunk_tokens)
    if not layers.linear_layers:
        return unit
    return round_up(max(1, ceil_div(layers.state_bytes, layers.kv_bytes_per_token)), unit)


def group_layers(attention_layers: int, linear_layers: int) -> tuple[int, int, int, int]:
    """(layers per group, attention groups, state groups, padding layers) of vLLM's equal groups.

    The group size is the smaller count, or the larger one when the two are close
    (vllm/v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size).
    """
    counts = [count for count in (attention_layers, linear_layers) if count]
    smaller, larger = min(counts), max(counts)
    size = larger if larger < smaller * PAD_TO_LARGER_BELOW else smaller
    attention_groups, state_groups = ceil_div(attention_layers, size), ceil_div(linear_layers, size)
    padding = (attention_groups + state_groups) * size - attention_layers - linear_layers
    return size, attention_groups, state_groups, padding


def block_layout(
    layers: HybridLayers,
    *,
    mode: str,
    kernel_alignment: int,
    block_size: int | None,
    chunk_tokens: int,
    speculative_blocks: int,
) -> BlockLayout:
    """Block size and groups together; sizes in tokens as in `block_tokens`. Raises ConfigError: mode, no attention."""
    if mode not in CACHE_MODES:
        raise ConfigError(f"--mamba-cache-mode is '{mode}'; use one of {', '.join(CACHE_MODES)}.")
    if layers.attention_layers < 1:
        raise ConfigError("This model has no attention layer; the vLLM profile needs at least 1 to size a block by.")
    tokens = block_tokens(
        layers, mode=mode, kernel_alignment=kernel_alignment, block_size=block_size, chunk_tokens=chunk_tokens
    )
    size, attention_groups, state_groups, padding = group_layers(layers.attention_layers, layers.linear_layers)
    return BlockLayout(
        block_tokens=tokens,
        page_bytes=tokens * layers.kv_bytes_per_token,
        state_bytes=layers.state_bytes,
        layers_per_group=size,
        attention_groups=attention_groups,
        state_groups=state_groups,
        padding_layers=padding,
        mode=mode,
        speculative_blocks=speculative_blocks,
    )


def checkpoint_spacing_tokens(block: int, mamba_block_size: int | None) -> int | None:
    """--mamba-block-size as a distance of checkpoints, in tokens: whole blocks of `block` tokens; None: every block."""
    if mamba_block_size is None:
        return None
    return max(block, round_down(mamba_block_size, block))

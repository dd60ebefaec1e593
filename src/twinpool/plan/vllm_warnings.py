"""Sentences about a vLLM plan: what is refused, changed or wasted without an error."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.plan.vllm_ledger import VllmLedger
from twinpool.units import format_bytes

WORTH_SAYING = 0.05  # padding or overstatement below this share goes without a warning


def warnings_of(ledger: VllmLedger) -> Iterator[str]:
    """One sentence each; empty when vLLM does exactly what its flags say."""
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
    if request.max_num_seqs is None and request.layers.linear_layers and ledger.max_num_seqs == ledger.num_blocks:
        yield (
            f"vLLM does not start without a flag here: {ledger.max_num_seqs_bound}; "
            f"pass --max-num-seqs {ledger.max_num_seqs}."
        )
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

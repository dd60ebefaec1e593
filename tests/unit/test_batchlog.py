"""Per-batch lines to the letter (reference 2.2, 2.3)."""

from __future__ import annotations

from dataclasses import replace

from twinpool.batchlog import DecodeBatch, PrefillBatch, decode_line, prefill_line, retract_line


def test_prefill() -> None:
    batch = PrefillBatch(
        new_seqs=1, new_tokens=64, cached_tokens=128, full_usage=0.0, mamba_usage=0.031, running=3, queued=2,
        pending_tokens=5, tokens_per_s=12.5,
    )  # fmt: skip
    assert prefill_line(batch) == (
        "Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: 128, full token usage: 0.00, mamba usage: 0.03, "
        "#running-req: 3, #queue-req: 2, #pending-token: 5, cuda graph: False, input throughput (token/s): 12.50"
    )
    assert prefill_line(replace(batch, iteration=7)).startswith("Prefill batch [7], #new-seq: 1, ")


def test_decode() -> None:
    batch = DecodeBatch(
        running=3, full_tokens=99, full_usage=0.5, mamba_slots=9, mamba_usage=0.25, tokens_per_s=40.0, queued=0
    )
    assert decode_line(batch) == (
        "Decode batch, #running-req: 3, #full token: 99, full token usage: 0.50, mamba num: 9, mamba usage: 0.25, "
        "cuda graph: False, gen throughput (token/s): 40.00, #queue-req: 0"
    )
    assert decode_line(replace(batch, iteration=7)).startswith("Decode batch [7], #running-req: 3, ")


def test_retraction() -> None:
    assert retract_line(requests=2, tokens=30, slots=6, ratio_before=0.7, ratio_after=0.98765) == (
        "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 30, #mamba_num_gained: 6, "
        "#new_token_ratio: 0.7000 -> 0.9877"
    )

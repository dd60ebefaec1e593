"""Positions of checkpoints (reference 9.2, 24 and 28-30; 3.2 grids)."""

from __future__ import annotations

import pytest

from twinpool.errors import ConfigError
from twinpool.prefix.checkpoint import decode_checkpoint, grids, prefill_checkpoint, slots_per_request, track_slots


@pytest.mark.parametrize(
    ("start", "end", "grid", "expected"),
    [
        (0, 63, 64, None), (0, 64, 64, 64), (0, 3008, 64, 3008), (0, 3008, 128, 2944), (128, 128 + 200, 64, 320),
        (128, 128 + 63, 64, None), (100, 130, 64, 128),
    ],
)  # fmt: skip
def test_prefill(start, end, grid, expected) -> None:
    assert prefill_checkpoint(start=start, end=end, grid_tokens=grid) == expected


@pytest.mark.parametrize(("branching", "expected"), [(None, 256), (128, 128), (256, 256), (64, 256), (320, 256)])
def test_a_fork_inside_the_chunk_takes_precedence(branching, expected) -> None:
    assert prefill_checkpoint(start=64, end=300, grid_tokens=64, branching=branching) == expected


def test_decode_is_tracked_exactly_on_the_track_grid() -> None:
    assert [n for n in range(1, 1025) if decode_checkpoint(start=n - 1, end=n, track_tokens=256)] == [
        256,
        512,
        768,
        1024,
    ]
    assert decode_checkpoint(start=100, end=612, track_tokens=256) == 512


@pytest.mark.parametrize(
    ("page", "chunk", "interval", "expected"),
    [
        (1, 64, 256, (64, 64, 256)),
        (128, 64, 256, (128, 128, 256)),
        (16, 64, 100, (64, 64, 1600)),
        (1, 1, 256, (1, 1, 256)),
    ],
)
def test_grids(page, chunk, interval, expected) -> None:
    found = grids(page_tokens=page, chunk_tokens=chunk, track_interval_tokens=interval)
    assert (found.chunk_tokens, found.checkpoint_tokens, found.track_tokens) == expected


def test_page_and_chunk_must_divide() -> None:
    with pytest.raises(ConfigError, match="--page-size 48 and the model's state chunk of 64 tokens"):
        grids(page_tokens=48, chunk_tokens=64, track_interval_tokens=256)


def test_strategy_table() -> None:
    assert [slots_per_request(n, overlap=o) for n, o in (("extra_buffer", True), ("extra_buffer", False))] == [5, 4]
    assert slots_per_request("extra_buffer_lazy", overlap=True) == 4
    assert slots_per_request("no_buffer", overlap=False) == 3
    assert slots_per_request("no_buffer", overlap=False, radix=False) == 1
    assert [track_slots("extra_buffer", overlap=o) for o in (True, False)] == [2, 1]
    assert [track_slots(n, overlap=True) for n in ("extra_buffer_lazy", "no_buffer")] == [1, 0]
    with pytest.raises(ConfigError, match="--mamba-radix-cache-strategy maybe is not one of no_buffer"):
        slots_per_request("maybe", overlap=True)

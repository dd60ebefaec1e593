"""The roofline with round numbers, and calibration files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twinpool.errors import ConfigError
from twinpool.replay.cost import Calibration, CostModel, read_calibration
from twinpool.replay.timing import decode_durations, step_durations
from twinpool.step import Row, StepPlan

PAGES = np.zeros(4, np.int32)
PLAIN = CostModel(
    weight_bytes=100.0, expert_bytes=0.0, n_experts=0, experts_per_token=0, flops_per_token=10.0, attention_flops=2.0,
    kv_bytes_per_token=3.0, slot_bytes=5.0, reduce_bytes_per_token=0.0, flops_per_s=1000.0, bandwidth_bytes_per_s=10.0,
    link_bytes_per_s=1.0, calibration=Calibration(flops_share=1.0, bandwidth_share=1.0, step_s=0.0, row_s=0.0),
)  # fmt: skip
TWO = [(100, 101), (40, 41)]


def plan(*spans: tuple[int, int], repeat: int = 1) -> StepPlan:
    rows = tuple(Row(rid=1, start=start, end=end, tokens=None, slot=1, pages=PAGES) for start, end in spans)
    return StepPlan(step=1, rows=rows, repeat=repeat)


def test_a_decode_step_reads_weights_kv_and_states() -> None:
    # 100 of weights, 140 tokens of KV at 3, two rows that read and write 5 each: 540 bytes at 10 a second.
    assert PLAIN.step_s(plan(*TWO)).tolist() == [54.0]


def test_a_prefill_multiplies() -> None:
    fast_memory = replace(PLAIN, bandwidth_bytes_per_s=1e9)
    # 20 tokens at 10, and pairs of a token and its context: 20 * (10 + 30) / 2 at 2.
    assert fast_memory.step_s(plan((10, 30))).tolist() == [(200 + 800) / 1000]


def test_the_longer_of_products_and_memory_counts_and_calibration_stretches_it() -> None:
    kept = Calibration(flops_share=0.5, bandwidth_share=0.25, step_s=7.0, row_s=0.5)
    assert replace(PLAIN, calibration=kept).step_s(plan(*TWO)).tolist() == [54.0 * 4 + 7.0 + 2 * 0.5]
    assert replace(PLAIN, calibration=kept, bandwidth_bytes_per_s=1e9).step_s(plan((10, 30)))[0] == 2.0 + 7.0 + 0.5


def test_a_step_of_few_tokens_reads_few_experts() -> None:
    sparse = replace(
        PLAIN, expert_bytes=800.0, n_experts=8, experts_per_token=2, kv_bytes_per_token=0.0, slot_bytes=0.0
    )
    # One token reads 2 of 8 experts; of two, the second finds a quarter of its two read already.
    assert sparse.step_s(plan((5, 6))).tolist() == [(100 + 200) / 10]
    assert sparse.step_s(plan((5, 6), (7, 8))).tolist() == [(100 + 800 * (1 - 0.75**2)) / 10]


def test_ranks_send_each_other_every_token() -> None:
    linked = replace(PLAIN, reduce_bytes_per_token=4.0, link_bytes_per_s=8.0)
    assert linked.step_s(plan(*TWO)).tolist() == [54.0 + 2 * 4 / 8]


def test_several_steps_are_what_they_are_one_by_one() -> None:
    cost = replace(PLAIN, kv_bytes_per_token=0.7, attention_flops=0.3, calibration=Calibration(row_s=0.1, step_s=0.01))
    singly = [cost.step_s(plan((100 + i, 101 + i), (40 + i, 41 + i)))[0] for i in range(50)]
    assert cost.decode_s([100, 40], 50).tolist() == singly
    assert cost.step_s(plan((100, 150), (40, 90), repeat=50)).tolist() == singly


def test_without_a_cost_model_steps_take_no_time() -> None:
    assert step_durations(None)(plan((5, 9), repeat=4)).tolist() == [0.0] * 4
    assert decode_durations(None)([1, 2], 3).tolist() == [0.0] * 3
    assert step_durations(PLAIN)(plan(*TWO)).tolist() == [54.0]
    assert decode_durations(PLAIN)([100, 40], 1).tolist() == [54.0]


def test_a_calibration_file_gives_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text('{"flops_share": 0.4, "row_s": 0, "source": "a run"}')
    assert read_calibration(file) == Calibration(flops_share=0.4, row_s=0, source="a run")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read"),
        ("[]", "must be an object with bandwidth_share, flops_share, row_s, source, step_s"),
        ('{"speed": 1}', "must be an object with"),
        ('{"flops_share": 0}', "says flops_share=0; it must be a number from 1e-09 to 1000"),
        ('{"step_s": -1}', "says step_s=-1"),
        ('{"step_s": true}', "says step_s=True"),
        ('{"step_s": 1e999}', "says step_s=inf"),
        ('{"row_s": "x"}', "says row_s='x'"),
        (f'{{"flops_share": 1{"0" * 400}}}', "says flops_share=1000"),
        ('{"bandwidth_share": 1e-300}', "says bandwidth_share=1e-300; it must be a number from 1e-09 to 1000"),
        ('{"step_s": 1e300}', "says step_s=1e+300; it must be a number from 0 to 3600"),
        ('{"source": 5}', "says source=5; it must be a text"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_calibration_file_that_is_wrong_is_told_what(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as found:
        read_calibration(file)
    assert sentence in str(found.value)


def test_a_calibration_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--calibration .*nowhere\.json cannot be read"):
        read_calibration(tmp_path / "nowhere.json")

"""Numbers of real boot logs against our formulas, as far as each log determines them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinpool.prefix.checkpoint import slots_per_request
from twinpool.units import to_gib

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "boot_logs.json").read_text())
BY_NAME = [pytest.param(vector, id=vector["name"]) for vector in VECTORS]
# S that explains each log's max_running; 1: radix cache off.
KNOWN_S = {
    "Qwen3.5-9B bf16": 3, "Qwen3.8-27B-NVFP4": 5, "Qwen3.5-9B no radix": 1, "Kimi-K3 TP8 (SKILL example)": 5,
    "GLM-5.3-Flash TP2 (docs boot log)": 5, "Nemotron-Nano-9B-v2": 1,
}  # fmt: skip


@pytest.mark.parametrize("vector", BY_NAME)
def test_state_pool_sizes_include_the_padding_slot(vector) -> None:
    n_slots = vector["slots"] + 1
    # The log prints two decimals; older versions printed without the padding slot, so one slot of difference is allowed.
    for logged, per_slot in ((vector["conv_gb_log"], vector["conv_bytes_slot"]), (vector["ssm_gb_log"], vector["ssm_bytes_slot"])):
        with_padding, without = to_gib(n_slots * per_slot), to_gib(vector["slots"] * per_slot)
        assert min(abs(with_padding - logged), abs(without - logged)) <= 0.0051


@pytest.mark.parametrize("vector", BY_NAME)
def test_kv_pool_sizes(vector) -> None:
    if vector["kv_gb_log"] is None or vector["kv_bytes_token"] is None:
        pytest.skip("the log gives no KV size or the model's bytes per token are not known")
    size = to_gib(vector["tokens"] * vector["kv_bytes_token"])
    assert size == pytest.approx(vector["kv_gb_log"], abs=0.011)


@pytest.mark.parametrize("vector", BY_NAME)
def test_running_requests_are_slots_over_s(vector) -> None:
    if vector["name"] not in KNOWN_S:
        pytest.skip("the log does not say which strategy ran, or no max_running_requests")
    assert vector["max_running"] == vector["slots"] // KNOWN_S[vector["name"]]


def test_the_strategy_table() -> None:
    expected = {("no_buffer", False): 3, ("extra_buffer", True): 5, ("extra_buffer", False): 4, ("extra_buffer_lazy", True): 4}
    for (name, overlap), slots in expected.items():
        assert slots_per_request(name, overlap=overlap) == slots
    assert slots_per_request("extra_buffer", overlap=True, radix=False) == 1

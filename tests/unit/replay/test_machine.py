"""From a sized plan to a scheduler and a cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.clock import VirtualClock
from twinpool.errors import MemoryRefusal
from twinpool.plan.command import read_command
from twinpool.plan.run import sizing_of
from twinpool.plan.sizing import Sizing
from twinpool.replay.cost import Calibration
from twinpool.replay.machine import cost_model, scheduler_of

GPU = ("--gpu", "H100")


def sizing(model: str, *flags: str) -> Sizing:
    return sizing_of(read_command([model, *GPU, *flags], usage=""))


def test_the_scheduler_has_the_pools_of_the_ledger() -> None:
    sized = sizing("Qwen3.5-9B", "--page-size", "16", "--max-running-requests", "4")
    scheduler = scheduler_of(sized, VirtualClock())
    pages, slots = scheduler.counts()
    assert sized.ledger is not None
    assert (pages.total, slots.total) == (sized.ledger.n_pages, sized.ledger.max_mamba_cache_size)
    assert (pages.free, slots.free) == (pages.total, slots.total)
    assert (scheduler.shape.page_size, scheduler.shape.max_running_requests) == (16, 4)


def test_a_machine_that_would_not_start_is_refused_with_its_sentence() -> None:
    sized = replace(sizing("Qwen3.5-9B"), ledger=None, refusal="nothing fits")
    with pytest.raises(MemoryRefusal, match="nothing fits"):
        scheduler_of(sized, VirtualClock())


def test_a_dense_model_reads_all_its_weights_and_multiplies_by_all_of_them() -> None:
    sized = sizing("Qwen3.5-9B")
    cost = cost_model(sized, Calibration(source="here"))
    assert (cost.n_experts, cost.expert_bytes, cost.calibration.source) == (0, 0.0, "here")
    assert sized.machine.weights is not None
    assert cost.weight_bytes == sized.machine.weights.bytes
    # Two products a weight, two bytes a weight.
    assert cost.flops_per_token == pytest.approx(cost.weight_bytes, rel=0.1)
    assert cost.kv_bytes_per_token == sized.request.kv_bytes_per_token
    assert cost.slot_bytes == sized.request.stage_slot_bytes + sized.request.stage_extra_bytes
    assert cost.reduce_bytes_per_token == 0


def test_a_mixture_reads_and_multiplies_by_what_its_tokens_are_sent_to() -> None:
    sized = sizing("Qwen3.5-35B-A3B")
    cost = cost_model(sized, Calibration())
    assert (cost.n_experts, cost.experts_per_token) == (256, 8)
    assert cost.expert_bytes > 0.85 * (cost.weight_bytes + cost.expert_bytes)
    assert 2 * 2.5e9 < cost.flops_per_token < 2 * 4e9  # about three billion active weights


def test_two_ranks_share_the_work_and_talk_about_it() -> None:
    alone, both = (cost_model(sizing("Qwen3.5-9B", "--tp", tp), Calibration()) for tp in ("1", "2"))
    assert both.flops_per_token == pytest.approx(alone.flops_per_token / 2)
    assert both.attention_flops == alone.attention_flops / 2
    assert both.weight_bytes == pytest.approx(alone.weight_bytes / 2, rel=0.02)
    assert both.reduce_bytes_per_token > 0

"""Advice: the cheapest change that holds the workload, what to paste, and what helps when no change of flags does."""

from __future__ import annotations

from tests.unit.plan.plans import builtin, machine, manual, plan, round_plan
from twinpool.config.engines import TWINPOOL
from twinpool.config.launch import read_launch, split_words
from twinpool.plan.advice import Advice, advise
from twinpool.plan.host import host_plan
from twinpool.plan.outcome import launch_flags
from twinpool.plan.sizing import Sizing, changed
from twinpool.plan.workload import Workload, fit
from twinpool.units import GB, GIB, MIB

S5 = {"mamba_radix_cache_strategy": "extra_buffer"}


def advice_for(workload: Workload, sizing: Sizing) -> Advice:
    return advise(workload, sizing, machine_of=lambda ranks: machine(sizing.machine.available_bytes, ranks=ranks))


def titles(advice: Advice) -> list[str]:
    return [step.title for step in advice.steps]


def test_a_workload_that_fits_needs_no_step_and_gets_the_split_with_most_idle_sessions() -> None:
    advice = advice_for(Workload(running=10, tokens_per_request=1000), round_plan(max_mamba_cache_size=100))
    assert (advice.steps, advice.holds, advice.ranks, advice.host) == ((), True, None, None)
    assert advice.setting is not None
    assert (advice.setting.workload.idle_sessions, advice.setting.pin.slots) == (190, 10 * 5 + 190)
    assert advice.setting.ratio == 0.308


def test_a_split_comes_before_a_strategy_that_costs_something() -> None:
    # 100 slots are too few for 60 requests, and 300 leave enough KV.
    advice = advice_for(Workload(running=60, tokens_per_request=1000), round_plan(max_mamba_cache_size=100))
    assert titles(advice) == ["--max-mamba-cache-size 300 --max-running-requests 60"]
    assert advice.final.request.slots_per_request == 5
    assert advice.holds


def test_a_strategy_where_no_split_is_enough() -> None:
    # 120 requests: 600 slots and 120,000 tokens (468.75 MiB) do not fit 1 GiB; 480 slots do.
    advice = advice_for(Workload(running=120, tokens_per_request=1000), round_plan(mamba_full_memory_ratio=0.1))
    assert titles(advice) == [
        "--mamba-radix-cache-strategy extra_buffer_lazy", "--max-mamba-cache-size 480 --max-running-requests 120",
    ]  # fmt: skip
    assert advice.steps[0].why == "S falls from 5 to 4 slots a request"


def test_the_strategy_without_buffers_comes_with_its_cost() -> None:
    advice = advice_for(Workload(running=140, tokens_per_request=1000), round_plan(mamba_full_memory_ratio=0.1))
    assert titles(advice) == [
        "--mamba-radix-cache-strategy no_buffer", "--max-mamba-cache-size 420 --max-running-requests 140",
    ]  # fmt: skip
    assert "no overlap" in advice.steps[0].warning
    assert advice.final.resolved.page_size == 1


def test_a_fraction_below_the_default_is_raised_first() -> None:
    model, where = manual(MIB, 4096), machine(75 * GIB, pre_load_bytes=79 * GIB)
    sizing = plan(model, where, mem_fraction_static=0.2, max_running_requests=100, **S5)
    advice = advice_for(Workload(running=100, tokens_per_request=20_000), sizing)
    default = advice.steps[0].sizing.resolved.mem_fraction_static
    assert default == 0.838
    assert advice.steps[0].title == f"--mem-fraction-static {default}"
    assert advice.steps[0].why.startswith("50.40 GiB of the slack go to the pools")
    assert advice.holds


def test_what_no_flag_holds_gets_the_nearest_split_a_host_tier_and_more_ranks() -> None:
    model = builtin("Qwen3-Next-80B-A3B")
    sizing = plan(model, machine(20 * GIB), **S5)
    work = Workload(running=20, tokens_per_request=16_384, idle_sessions=50)
    advice = advice_for(work, sizing)
    assert not advice.holds
    assert advice.setting is not None
    assert advice.setting.workload.running == 20
    assert 0 < advice.setting.workload.idle_sessions < 50
    assert advice.host is not None
    assert advice.host.sessions == 50 - advice.setting.workload.idle_sessions
    assert advice.host.covered_sessions == 50 + 20
    assert advice.host.state_bytes == 70 * advice.final.request.stage_slot_bytes
    assert advice.host.kv_bytes == 70 * 16_384 * 24_576
    assert advice.host.proportional_sessions < 70
    assert 0 <= advice.host.size_gb - (advice.host.state_bytes + advice.host.kv_bytes) / GB < 0.2
    given = changed(sizing, enable_hierarchical_cache=True, hicache_size=advice.host.size_gb)
    found = host_plan(given, work)
    assert found is not None
    assert found.auto is not None
    assert found.auto.together == 70
    assert advice.ranks == 2
    assert [step.title for step in advice.options] == ["--mamba-ssm-dtype bfloat16", "--kv-cache-dtype fp8_e4m3"]
    assert all(step.warning for step in advice.options)


def test_our_own_server_has_the_smaller_types_too() -> None:
    sizing = plan(builtin("Qwen3-Next-80B-A3B"), machine(20 * GIB), rules=TWINPOOL)
    advice = advice_for(Workload(running=20, tokens_per_request=16_384, idle_sessions=50), sizing)
    assert [step.title for step in advice.options] == ["--mamba-ssm-dtype bfloat16", "--kv-cache-dtype fp8_e4m3"]


def test_no_host_tier_where_nothing_is_kept() -> None:
    sizing = round_plan(disable_radix_cache=True, max_mamba_cache_size=4)
    advice = advice_for(Workload(running=2000, tokens_per_request=1000, idle_sessions=9), sizing)
    assert (advice.holds, advice.host) == (False, None)


def test_workers_of_dp_attention_get_a_number_they_can_share() -> None:
    sizing = round_plan(tp_size=4, dp_size=4, enable_dp_attention=True, max_mamba_cache_size=20)
    work = Workload(running=10, tokens_per_request=1000)
    advice = advice_for(work, sizing)
    assert titles(advice) == ["--max-mamba-cache-size 60 --max-running-requests 12"]
    assert advice.holds
    assert fit(work, advice.final).running == 12


def test_flags_to_paste_keep_the_line_and_write_the_fraction_out() -> None:
    sizing = round_plan(model_path="org/a model", skip_decode_lock=True, mamba_conv_dtype="float32", api_key="secret")
    words = launch_flags(sizing, advice_for(Workload(running=10, tokens_per_request=1000), sizing))
    assert words[:2] == ("SGLANG_MAMBA_CONV_DTYPE=float32", "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1")
    assert set(words[2:]) == {
        "--model-path 'org/a model'", "--mem-fraction-static 1.0", "--max-mamba-cache-size 232",
        "--mamba-radix-cache-strategy extra_buffer", "--max-running-requests 10",
    }  # fmt: skip
    line = read_launch(split_words(" ".join(words)))
    assert (line.model, line.deployment.skip_decode_lock, line.deployment.mamba_conv_dtype) == (
        "org/a model",
        True,
        "float32",
    )


def test_our_own_flags_are_pasted_for_our_own_server_only() -> None:
    flags = {"device_memory_bytes": 2 * GIB, "mamba_conv_dtype": "float32", "threads": 2}
    ours = plan(manual(MIB, 4096), machine(GIB), rules=TWINPOOL, **flags)
    assert launch_flags(ours, None) == (
        f"--device-memory {2 * GIB}", "--mem-fraction-static 1.0", "--mamba-conv-dtype float32", "--threads 2",
    )  # fmt: skip
    theirs = plan(manual(MIB, 4096), machine(GIB), **flags)
    assert launch_flags(theirs, None) == ("SGLANG_MAMBA_CONV_DTYPE=float32", "--mem-fraction-static 1.0")

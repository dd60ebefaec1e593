"""Properties of plans, for random models, machines, flags and workloads: forward and inverse agree, more memory never hurts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, assume, given, settings

from tests.unit.plan.plans import machine, manual, plan
from twinpool.config.engines import SGLANG, SGLANG_UNPADDED, TWINPOOL, EngineRules
from twinpool.config.launch import LaunchLine, read_launch, split_words
from twinpool.errors import TwinpoolError
from twinpool.memory.split import one_slot_a_request, split
from twinpool.models.builtin import builtin_models
from twinpool.plan import inverse
from twinpool.plan.advice import Advice, advise
from twinpool.plan.command import read_command
from twinpool.plan.machine import Machine
from twinpool.plan.model import PlannedModel, find_model
from twinpool.plan.outcome import launch_flags, outcome
from twinpool.plan.run import plan as plan_of_command
from twinpool.plan.sizing import Sizing, changed, size
from twinpool.plan.workload import Workload, asked_running, fit, slots_needed
from twinpool.units import GIB, KIB, MIB

DECIMALS = st.integers(1, 4000).map(lambda thousandths: thousandths / 1000)
# Many random flags contradict each other, and such plans are left out.
SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
FRACTIONS = st.integers(300, 1000).map(lambda thousandths: thousandths / 1000)


@dataclass(frozen=True)
class Case:
    """A plan that may be refused, and a workload."""

    sizing: Sizing
    workload: Workload


def machine_of(sizing: Sizing) -> Any:
    """The same rank, however many there are."""
    return lambda ranks: replace(sizing.machine, ranks=ranks)


@st.composite
def models(draw: st.DrawFn) -> PlannedModel:
    if draw(st.booleans()):
        return find_model(draw(st.sampled_from([model.name for model in builtin_models()])))
    state = 4 * draw(st.integers(1, 40 * KIB) | st.integers(1, 64 * MIB))
    return manual(state, draw(st.sampled_from([0, 1, 576, 24_576, 200_000])), context_len=draw(st.integers(2, 10**6)))


@st.composite
def flags(draw: st.DrawFn) -> dict[str, Any]:
    """Flags that a launch line may have; not all go together."""
    found: dict[str, Any] = {"mem_fraction_static": draw(st.none() | FRACTIONS)}
    optional = {
        "mamba_full_memory_ratio": DECIMALS,
        "max_mamba_cache_size": st.integers(1, 2000),
        "max_running_requests": st.integers(1, 600),
        "max_total_tokens": st.integers(1, 10**7),
        "page_size": st.sampled_from([1, 1, 16, 64]),
        "tp_size": st.sampled_from([1, 2, 4]),
        "pp_size": st.sampled_from([1, 1, 1, 2]),
        "dcp_size": st.sampled_from([1, 1, 1, 2]),
        "mamba_radix_cache_strategy": st.sampled_from(["extra_buffer", "extra_buffer_lazy", "no_buffer"]),
        "disable_overlap_schedule": st.booleans(),
        "disable_radix_cache": st.sampled_from([False, False, True]),
        "speculative_num_draft_tokens": st.integers(1, 8),
        "skip_decode_lock": st.booleans(),
        "mamba_conv_dtype": st.sampled_from(["float32", "bfloat16"]),
    }
    for name, values in optional.items():
        if draw(st.integers(0, 2)) == 0:
            found[name] = draw(values)
    if draw(st.integers(0, 3)) == 0:
        found |= {"enable_dp_attention": True, "dp_size": draw(st.sampled_from([2, 4])), "tp_size": 4}
    return found


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload(
        running=draw(st.integers(1, 8) | st.integers(1, 500)),
        tokens_per_request=draw(st.integers(1, 100) | st.integers(1, 40_000)),
        idle_sessions=draw(st.sampled_from([0, 0, 1, 7, 300])),
        checkpoints_per_session=draw(st.sampled_from([1, 1, 3])),
    )


@st.composite
def cases(draw: st.DrawFn, *, served: bool = False) -> Case:
    rules: EngineRules = draw(st.sampled_from([SGLANG, SGLANG, SGLANG_UNPADDED, TWINPOOL]))
    pre = draw(st.integers(64 * MIB, 4 * GIB) | st.integers(4 * GIB, 180 * GIB))
    where = machine(draw(st.integers(pre // 4, pre)), pre_load_bytes=pre)
    try:
        sizing = plan(draw(models()), where, rules=rules, **draw(flags()))
    except TwinpoolError:
        assume(False)
        raise
    assume(sizing.ledger is not None or not served)
    return Case(sizing, draw(workloads()))


@SOME
@given(case=cases(served=True))
def test_lines_add_up_to_the_whole(case: Case) -> None:
    ledger = case.sizing.ledger
    assert ledger is not None
    assert sum(line.bytes for line in ledger.lines if not line.part_of) == ledger.whole_bytes
    assert all(line.bytes >= 0 for line in ledger.lines)


@SOME
@given(case=cases())
def test_the_most_that_fits_fits_and_one_more_does_not(case: Case) -> None:
    work, sizing = case.workload, case.sizing
    for field, most, limit in (
        ("running", inverse.most_running(work, sizing), inverse.CEILING),
        ("idle_sessions", inverse.most_idle(work, sizing), inverse.CEILING),
        ("tokens_per_request", inverse.longest_context(work, sizing), sizing.resolved.context_len),
    ):
        if field == "idle_sessions" and not sizing.request.radix_cache:
            assert most == 0
            continue
        if most:
            assert holds_when_pinned(replace(work, **{field: most}), sizing)
        if most < limit:
            assert inverse.pin_for(replace(work, **{field: most + 1}), sizing) is None


def holds_when_pinned(workload: Workload, sizing: Sizing) -> bool:
    """The pin that the inverse gives, sized forward with the flags that stand for it."""
    pin = inverse.pin_for(workload, sizing)
    assert pin is not None
    tried = changed(
        sizing, max_mamba_cache_size=pin.slots, max_running_requests=asked_running(workload, sizing),
        mem_fraction_static=sizing.resolved.mem_fraction_static, mamba_full_memory_ratio=None,
    )  # fmt: skip
    assert tried.ledger is not None, tried.refusal
    assert tried.ledger.max_mamba_cache_size * tried.request.dp == pin.slots
    if tried.request.kv_bytes_per_token:
        assert tried.ledger.logical_tokens == pin.tokens
    found = fit(workload, tried)
    idle = workload.idle_sessions if tried.request.radix_cache else 0
    return found.holds and found.running >= workload.running and found.idle >= idle


@SOME
@given(case=cases())
def test_a_pin_without_room_is_refused_or_does_not_hold(case: Case) -> None:
    work, sizing = case.workload, case.sizing
    assume(inverse.pin_for(work, sizing) is None)
    slots = slots_needed(work, sizing) * sizing.request.dp
    tried = changed(
        sizing, max_mamba_cache_size=slots, max_running_requests=asked_running(work, sizing),
        mem_fraction_static=sizing.resolved.mem_fraction_static,
    )  # fmt: skip
    if tried.ledger is not None:
        found = fit(work, tried)
        assert not found.holds or found.running < work.running


@SOME
@given(case=cases(), slots=st.integers(1, 3000))
def test_the_smallest_ratio_gives_the_slots_and_a_thousandth_less_does_not(case: Case, slots: int) -> None:
    sizing = case.sizing
    ratio = inverse.ratio_for_slots(sizing, slots)
    if ratio is None:
        assert (
            one_slot_a_request(replace(sizing.request, max_mamba_cache_size=None)) or slots_at(sizing, 10_000.0) < slots
        )
        return
    assert slots_at(sizing, ratio) >= slots
    if ratio > 0.001:
        assert slots_at(sizing, round(ratio - 0.001, 3)) < slots


def slots_at(sizing: Sizing, ratio: float) -> int:
    request = replace(sizing.request, max_mamba_cache_size=None, ratio=ratio)
    return split(request).slots


@SOME
@given(case=cases(), more=st.integers(1, 4 * GIB))
def test_more_memory_never_hurts(case: Case, more: int) -> None:
    work, sizing = case.workload, case.sizing
    # A fraction that is not given follows the device, which may keep more for a larger one.
    fraction = sizing.resolved.mem_fraction_static
    base, larger = (
        size(sizing.model, where, changed(sizing, mem_fraction_static=fraction).flags, sizing.rules)
        for where in (sizing.machine, grown(sizing.machine, more))
    )
    for largest in (inverse.most_running, inverse.most_idle, inverse.longest_context):
        assert largest(work, larger) >= largest(work, base)
    if base.ledger is None:
        return
    assert larger.ledger is not None, larger.refusal
    assert larger.ledger.max_mamba_cache_size >= base.ledger.max_mamba_cache_size
    # One more slot, and its draft states, may take what one slot less had left over to KV (reference 1.3, case c).
    row = base.request.stage_slot_bytes * (1 + base.request.charged_drafts) + base.request.stage_extra_bytes
    given_up = 0 if base.request.max_mamba_cache_size is not None else row
    lost = (base.ledger.kv_tokens - larger.ledger.kv_tokens) * base.request.kv_bytes_per_token
    assert lost <= given_up + base.request.page_bytes * bool(given_up)


def grown(where: Machine, more: int) -> Machine:
    return replace(where, pre_load_bytes=where.pre_load_bytes + more, available_bytes=where.available_bytes + more)


@SOME
@given(case=cases())
def test_advice_makes_nothing_worse_and_keeps_its_promise(case: Case) -> None:
    work, sizing = case.workload, case.sizing
    advice = advise(work, sizing, machine_of=machine_of(sizing))
    held = sizing.ledger is not None and fit(work, sizing).holds and fit(work, sizing).running >= work.running
    assert not (held and advice.steps)
    assert advice.final.ledger is not None or sizing.ledger is None
    if advice.holds:
        found = fit(work, advice.final)
        assert found.holds
        assert found.running >= work.running
    else:
        assert inverse.pin_for(work, advice.final) is None
    for largest in (inverse.most_running, inverse.most_idle, inverse.longest_context):
        assert largest(work, advice.final) >= largest(work, sizing)
    check_promise(sizing, advice)


def check_promise(sizing: Sizing, advice: Advice) -> None:
    """The flags to paste, read back and sized, hold what the recommended split was made for."""
    line = read_launch(split_words(" ".join(launch_flags(sizing, advice))))
    assert line.unknown == line.not_modelled == line.no_effect == ()
    again = size(sizing.model, sizing.machine, line.deployment, sizing.rules)
    setting = advice.setting
    if setting is None:
        assert again.ledger == advice.final.ledger
        return
    assert again.ledger is not None, again.refusal
    assert again.ledger.max_mamba_cache_size * again.request.dp == setting.pin.slots
    assert fit(setting.workload, again).holds
    assert fit(setting.workload, again).running >= setting.workload.running


@SOME
@given(case=cases())
def test_an_outcome_can_always_be_told(case: Case) -> None:
    found = outcome(case.sizing, LaunchLine(), case.workload, machine_of=machine_of(case.sizing))
    assert (found.fit is None) == (case.sizing.ledger is None)


NUMBERS = st.integers(-2, 10**4).map(str) | st.sampled_from(["0", "1e3", "nan", "-1", "", "9" * 30, "0.0001", "1.0"])
ARGUMENTS = st.one_of(
    st.builds(
        lambda name, value: [name, value],
        st.sampled_from(
            ["--tp", "--pp-size", "--dp", "--dcp-size", "--mem-fraction-static", "--mamba-full-memory-ratio",
             "--max-mamba-cache-size", "--max-running-requests", "--max-total-tokens", "--page-size", "--context-length",
             "--chunked-prefill-size", "--speculative-num-draft-tokens", "--mamba-track-interval", "--running",
             "--tokens-per-request", "--idle-sessions", "--checkpoints-per-session", "--linear-replayssm-cache-len",
             "--post-weights-memory", "--pre-load-memory", "--weights", "--state-bytes-per-slot", "--kv-bytes-per-token"]
        ),
        NUMBERS,
    ),
    st.sampled_from([["--enable-dp-attention"], ["--disable-radix-cache"], ["--disable-overlap-schedule"],
                     ["--enable-linear-replayssm"], ["--engine", "twinpool"], ["--kv-cache-dtype", "fp4_e2m1"],
                     ["--mamba-radix-cache-strategy", "extra_buffer_lazy"], ["--device", "cpu"], ["--running", "4"],
                     ["--tokens-per-request", "3000"], ["--state-bytes-per-slot", "1MiB", "--kv-bytes-per-token", "4096"]]),
)  # fmt: skip


@SOME
@given(
    model=st.sampled_from([[model.name] for model in builtin_models()] + [[]]),
    gpu=st.sampled_from(["H100", "H200", "L4", "GB10", "CPU"]),
    arguments=st.lists(ARGUMENTS, max_size=6),
)
def test_no_command_raises_anything_but_an_expected_error(
    model: list[str], gpu: str, arguments: list[list[str]]
) -> None:
    argv = [*model, "--gpu", gpu, "--weights", "10GiB", *(word for words in arguments for word in words)]
    try:
        found = plan_of_command(read_command(argv, usage=""))
    except TwinpoolError:
        return
    assert found.sizing.ledger is not None or found.sizing.refusal

"""Properties of the division of memory, for random models, machines and flags (reference 1.3, 9.2 #1 to #7)."""

from __future__ import annotations

import re
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import assume, given

from twinpool.errors import MemoryRefusal
from twinpool.memory.budget import Ledger, MemoryRequest, plan_memory
from twinpool.memory.refusals import least_ratio, most_slots
from twinpool.memory.split import exact, slots_bytes_in_ratio
from twinpool.units import GIB, MIB

DECIMALS = st.integers(1, 4000).map(lambda thousandths: thousandths / 1000)


@st.composite
def requests(draw: st.DrawFn) -> MemoryRequest:
    pre = draw(st.integers(8 * MIB, 8 * GIB))
    drafts = draw(st.sampled_from([0, 0, 0, 1, 4]))
    running = draw(st.integers(1, 300)) if drafts else draw(st.none() | st.integers(1, 300))
    radix = draw(st.booleans())
    layers = draw(st.integers(1, 8))
    return MemoryRequest(
        pre_load_bytes=pre,
        available_bytes=draw(st.integers(0, pre)),
        mem_fraction_static=draw(st.integers(1, 1000)) / 1000,
        context_len=draw(st.integers(1, 10**6)),
        conv_bytes=draw(st.integers(0, MIB)),
        ssm_bytes=draw(st.integers(8, 4 * MIB)),
        kv_bytes_per_token=draw(st.integers(1, 65536)),
        slots_per_request=draw(st.sampled_from([3, 4, 5])) if radix else 1,
        page_size=draw(st.sampled_from([1, 16, 64])),
        ratio=draw(DECIMALS),
        max_mamba_cache_size=draw(st.none() | st.integers(1, 200)),
        max_running_requests=running,
        max_total_tokens=draw(st.none() | st.integers(1, 10**6)),
        radix_cache=radix,
        draft_tokens=drafts,
        reserve_draft_states=draw(st.booleans()),
        dp=draw(st.sampled_from([1, 1, 2, 8])),
        stage_share=(draw(st.integers(1, layers)), layers),
        extra_slot_bytes=draw(st.sampled_from([0, 0, 4096])),
        fixed_bytes=draw(st.sampled_from([0, 0, MIB])),
        multimodal_bytes=draw(st.sampled_from([0, 0, MIB])),
        activation_reserve_bytes=draw(st.sampled_from([0, 0, 16 * MIB])),
        charge_padding_slot=draw(st.booleans()),
    )


@st.composite
def roomy(draw: st.DrawFn) -> MemoryRequest:
    """Requests that nearly always fit: most of a large machine is free, states and tokens are small."""
    request = draw(requests())
    pre = draw(st.integers(GIB, 8 * GIB))
    return replace(
        request,
        pre_load_bytes=pre,
        available_bytes=draw(st.integers(pre * 3 // 4, pre)),
        mem_fraction_static=draw(st.integers(600, 1000)) / 1000,
        ratio=draw(st.integers(100, 4000)) / 1000,
        conv_bytes=draw(st.integers(0, 16384)),
        ssm_bytes=draw(st.integers(8, 262144)),
        kv_bytes_per_token=draw(st.integers(1, 4096)),
        max_mamba_cache_size=draw(st.none() | st.integers(40, 400)),
        max_total_tokens=draw(st.none() | st.integers(64, 10**6)),
    )


def planned(request: MemoryRequest) -> Ledger | None:
    try:
        return plan_memory(request)
    except MemoryRefusal:
        return None


def plan_or_skip(request: MemoryRequest) -> Ledger:
    ledger = planned(request)
    assume(ledger is not None)
    assert ledger is not None
    return ledger


@given(roomy())
def test_lines_add_up_to_the_whole(request_) -> None:
    ledger = plan_or_skip(request_)
    assert sum(line.bytes for line in ledger.lines if not line.part_of) == ledger.whole_bytes
    assert all(line.bytes >= 0 for line in ledger.lines)
    names = [line.name for line in ledger.lines]
    assert len(names) == len(set(names))
    assert {line.part_of for line in ledger.lines} <= {"", *names}


@given(roomy(), st.integers(0, GIB))
def test_more_memory_never_lowers_capacity(request_, more) -> None:
    """Of slots, requests and (unless both pools compete for it by the slot) tokens."""
    ledger = plan_or_skip(request_)
    larger = plan_memory(
        replace(
            request_,
            available_bytes=request_.available_bytes + more,
            pre_load_bytes=request_.pre_load_bytes + more,
        )
    )
    assert larger.max_mamba_cache_size >= ledger.max_mamba_cache_size
    assert larger.max_running_requests >= ledger.max_running_requests
    steps = 0
    if request_.max_mamba_cache_size is None:
        # Another slot, with its draft scratch, may take what rounding had left to KV.
        steps = (request_.stage_slot_bytes * (1 + request_.charged_drafts) + request_.stage_extra_bytes) // max(
            1, request_.kv_bytes_per_token
        ) + request_.page_size
    assert larger.kv_tokens >= ledger.kv_tokens - steps


@given(roomy())
def test_the_ratio_is_used_up_to_one_slot(request_) -> None:  # 9.2 #7
    request_ = replace(
        request_,
        draft_tokens=0, max_mamba_cache_size=None, radix_cache=True, charge_padding_slot=True, extra_slot_bytes=0,
        fixed_bytes=0,
    )  # fmt: skip
    ledger = plan_or_skip(request_)
    share = ledger.budget_bytes * exact(request_.ratio) / (1 + exact(request_.ratio))
    slots = ledger.max_mamba_cache_size
    assert (slots + 1) * ledger.slot_bytes <= share < (slots + 2) * ledger.slot_bytes


@given(roomy())
def test_a_pin_leaves_the_rest_to_kv(request_) -> None:  # 9.2 #1
    request_ = replace(
        request_, max_mamba_cache_size=40 * request_.dp, max_total_tokens=None, charge_padding_slot=True,
        extra_slot_bytes=0, fixed_bytes=0, draft_tokens=4, reserve_draft_states=True, max_running_requests=32,
    )  # fmt: skip
    ledger = plan_or_skip(request_)
    slot, per_request = ledger.slot_bytes, request_.slots_per_request
    rows = min(max(1, 32 // request_.dp), 40 // per_request) + 1
    kv = ledger.budget_bytes - 41 * slot - rows * 4 * slot
    assert ledger.kv_tokens == kv // request_.page_bytes * request_.page_size


@given(roomy())
def test_workers_share_pin_and_requests(request_) -> None:  # 9.2 #4
    request_ = replace(request_, max_mamba_cache_size=240, max_running_requests=48)
    ledger = plan_or_skip(request_)
    assert ledger.max_mamba_cache_size == 240 // request_.dp
    assert ledger.max_running_requests <= max(1, 48 // request_.dp)
    alone = replace(
        request_, dp=1, max_mamba_cache_size=240 // request_.dp, max_running_requests=max(1, 48 // request_.dp)
    )
    assert plan_memory(alone).kv_tokens == ledger.kv_tokens


@given(roomy())
def test_running_requests_always_find_their_slots_and_tokens(request_) -> None:  # 9.2 #5
    ledger = plan_or_skip(request_)
    assert 1 <= ledger.max_running_requests <= ledger.max_mamba_cache_size // request_.slots_per_request
    assert ledger.max_running_requests <= ledger.kv_tokens // 2
    assert ledger.kv_tokens % request_.page_size == 0
    if request_.max_running_requests is not None:
        wanted = max(1, request_.max_running_requests // request_.dp)
        lowered = [text for text in ledger.warnings if text.startswith("max_running_requests")]
        assert len(lowered) == (ledger.max_running_requests < wanted)


@given(roomy())
def test_a_larger_stage_never_gets_more_slots(request_) -> None:  # 9.2 #3
    request_ = replace(request_, stage_share=(1, 4), max_mamba_cache_size=None)
    half = plan_or_skip(replace(request_, stage_share=(1, 2)))
    assert plan_memory(request_).max_mamba_cache_size >= half.max_mamba_cache_size


@given(requests() | roomy())
def test_the_advice_of_a_refusal_works(request_) -> None:
    """Every number a refusal names is taken, and the next smaller or larger one is refused."""
    try:
        plan_memory(request_)
    except MemoryRefusal as error:
        text = str(error)
    else:
        assume(False)
        return
    if found := re.search(r"--mamba-full-memory-ratio from \S+ to (\S+)\.$", text):
        assert planned(replace(request_, ratio=float(found[1]))) is not None
        below = round(float(found[1]) - 0.001, 3)
        if below > 0:
            assert planned(replace(request_, ratio=below)) is None
    elif found := re.search(r"at most (--\S+) (\d+) fits\.$", text):
        name, limit = found[1].removeprefix("--").replace("-", "_"), int(found[2])
        assert planned(replace(request_, **{name: limit})) is not None
        assert planned(replace(request_, **{name: limit + request_.dp})) is None
    elif found := re.search(r"use --mem-fraction-static (\S+) or more(?: with (--\S+) (\d+))?\.$", text):
        changed = replace(request_, mem_fraction_static=float(found[1]))
        if found[2]:
            changed = replace(changed, **{found[2].removeprefix("--").replace("-", "_"): int(found[3])})
        assert planned(changed) is not None
    elif found := re.search(r"one request needs \d+; use at least (\d+)\.$", text):
        assert planned(replace(request_, max_mamba_cache_size=int(found[1]))) is not None
    else:
        assert "no --mem-fraction-static leaves that much" in text or "--max-total-tokens" in text


@given(requests(), st.integers(1, 50))
def test_the_inverse_of_the_ratio(request_, slots) -> None:
    """More slots need a larger share, and the least ratio gives the slots of one request."""
    request_ = replace(
        request_, max_mamba_cache_size=None, radix_cache=True, slots_per_request=3, max_total_tokens=None
    )
    needed = slots_bytes_in_ratio(request_, slots)
    assert slots_bytes_in_ratio(request_, slots + 1) > needed
    ratio = least_ratio(request_)
    if ratio is not None:
        assert plan_memory(replace(request_, ratio=ratio)).max_mamba_cache_size >= 3


@given(requests())
def test_the_most_slots_are_the_most(request_) -> None:
    request_ = replace(request_, radix_cache=True, slots_per_request=3, max_total_tokens=None, dp=1)
    most = most_slots(request_)
    if most >= 3:
        assert planned(replace(request_, max_mamba_cache_size=most)) is not None
        assert planned(replace(request_, max_mamba_cache_size=most + 1)) is None

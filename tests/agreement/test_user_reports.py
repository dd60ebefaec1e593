"""What users reported about running hybrid models (leaks, wrong output, retraction), as nearly as this engine can be brought to it.

The truth is what each prompt says by itself without any cache, log-probabilities bit by bit. docs/user-reports.md has all reports.
"""

from __future__ import annotations

import pytest

from tests.agreement.llm_runs import Said, checkpoint, conversation, greedy, prompt, say, say_alone, tiny_llm
from twinpool import LLM
from twinpool.config.flags import parse_serve
from twinpool.engine.core import StepReport
from twinpool.errors import ConfigError
from twinpool.request import Request
from twinpool.sched.book import Retraction

FOLDER = checkpoint("qwen3_5")
TURN = greedy(12)


def said(llm: LLM, prompts: list[list[int]]) -> tuple[Said, int]:
    """What prompts say in one batch, and the tokens that came from the cache."""
    done = llm.generate(prompts, TURN)
    return [(one.token_ids, tuple(p.logprob for p in one.logprobs)) for one in done], sum(
        one.cached_tokens for one in done
    )


class Steps:
    """Counts the steps that decode for some requests and read prompts of others."""

    def __init__(self) -> None:
        self.mixed = 0

    def on_step(self, report: StepReport) -> None:
        self.mixed += 0 < report.plan.n_decode_rows < len(report.plan.rows)

    def on_finish(self, request: Request) -> None:
        pass

    def on_retraction(self, retraction: Retraction) -> None:
        pass


def run_checked(llm: LLM) -> None:
    """Run all there is, with every page and slot accounted for after each step."""
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.scheduler.check()


@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy", "no_buffer"])
def test_twenty_at_once_leak_nothing(strategy: str) -> None:
    """sglang#20010: Qwen3.5, 20 concurrent requests: "memory leak detected" and the end."""
    prompts = [prompt(i, 20 + 11 * i) for i in range(20)]
    overlap = {"disable_overlap_schedule": strategy == "no_buffer"}
    with tiny_llm(FOLDER, mamba_radix_cache_strategy=strategy, max_running_requests=20, **overlap) as llm:
        for ids in prompts:
            llm.engine.add(ids, TURN)
        run_checked(llm)
        slots = llm.engine.snapshot().slots
        assert slots.free + slots.evictable == slots.total == 40


def test_a_request_that_cannot_be_scheduled_keeps_no_slot() -> None:
    """sglang#16067: the slot leaked when a request got its state and then no KV (454 = 315 + 138 + 1, leaked {191})."""
    prompts = [prompt(i, 120) for i in range(6)]
    with tiny_llm(FOLDER, max_total_tokens=200, max_mamba_cache_size=30) as llm:
        requests = [llm.engine.add(ids, TURN)[0] for ids in prompts]
        llm.engine.step()
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.n_running == 1, "KV lets one in, states would let six"
        assert llm.engine.scheduler.counts()[1].free >= 25
        assert llm.engine.abort(requests[3].rid), "one that waits and goes away"
        run_checked(llm)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_separate_prefill_and_decode_servers_are_refused(mode: str) -> None:
    """sglang#12432: the leak check was wrong in PD. There is none here: the flag is refused by name."""
    with pytest.raises(ConfigError, match="--disaggregation-mode"):
        parse_serve(["--disaggregation-mode", mode])


@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy", "no_buffer"])
def test_prompts_read_beside_decoding_ones_leave_right_checkpoints(strategy: str) -> None:
    """sglang#39342: batches of decode rows and prefill chunks donated checkpoints that nobody had written; 10% of answers differed."""
    short, long = [prompt(i, 9) for i in range(4)], [prompt(20 + i, 150 + 37 * i) for i in range(4)]
    turn = greedy(40)
    longer = [[*ids, 1, 2, 3] for ids in long]
    expected = say_alone(FOLDER, longer, TURN)
    options = {
        "chunked_prefill_size": 64,
        "mamba_track_interval": 64,
        "disable_overlap_schedule": strategy == "no_buffer",
    }
    with tiny_llm(FOLDER, mamba_radix_cache_strategy=strategy, **options) as llm:
        for ids in short:
            llm.engine.add(ids, turn)
        steps = Steps()
        llm.engine.observers.append(steps)
        while llm.engine.has_work:
            llm.engine.step()
            if long:
                llm.engine.add(long.pop(), turn)
        assert steps.mixed >= 4
        again, cached = said(llm, longer)
        assert again == expected
        assert cached >= 4 * 128


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_cold_device_and_host_hits_are_right_twenty_times(policy: str) -> None:
    """sglang#39830: hits from the host were wrong 20 of 20 times, cold runs and hits on the device right."""
    host = {"enable_hierarchical_cache": True, "hicache_size": 0.02, "hicache_write_policy": policy}
    prompts, (expected,) = [conversation(10)[1]], [say_alone(FOLDER, [conversation(10)[1]], TURN)]
    with tiny_llm(FOLDER, chunked_prefill_size=64, **host) as llm:
        assert said(llm, prompts) == (expected, 0)
        for _ in range(20):
            llm.engine.scheduler.book.tree.evict(pages=10**6, slots=10**6)
            (done,) = llm.generate(prompts, TURN)
            assert done.reuse.from_host == done.cached_tokens >= 192
            assert [(done.token_ids, tuple(p.logprob for p in done.logprobs))] == expected
            again, on_device = said(llm, prompts)
            assert (again, on_device >= 192) == (expected, True)


def test_hits_side_by_side_do_not_write_into_the_checkpoint_they_share() -> None:
    """FreeToken#287: about 10% of hits in one batch were wrong, as the slot of the checkpoint was handed to one of them."""
    base = prompt(10, 192)
    prompts = [[*base, *prompt(30 + i, 5 + i)] for i in range(6)]
    expected = say_alone(FOLDER, prompts, TURN)
    with tiny_llm(FOLDER, chunked_prefill_size=64) as llm:
        llm.generate([[*base, 7]], greedy(1))
        for _ in range(3):
            again, cached = said(llm, prompts)
            assert again == expected
            assert cached >= 6 * 192


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--speculative-algorithm", "NGRAM"], "--speculative-algorithm"),
        (["--speculative-algorithm", "EAGLE3"], "--speculative-algorithm"),
        (["--enable-unified-memory"], "--enable-unified-memory"),
    ],
)
def test_drafts_and_one_pool_for_both_are_refused(flags: list[str], name: str) -> None:
    """vllm#53912, #53505, #39273: drafts spoiled states behind prefix hits; sglang#34441, #33773, #32786, #35154, #38836, #39294,
    #39982, #40367: an arena for both pools starved or failed at boot. Neither is here: the flags are refused by name."""
    with pytest.raises(ConfigError, match=name):
        parse_serve(flags)


def test_states_that_run_out_beside_empty_kv_are_waited_for() -> None:
    """sglang#34441: an assertion failed for want of a state at usage 0.35. Here requests wait, and all of them end."""
    prompts = [prompt(i, 20) for i in range(12)]
    with tiny_llm(FOLDER, max_mamba_cache_size=6, max_total_tokens=4096) as llm:
        for ids in prompts:
            llm.engine.add(ids, TURN)
        llm.engine.step()
        pages, slots = llm.engine.scheduler.counts()
        assert pages.held + pages.evictable + pages.protected < 0.35 * pages.total
        assert llm.engine.scheduler.n_running == 1 < slots.total
        run_checked(llm)
        assert say(llm, prompts[-2:], TURN) == say_alone(FOLDER, prompts[-2:], TURN)

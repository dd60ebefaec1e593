"""The offline door: texts, chats, copies, reuse reports, and refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.agreement.llm_runs import checkpoint, greedy, prompt, tiny_llm
from tests.tiny_models import EOS
from twinpool import LLM, SamplingParams
from twinpool.errors import BadRequest, ConfigError, ModelError


def test_a_conversation_of_ten_turns_reads_only_what_is_new() -> None:
    with tiny_llm(checkpoint("qwen3_5")) as llm:
        ids: list[int] = []
        computed = 0
        for turn in range(10):
            ids += prompt(turn, 15)
            (answer,) = llm.generate([ids], greedy(10))
            assert answer.cached_tokens == computed
            ids += answer.token_ids
            # The last token was sampled and, at max_tokens, never fed back: all else is kept (page size 1).
            computed = len(ids) - 1


def test_an_answer_that_stops_is_kept_whole() -> None:
    with tiny_llm(checkpoint("qwen3_5")) as llm:
        (free,) = llm.generate([prompt(8, 40)], greedy(12))
        stop = free.token_ids[9]
        (answer,) = llm.generate([prompt(8, 40)], greedy(30, stop_token_ids=(stop,)))
        ids = [*prompt(8, 40), *answer.token_ids]
        # Overlap computed the state after the stop token, and the next turn starts with it.
        assert llm.generate([[*ids, 1, 2, 3]], greedy(1))[0].cached_tokens == len(ids)


def test_a_chat_is_rendered_with_the_template() -> None:
    with tiny_llm(checkpoint("qwen3_5")) as llm:
        messages = [{"role": "user", "content": "Hello"}]
        rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        ids = llm.engine.tokenizer.encode(rendered, special_tokens=False)
        (chat, again) = llm.chat([messages, messages], greedy(4))
        assert chat.prompt_tokens == len(ids)
        assert chat.token_ids == again.token_ids == llm.generate([ids], greedy(4))[0].token_ids


def test_the_demo_model_speaks() -> None:
    with LLM(device_memory="256MiB") as llm:
        (done,) = llm.generate("It was a fine morning when the captain", SamplingParams(max_tokens=24, temperature=0.0))
        assert len(done.text.split()) > 8
        assert done.prompt_tokens == len(llm.engine.tokenizer.encode("It was a fine morning when the captain"))
        assert dict(done.reuse.gaps) == {"new": done.prompt_tokens}


def test_text_stops_and_token_stops() -> None:
    with tiny_llm(checkpoint("qwen3_5")) as llm:
        (whole,) = llm.generate([prompt(3, 20)], greedy(30))
        third = whole.token_ids[2]
        (by_token,) = llm.generate([prompt(3, 20)], greedy(30, stop_token_ids=(third,)))
        first = whole.token_ids.index(third)
        assert by_token.token_ids == whole.token_ids[: first + 1]
        assert (by_token.finish_reason, by_token.stop_reason) == ("stop", third)
        assert by_token.text == llm.engine.tokenizer.decode(whole.token_ids[:first])
        stop = next(c for c in whole.text[4:] if c.isprintable() and c != "\ufffd")
        (by_text,) = llm.generate([prompt(3, 20)], greedy(30, stop=(stop,)))
        assert by_text.text == whole.text[: whole.text.find(stop)]
        assert by_text.stop_reason == stop


def test_end_token_and_min_tokens() -> None:
    with tiny_llm(checkpoint("qwen3_5")) as llm:
        bias = ((EOS, 1000.0),)
        (at_once,) = llm.generate([prompt(3, 9)], SamplingParams(temperature=0.0, logit_bias=bias))
        assert (at_once.token_ids, at_once.text, at_once.finish_reason) == ((EOS,), "", "stop")
        (late,) = llm.generate([prompt(3, 9)], SamplingParams(temperature=0.0, logit_bias=bias, min_tokens=4))
        assert len(late.token_ids) == 5
        (never,) = llm.generate([prompt(3, 9)], greedy(6, logit_bias=bias))
        assert never.token_ids == (EOS,) * 6
        assert never.finish_reason == "length"


def test_copies_differ_and_repeat() -> None:
    params = SamplingParams(n=3, max_tokens=8, seed=4, ignore_eos=True)
    with tiny_llm(checkpoint("qwen3_5")) as llm:
        first = llm.generate([prompt(1, 70)], params)
        again = llm.generate([prompt(1, 70)], params)
    assert len({c.token_ids for c in first}) == 3
    assert [c.token_ids for c in first] == [c.token_ids for c in again]


def test_unseeded_requests_follow_the_random_seed_flag() -> None:
    def say(seed: int) -> list[tuple[int, ...]]:
        with tiny_llm(checkpoint("qwen3_5"), random_seed=seed) as llm:
            return [c.token_ids for c in llm.generate([prompt(1, 5)] * 2, SamplingParams(max_tokens=8))]

    assert say(1) == say(1)
    assert say(1) != say(2)
    assert len(set(say(1))) == 2


def test_refusals() -> None:
    folder = checkpoint("qwen3_5")
    with pytest.raises(ConfigError, match="page_sise is not a flag of twinpool; did you mean page_size"):
        LLM(str(folder), page_sise=4)
    with pytest.raises(ModelError, match="/no/such/folder"):
        LLM("/no/such/folder")
    with tiny_llm(folder) as llm:
        with pytest.raises(BadRequest, match="context is 1024 tokens"):
            llm.generate([[1, 2], prompt(1, 1030)], greedy(3))
        assert len(llm.generate([[1, 2]], greedy(3))) == 1
        with pytest.raises(BadRequest, match="2 sampling_params for 1 prompts"):
            llm.generate([[1]], [greedy(1), greedy(1)])


def test_importing_the_package_is_light() -> None:
    code = "import sys, twinpool; twinpool.SamplingParams, twinpool.ServeOptions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

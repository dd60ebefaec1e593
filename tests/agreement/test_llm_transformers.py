"""Greedy tokens of the whole engine equal those of unmodified transformers, for every adopted family."""

from __future__ import annotations

import pytest
import torch

from tests.agreement.llm_runs import checkpoint, greedy, prompt, say, tiny_llm
from tests.tiny_models import FAMILIES, load_reference, reference_logits

LENGTHS = (1, 3, 63, 64, 65, 130)
N_TOKENS = 12


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_transformers(family: str) -> None:
    folder = checkpoint(family)
    prompts = [prompt(length, length) for length in LENGTHS]
    with tiny_llm(folder, chunked_prefill_size=100) as llm:
        said = say(llm, prompts, greedy(N_TOKENS))
    reference = load_reference(folder)
    for ids, (tokens, logprobs) in zip(prompts, said, strict=True):
        # One uncut pass over prompt and answer: each token must be what transformers finds most likely there.
        logits = reference_logits(reference, [*ids, *tokens])[len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(tokens)
        expected = torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(tokens)[:, None]).flatten()
        assert torch.allclose(torch.tensor(logprobs, dtype=torch.float64), expected, atol=2e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_stay_close_to_their_float32_form(dtype: str) -> None:
    folder = checkpoint("qwen3_5", dtype=dtype)
    ids = prompt(5, 70)
    with tiny_llm(folder) as llm:
        assert llm.engine.facts.resolved.dtype == dtype
        ((tokens, logprobs),) = say(llm, [ids], greedy(8))
    logits = reference_logits(load_reference(folder), [*ids, *tokens])[len(ids) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(tokens)[:, None]).flatten()
    assert torch.allclose(torch.tensor(logprobs, dtype=torch.float64), expected, atol=0.25)

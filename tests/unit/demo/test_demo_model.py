"""The model that ships in the package: small enough, documented, trained, and able to continue English."""

from __future__ import annotations

import csv
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

import twinpool

DEMO = Path(twinpool.__file__).parent / "demo"
WORDS = frozenset((Path(__file__).parent / "words.txt").read_text().split())
PROMPTS = (
    "It was a fine morning when the captain",
    "And it came to pass in those days, that",
    "She was not happy, but",
)
# Written for this test, so in no training text: plain sentences with ordinary words.
UNSEEN = "The old man walked slowly to the house, and his daughter came out to meet him at the door."


def word_share(text: str) -> float:
    """Share of the words of `text` among the 4,000 most frequent words of the training text."""
    words = re.findall(r"[a-z]+", text.lower())
    return sum(w in WORDS for w in words) / max(len(words), 1)


@lru_cache(maxsize=1)
def loaded():
    """The shipped files through transformers' own classes, in float32 (no engine of this package takes part)."""
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(DEMO)


def continuation(prompt: str, tokens: int) -> str:
    model, tokenizer = loaded()
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None)
    return tokenizer.decode(ids[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def recorded(name: str) -> float:
    """A number of the card's table of measurements."""
    match = re.search(rf"\| {re.escape(name)}[^|]*\| ([\d.,]+)", (DEMO / "MODEL_CARD.md").read_text())
    assert match, name
    return float(match[1].replace(",", ""))


def test_the_shipped_files_are_at_most_12_megabytes():
    assert sum(p.stat().st_size for p in DEMO.iterdir()) <= 12_000_000


def test_the_card_names_every_source_with_version_and_licence():
    card = (DEMO / "MODEL_CARD.md").read_text()
    for package in ("r-cran-janeaustenr", "r-cran-tokenizers", "bible-kjv-text"):
        assert re.search(rf"\| `{package}` \d\S* \| [^|]+ \| text: public domain[^|]* \|", card), package


def test_the_loss_curve_falls_on_text_outside_the_training_split():
    with open(DEMO / "loss_curve.csv") as f:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)]
    assert len(rows) >= 10
    assert [r["step"] for r in rows] == sorted({r["step"] for r in rows})
    for column in ("train_loss", "dev_loss"):
        third = len(rows) // 3
        first, middle, last = (
            sum(r[column] for r in part) / len(part)
            for part in (rows[:third], rows[third : -third or None], rows[-third:])
        )
        assert first > middle > last, column


def test_the_held_out_loss_is_clearly_below_a_bigram_model():
    assert recorded("held-out loss, nats per token") < 0.9 * recorded("bigram held-out loss")


def test_the_shipped_weights_predict_unseen_english_about_as_well_as_the_card_says():
    model, tokenizer = loaded()
    ids = tokenizer(UNSEEN, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < recorded("held-out loss, nats per token") + 1.0


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_greedy_continuation_is_made_of_english_words(prompt):
    text = continuation(prompt, 40)
    assert len(text.split()) >= 15
    assert word_share(text) >= 0.8


def test_the_word_measure_rejects_what_is_not_english():
    _, tokenizer = loaded()
    ids = torch.randint(3, len(tokenizer), (200,), generator=torch.Generator().manual_seed(0))
    assert word_share(tokenizer.decode(ids)) < 0.6
    assert word_share(UNSEEN) >= 0.9


def test_the_chat_template_writes_the_turns_the_model_was_trained_on():
    _, tokenizer = loaded()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Go on."}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == 2

"""Text in and out: the stream equals the whole, and a stop string is found at the same place however the stream is
cut.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import twinpool
from twinpool.engine.text import IncrementalDecoder, StopFinder, StreamDecoder, Tokenizer, flatten_content
from twinpool.errors import BadRequest, ModelError

DEMO = Path(twinpool.__file__).parent / "demo"


@cache
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


@cache
def metaspace() -> Tokenizer:
    """A tokenizer whose decoder strips the first space and joins bytes of characters it does not know."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁a", "▁new", "b", "▁", "c▁d", *(f"<0x{i:02X}>" for i in range(256))]
    raw = Raw(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="b"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), eos_token_ids=frozenset())


@given(tokens=st.lists(st.integers(0, 3071), max_size=60), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_streamed_pieces_joined_are_the_whole(tokens: list[int], skip: bool) -> None:
    decoder = IncrementalDecoder(demo(), skip_special_tokens=skip)
    text = "".join(decoder.push(token) for token in tokens) + decoder.flush()
    assert text == demo().decode(tokens, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_characters_of_several_bytes_come_whole(text: str) -> None:
    decoder = IncrementalDecoder(demo())
    pieces = [decoder.push(token) for token in demo().encode(text)]
    assert "".join(pieces) + decoder.flush() == demo().decode(demo().encode(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(tokens=st.lists(st.integers(0, 4), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_spaces_that_hang_on_neighbours_come_out_right(tokens: list[int]) -> None:
    decoder = IncrementalDecoder(metaspace())
    assert "".join(decoder.push(t) for t in tokens) + decoder.flush() == metaspace().decode(tokens)


def test_byte_tokens_become_one_character() -> None:
    ids = [5 + byte for byte in "né".encode()]
    decoder = IncrementalDecoder(metaspace())
    assert [decoder.push(i) for i in ids] == ["n", "", "é"]


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_a_stop_string_is_found_at_the_same_place_whatever_the_cuts(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    finder = StopFinder(stops)
    pieces = [finder.push(text[a:b]) for a, b in itertools.pairwise(edges)]
    out = "".join(pieces) + finder.flush()
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if ends:
        _, at, stop = min(ends)
        assert (out, finder.matched) == (text[:at], stop)
    else:
        assert (out, finder.matched) == (text, None)


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert finder.push("hello") == "hello"
    assert finder.push("\n") == ""
    assert finder.push("x") == "\nx"


def test_a_stop_string_across_token_borders_ends_the_stream() -> None:
    tokenizer = demo()
    decoder = StreamDecoder(tokenizer, stop=("house, and",))
    ids = tokenizer.encode("He came to the house, and went home.")
    assert len(tokenizer.encode("house, and")) > 1
    assert "".join(decoder.push([i]) for i in ids) + decoder.flush() == "He came to the "
    assert decoder.stopped == "house, and"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    tokenizer = demo()
    ids = tokenizer.encode("a b a b")
    late = StreamDecoder(tokenizer, stop=("b",), min_tokens=len(ids))
    assert late.push(ids) == "a b a "
    assert late.stopped == "b"


def test_the_chat_template_is_rendered_and_encoded() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}]
    text = demo().render_chat(messages)
    assert "Hello\nthere" in text
    assert demo().decode(demo().encode_chat(messages), skip_special_tokens=False) == text


def test_wrong_messages_are_refused_with_a_sentence() -> None:
    with pytest.raises(BadRequest, match="a content part has type 'image_url': this model reads text only"):
        flatten_content([{"type": "image_url", "image_url": {}}])
    with pytest.raises(BadRequest, match="a message's content is int"):
        flatten_content(3)
    with pytest.raises(BadRequest, match="the conversation is empty"):
        demo().render_chat([])
    with pytest.raises(BadRequest, match="the chat template refuses these messages"):
        demo().render_chat([{"content": "no role"}], template_options={"tokenize": 3})
    with pytest.raises(BadRequest, match="no chat template"):
        metaspace().render_chat([{"role": "user", "content": "x"}])


def test_end_tokens_come_from_the_generation_config() -> None:
    assert demo().eos_token_ids == frozenset({0, 2})


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--tokenizer-path"):
        Tokenizer.load(tmp_path)

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.unit.storage.small import SMALL
from twinpool.storage.keys import ChainHash


def test_a_key_depends_on_every_token_before_it_and_on_nothing_after_it() -> None:
    tokens = list(range(200))
    hashes = ChainHash(SMALL, tokens)
    for end in (1, 63, 64, 65, 128, 200):
        assert ChainHash(SMALL, tokens[:end]).key(end) == hashes.key(end)
        for changed in {0, end // 2, end - 1}:
            other = [*tokens[:changed], 7777, *tokens[changed + 1 :]]
            assert ChainHash(SMALL, other).key(end) != hashes.key(end)
    assert len({hashes.key(end) for end in range(201)}) == 201


def test_growing_in_pieces_gives_the_same_keys() -> None:
    whole, grown = ChainHash(SMALL, range(300)), ChainHash(SMALL)
    for start, end in ((0, 10), (10, 64), (64, 64), (64, 200), (200, 300)):
        grown.extend(np.arange(start, end, dtype=np.int32))
    assert len(grown) == len(whole) == 300
    assert [grown.key(end) for end in range(301)] == [whole.key(end) for end in range(301)]


def test_an_info_names_its_prefixes() -> None:
    hashes = ChainHash(SMALL, range(300))
    info = hashes.info(100, 200)
    assert (info.start, info.end) == (100, 200)
    assert (info.key, info.parent_key, info.grid_key) == (hashes.key(200), hashes.key(100), hashes.key(192))
    assert hashes.info(0, 64).parent_key == SMALL.digest


@pytest.mark.parametrize(("start", "end"), [(0, 0), (8, 4), (-4, 4), (0, 304)])
def test_a_segment_lies_within_the_tokens(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"segment cannot be|there are 300 tokens, and the key of {end}"):
        ChainHash(SMALL, range(300)).info(start, end)


@pytest.mark.parametrize("name", [field.name for field in fields(SMALL)])
def test_every_field_of_a_fingerprint_changes_every_key(name: str) -> None:
    value = getattr(SMALL, name)
    other = replace(SMALL, **{name: value + 1 if isinstance(value, int) else f"{value}2"})
    a, b = ChainHash(SMALL, range(130)), ChainHash(other, range(130))
    assert not {a.key(end) for end in range(131)} & {b.key(end) for end in range(131)}

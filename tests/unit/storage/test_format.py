import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.unit.storage.small import ONE_PAGE, SMALL, same, segment
from twinpool.storage.format import (
    Segment,
    check_segment,
    decode,
    encode,
    file_bytes,
    file_name,
    parse_name,
    smallest_file_bytes,
)
from twinpool.storage.keys import ChainHash, Fingerprint

INFO = ChainHash(SMALL, range(100)).info(64, 100)  # nine pages


def file_of(fingerprint: Fingerprint = SMALL) -> bytes:
    return b"".join(bytes(part) for part in encode(segment(INFO, fingerprint), fingerprint))


def test_a_name_says_what_a_file_is() -> None:
    assert parse_name(file_name(INFO)) == INFO
    assert file_name(INFO) == f"{INFO.key.hex()}-{INFO.parent_key.hex()}-{INFO.grid_key.hex()}-64-100.safetensors"


@pytest.mark.parametrize(
    "name", ["", "tmp1.part", "model.safetensors", f"{file_name(INFO)}.part", "x" + file_name(INFO)]
)
def test_other_files_are_not_segments(name: str) -> None:
    assert parse_name(name) is None


def test_a_segment_of_no_tokens_is_none() -> None:
    assert parse_name(file_name(INFO).replace("-64-100", "-100-100")) is None


def test_the_size_is_known_before_it_is_written() -> None:
    assert len(file_of()) == file_bytes(INFO, SMALL) == 4096 + 9 * 32 + 48 + 32
    assert smallest_file_bytes(SMALL) == file_bytes(ONE_PAGE, SMALL) == 4096 + 32 + 48 + 32


def test_a_file_is_read_back() -> None:
    assert same(decode(memoryview(file_of()), INFO, SMALL), INFO)


@pytest.mark.parametrize("page_bytes", [32, 0])
def test_other_tools_read_it(tmp_path: Path, page_bytes: int) -> None:
    fingerprint = replace(SMALL, page_bytes=page_bytes)
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of(fingerprint))
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {
            "fingerprint": fingerprint.digest.hex(), "start": "64", "end": "100",
            "key": INFO.key.hex(), "parent_key": INFO.parent_key.hex(),
        }  # fmt: skip
        assert file.get_tensor("pages").shape == (9, page_bytes)
        assert file.get_tensor("state").tobytes() == segment(INFO, fingerprint).state
        assert file.get_tensor("digest").tobytes() == hashlib.sha256(file_of(fingerprint)[:-32]).digest()


def test_a_flip_of_any_byte_is_seen() -> None:
    data = bytearray(file_of())
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        assert decode(memoryview(data), INFO, SMALL) is None, place
        data[place] ^= 1 << place % 8
    assert same(decode(memoryview(data), INFO, SMALL), INFO)


def test_a_file_cut_or_lengthened_anywhere_is_seen() -> None:
    data = file_of()
    for size in [0, 1, 7, 8, 4095, 4096, *range(4097, len(data))]:
        assert decode(memoryview(data[:size]), INFO, SMALL) is None
    assert decode(memoryview(data + b"\0"), INFO, SMALL) is None
    assert decode(memoryview(data[:4096] + bytes(len(data) - 4096)), INFO, SMALL) is None  # size without contents


def test_a_whole_file_of_something_else_is_seen() -> None:
    other_start = replace(INFO, start=60)
    other_model = replace(SMALL, model="another")
    assert decode(memoryview(file_of()), other_start, SMALL) is None
    assert decode(memoryview(file_of()), replace(INFO, parent_key=bytes(16)), SMALL) is None
    assert decode(memoryview(file_of(other_model)), INFO, SMALL) is None


def test_wrong_sizes_are_bugs() -> None:
    good = segment(INFO)
    check_segment(good, SMALL)
    for bad in (
        Segment(INFO, good.pages[:-1], good.state),
        Segment(INFO, good.pages, bytes(49)),
        Segment(replace(INFO, end=101), good.pages, good.state),
    ):
        with pytest.raises(AssertionError):
            check_segment(bad, SMALL)

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.storage.small import (
    FILE_BYTES,
    PLENTY_BYTES,
    SMALL,
    chain_infos,
    longest_end,
    put_chain,
    same,
    segment,
    store_at,
)
from twinpool.errors import ConfigError
from twinpool.storage import backoff, files
from twinpool.storage.format import file_name
from twinpool.storage.shelf import DiskStats

TOKENS = list(range(1000, 1400))


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_round_trip_and_restart(tmp_path: Path) -> None:
    store = store_at(tmp_path / "made" / "here")
    infos = put_chain(store, TOKENS, [64, 100, 300])
    for again in (store, store_at(store.path)):
        assert list(again.longest(again.hashes(TOKENS))) == infos
        assert list(again.longest(again.hashes(TOKENS), at_most_tokens=299)) == infos[:2]
        assert all(same(again.read(info), info) for info in infos)
        assert longest_end(again, [1, *TOKENS]) == 0
    assert store.stats == DiskStats(
        segments=3, used_bytes=sizes(store.path), limit_bytes=PLENTY_BYTES, written=3, written_tokens=300, read=3,
    )  # fmt: skip


def test_a_second_put_writes_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    (info,) = put_chain(store, TOKENS, [8])
    assert not store.put(segment(info))
    assert (store.stats.written, store.stats.already_there) == (1, 1)


def test_a_segment_without_its_parent_is_not_taken(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    assert not store.put(segment(store.hashes(TOKENS).info(8, 12)))
    assert (store.stats.no_parent, sizes(tmp_path)) == (1, 0)


@pytest.mark.parametrize(
    "changed",
    [{"model": "other"}, {"kv_dtype": "float16"}, {"ssm_dtype": "bfloat16"}, {"conv_dtype": "float32"}, {"layout": 2}],
)
def test_another_model_or_dtype_finds_nothing(tmp_path: Path, changed: dict[str, object]) -> None:
    put_chain(store_at(tmp_path), TOKENS, [64, 100])
    other = store_at(tmp_path, fingerprint=replace(SMALL, **changed))
    assert longest_end(other, TOKENS) == 0
    assert other.stats.segments == 2  # they count against its limit all the same


def test_a_file_under_a_false_name_is_not_served(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    info, wanted = chain_infos(store, TOKENS, [8])[0], chain_infos(store, TOKENS[1:], [8])[0]
    store.put(segment(info))
    (tmp_path / file_name(info)).rename(tmp_path / file_name(wanted))
    store.refresh()
    assert longest_end(store, TOKENS[1:]) == 8
    assert store.read(wanted) is None
    assert longest_end(store, TOKENS[1:]) == 0
    assert store.stats.damaged == 1


def test_a_damaged_file_goes_with_all_that_needs_it(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    infos = put_chain(store, TOKENS, [64, 100, 300])
    path = tmp_path / file_name(infos[1])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert store.read(infos[1]) is None
    assert longest_end(store, TOKENS) == 64
    assert os.listdir(tmp_path) == [file_name(infos[0])]
    assert store.put(segment(infos[1]))
    assert same(store.read(infos[1]), infos[1])


def test_the_least_recently_used_goes_first_and_never_a_parent(tmp_path: Path) -> None:
    store = store_at(tmp_path, limit_bytes=4 * FILE_BYTES)
    old = put_chain(store, TOKENS, [4, 8])
    new = put_chain(store, TOKENS[1:], [4, 8])
    store.touch(old)
    put_chain(store, TOKENS[2:], [4])
    assert [longest_end(store, TOKENS[at:]) for at in range(3)] == [8, 4, 4]
    assert store.read(new[1]) is None
    put_chain(store, TOKENS[3:], [4])
    assert [longest_end(store, TOKENS[at:]) for at in range(4)] == [8, 0, 4, 4]
    assert store.stats.evicted == 2
    assert sizes(tmp_path) == store.stats.used_bytes == 4 * FILE_BYTES


def test_a_segment_does_not_evict_what_it_stands_on(tmp_path: Path) -> None:
    store = store_at(tmp_path, limit_bytes=2 * FILE_BYTES)
    infos = chain_infos(store, TOKENS, [4, 8, 12])
    assert [store.put(segment(info)) for info in infos] == [True, True, False]
    assert longest_end(store, TOKENS) == 8
    assert (store.stats.no_room, store.stats.evicted) == (1, 0)


def test_a_smaller_limit_after_a_restart_is_kept(tmp_path: Path) -> None:
    put_chain(store_at(tmp_path), TOKENS, [4, 8, 12, 16])
    store = store_at(tmp_path, limit_bytes=2 * FILE_BYTES + 1)
    assert longest_end(store, TOKENS) == 8
    assert sizes(tmp_path) == 2 * FILE_BYTES


def test_a_use_is_remembered_over_a_restart(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    for at in range(3):
        (info,) = put_chain(store, TOKENS[at:], [4])
        os.utime(tmp_path / file_name(info), ns=(at * 10**9, at * 10**9))
    assert store.read(chain_infos(store, TOKENS, [4])[0]) is not None
    again = store_at(tmp_path, limit_bytes=FILE_BYTES)
    assert [longest_end(again, TOKENS[at:]) for at in range(3)] == [4, 0, 0]


def test_two_servers_see_each_other_s_files(tmp_path: Path) -> None:
    one, two = store_at(tmp_path), store_at(tmp_path)
    infos = put_chain(one, TOKENS, [64, 100])
    assert longest_end(two, TOKENS) == 0
    two.refresh()
    assert list(two.longest(two.hashes(TOKENS))) == infos
    assert all(same(two.read(info), info) for info in infos)
    (tmp_path / file_name(infos[1])).unlink()
    assert one.read(infos[1]) is None
    assert longest_end(one, TOKENS) == 64
    two.refresh()
    assert longest_end(two, TOKENS) == 64
    assert one.stats.vanished == two.stats.vanished == 1


def test_a_put_again_of_what_another_server_removed_writes_it(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    (info,) = put_chain(store, TOKENS, [8])
    (tmp_path / file_name(info)).unlink()
    assert store.put(segment(info))
    assert same(store.read(info), info)


def test_of_two_ways_to_one_prefix_the_shorter_is_kept(tmp_path: Path) -> None:
    one, two = store_at(tmp_path), store_at(tmp_path)
    direct, last = put_chain(one, TOKENS, [8, 16])
    longer = put_chain(two, TOKENS, [4, 8])
    one.refresh()
    assert list(one.longest(one.hashes(TOKENS))) == [direct, last]
    assert not (tmp_path / file_name(longer[1])).exists()
    two.refresh()
    assert list(two.longest(two.hashes(TOKENS))) == [direct, last]
    assert one.stats.used_bytes == two.stats.used_bytes == sizes(tmp_path)


def test_another_way_replaces_a_segment_that_lost_its_parent(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    parent, child = put_chain(store, TOKENS, [4, 8])
    (tmp_path / file_name(parent)).unlink()
    store.refresh()
    assert longest_end(store, TOKENS) == 0
    (direct,) = put_chain(store, TOKENS, [8])
    assert list(store.longest(store.hashes(TOKENS))) == [direct]
    assert not (tmp_path / file_name(child)).exists()
    assert store.stats.used_bytes == sizes(tmp_path)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    store = store_at(tmp_path, limit_bytes=FILE_BYTES)
    put_chain(store, TOKENS, [4])
    put_chain(store, TOKENS[1:], [4])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_limit_that_holds_no_segment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4\.11 KiB.*raise --hicache-storage-size to at least 0.000005"):
        store_at(tmp_path / "a", limit_bytes=FILE_BYTES - 1)
    assert not (tmp_path / "a").exists()


def test_a_file_for_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(
        ConfigError, match=r"a' is not one \(.*a is not a folder\): give --hicache-storage-path another"
    ):
        store_at(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"Not a directory"):
        store_at(tmp_path / "a" / "b")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "probe", fail)
    with pytest.raises(ConfigError, match=r"Permission denied"):
        store_at(tmp_path)


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o300, 0o500, 0o600])
def test_a_folder_without_all_permissions_is_refused(mode: int) -> None:
    """In a process that is not root, to which nothing is forbidden, and outside pytest's folders, which are its user's alone."""
    code = f"""
import os, tempfile
from pathlib import Path
from tests.unit.storage.small import store_at
from twinpool.errors import ConfigError
if os.geteuid() == 0:
    os.seteuid(65534)
with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, {mode})
    try:
        store_at(Path(folder))
    except ConfigError as error:
        print(str(error).replace(folder, "FOLDER"))
    os.chmod(folder, 0o700)
    print(os.listdir(folder))
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    said = (
        "The disk tier needs a folder that can be made, read and written, and 'FOLDER' is not one (Permission denied): give "
        "--hicache-storage-path another.\n[]\n"
    )
    assert (done.stdout, done.stderr) == (said, "")


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_full_disk_is_counted_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    monkeypatch.setattr(backoff, "LONGEST_PAUSE_S", 0.0)  # so that each put is a try
    store = store_at(tmp_path)
    infos = chain_infos(store, TOKENS, [64, 100])
    store.put(segment(infos[0]))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, fail)
        assert [store.put(segment(infos[1])) for _ in range(3)] == [False] * 3
        assert longest_end(store, TOKENS) == 64
    assert (store.stats.failed, len(caplog.records)) == (3, 1)
    assert "No space left on device (ENOSPC; said once)" in caplog.text
    assert store._reserved_bytes == 0
    store.put(segment(infos[1]))
    assert same(store.read(infos[1]), infos[1])


def test_a_folder_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    store = store_at(tmp_path / "a")
    infos = put_chain(store, TOKENS, [64, 100, 104])
    shutil.rmtree(store.path)
    assert store.read(infos[2]) is None
    store.touch(infos)
    store.refresh()
    assert not store.put(segment(infos[0]))
    assert longest_end(store, TOKENS) == 0
    assert (store.stats.segments, store.stats.vanished, store.stats.failed) == (0, 3, 2)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
def test_a_read_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error) -> None:
    store = store_at(tmp_path)
    (info,) = put_chain(store, TOKENS, [8])

    def fail(path: Path, size_bytes: int) -> memoryview:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_whole", fail)
        assert store.read(info) is None
    assert same(store.read(info), info)
    assert store.stats.failed == 1


def test_a_pipe_for_a_file_is_not_waited_for(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    (info,) = put_chain(store, TOKENS, [8])
    (tmp_path / file_name(info)).unlink()
    os.mkfifo(tmp_path / file_name(info))
    assert store.read(info) is None
    assert store.stats.damaged == 1


def test_leftovers_of_dead_writers_are_removed_at_the_start(tmp_path: Path) -> None:
    left = tmp_path / "tmpabc.part"
    left.write_bytes(b"half")
    os.utime(left, ns=(0, 0))
    assert store_at(tmp_path).stats.leftovers == 1
    assert not left.exists()


def test_models_without_kv_store_states(tmp_path: Path) -> None:
    fingerprint = replace(SMALL, page_bytes=0)
    store = store_at(tmp_path, fingerprint=fingerprint)
    (info,) = put_chain(store, TOKENS, [8])
    read = store.read(info)
    assert read is not None
    assert (bytes(read.pages), bytes(read.state)) == (b"", segment(info, fingerprint).state)

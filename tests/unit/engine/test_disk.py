"""The disk tier of an engine: which model a folder's files are of, how long a request waits, and what is counted."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.tiny_models import tiny_checkpoint
from tests.unit.engine.test_boot import boot
from tests.unit.storage.small import FILE_BYTES, SMALL, put_chain, store_at
from twinpool.engine.disk import DiskTier, model_digest
from twinpool.errors import ConfigError
from twinpool.sched import disk
from twinpool.step import StoreCopy
from twinpool.storage.store import DiskStore

TOKENS = np.arange(400, dtype=np.int32)


def tier_over(store: DiskStore, *, policy: str = "wait_complete", threshold_tokens: int = 1) -> DiskTier:
    return DiskTier(store, policy=policy, threshold_tokens=threshold_tokens)


def wait(tier: DiskTier, rid: int) -> list[tuple[int, int]]:
    """Spans of what was read."""
    read = None
    while read is None:
        read = tier.poll(rid)
    return [(one.start, one.end) for one in read]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_5", tmp_path_factory.mktemp("disk"))


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_models_digest_is_of_what_it_computes_with(tiny: Path, tmp_path: Path) -> None:
    other = copy_of(tiny, tmp_path / "copy")
    assert model_digest(other) == model_digest(tiny)
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    tuned = model_digest(other)
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    assert len({model_digest(tiny), tuned, model_digest(other)}) == 3


def test_a_sibling_with_one_small_tensor_of_its_own_is_another_model(tmp_path: Path) -> None:
    digests = set()
    for bias in (0, 1):
        tensors = {"a": np.zeros(5 << 20, np.int8), "b": np.full(3, bias, np.int8), "c": np.zeros(12 << 20, np.int8)}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text("{}")
        digests.add(model_digest(tmp_path))
    assert len(digests) == 2


def test_only_what_memory_lacks_is_read(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    put_chain(store, TOKENS.tolist(), [64, 128, 256, 400])
    tier = tier_over(store)
    tier.look(1, TOKENS, in_memory_tokens=128, kv_tokens=128)
    assert wait(tier, 1) == [(128, 256), (256, 400)]
    tier.look(2, TOKENS, in_memory_tokens=100, kv_tokens=100)
    assert wait(tier, 2) == [(64, 128), (128, 256), (256, 400)]
    tier.look(3, TOKENS[:399], in_memory_tokens=0, kv_tokens=0)
    assert wait(tier, 3) == [(0, 64), (64, 128), (128, 256)]
    tier.look(4, TOKENS, in_memory_tokens=400, kv_tokens=400)
    assert wait(tier, 4) == []
    assert tier.counts().fetched_tokens == 272 + 336 + 256
    tier.close()


@pytest.mark.parametrize(("in_memory", "found"), [(144, [(128, 256), (256, 400)]), (145, [])])
def test_less_than_256_tokens_are_not_worth_it(tmp_path: Path, in_memory, found) -> None:
    store = store_at(tmp_path)
    put_chain(store, TOKENS.tolist(), [128, 256, 400])
    tier = DiskTier(store, policy="wait_complete")
    tier.look(1, TOKENS, in_memory_tokens=in_memory, kv_tokens=in_memory)
    assert wait(tier, 1) == found
    tier.close()


def test_a_turn_is_written_and_found_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = tier_over(store_at(tmp_path))
    pages = np.arange(2, dtype=np.int32)
    for start, end in ((0, 8), (8, 16)):
        order = StoreCopy(TOKENS[:end], start, end, pages, 1)
        tier.put(order, memoryview(bytes(2 * SMALL.page_bytes)), memoryview(bytes(SMALL.slot_bytes)))
    tier.writer.flush()
    counts = tier.counts()
    assert (counts.store.written, counts.store.written_tokens, counts.pending_bytes) == (2, 16, 0)
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        tier.look(1, TOKENS[:17], in_memory_tokens=0, kv_tokens=0)
        assert wait(tier, 1) == [(0, 8), (8, 16)]
        tier.look(2, TOKENS[:17], in_memory_tokens=8, kv_tokens=8)
        assert wait(tier, 2) == [(8, 16)]
        tier.look(3, TOKENS[:8], in_memory_tokens=8, kv_tokens=8)
        assert wait(tier, 3) == []
    assert [line for line in caplog.messages if line.startswith("HiCache prefetch")] == [
        "HiCache prefetch success req=1 completed=16 matched=0 loaded=16",
        "HiCache prefetch success req=2 completed=16 matched=8 loaded=8",
    ]
    tier.close()


class Slow:
    """A store whose reads wait until they may."""

    def __init__(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may = threading.Event()
        read = store.read
        monkeypatch.setattr(store, "read", lambda info: (self.may.wait(10), read(info))[1])


@pytest.mark.parametrize("policy", ["timeout", "best_effort"])
def test_a_policy_that_does_not_wait_goes_on_without(tmp_path: Path, monkeypatch, policy) -> None:
    store = store_at(tmp_path)
    put_chain(store, TOKENS.tolist(), [64, 128])
    slow = Slow(store, monkeypatch)
    monkeypatch.setattr(disk, "_WAIT_BASE_S", 0.0)
    monkeypatch.setattr(disk, "_WAIT_PER_1024_TOKENS_S", 0.08)
    tier = tier_over(store, policy=policy)
    tier.look(1, TOKENS, in_memory_tokens=0, kv_tokens=0)
    assert wait(tier, 1) == []
    assert tier.counts().late_requests == 1
    slow.may.set()
    tier.close()


def test_a_request_that_leaves_is_read_no_more(tmp_path: Path, monkeypatch) -> None:
    store = store_at(tmp_path)
    put_chain(store, TOKENS.tolist(), [64, 128])
    slow = Slow(store, monkeypatch)
    tier = tier_over(store)
    tier.look(1, TOKENS, in_memory_tokens=0, kv_tokens=0)
    assert tier.poll(1) is None
    tier.forget(1)
    tier.forget(1)
    assert wait(tier, 1) == []
    slow.may.set()
    tier.close()
    assert store.stats.read <= 1


def test_a_boot_says_what_the_folder_has(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_chain(store_at(tmp_path), TOKENS.tolist(), [4])
    disk = {"hicache_storage_backend": "file", "hicache_storage_path": str(tmp_path), "hicache_storage_size": 2.0}
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        engine = boot(tiny, enable_hierarchical_cache=True, hicache_size=0.02, **disk)
    counts = engine.view_disk()
    engine.close()
    assert f"HiCache storage in {tmp_path}: 1 segment of all models, 4.21 kB of 2.00 GB." in caplog.messages
    assert counts is not None
    assert (counts.path, counts.store.used_bytes) == (str(tmp_path), FILE_BYTES)


def test_without_a_folder_there_is_none(tiny: Path) -> None:
    engine = boot(tiny, enable_hierarchical_cache=True, hicache_size=0.02)
    assert engine.view_disk() is None
    engine.close()


def test_a_tier_without_a_folder_and_a_folder_without_a_tier_are_refused(tiny: Path, tmp_path: Path) -> None:
    for option, missing in (
        ({"hicache_storage_backend": "file"}, "--hicache-storage-path DIR"),
        ({"hicache_storage_path": str(tmp_path)}, "--hicache-storage-backend file"),
    ):
        with pytest.raises(ConfigError, match=missing):
            boot(tiny, enable_hierarchical_cache=True, hicache_size=0.02, **option)
    with pytest.raises(ConfigError, match="give that and --enable-hierarchical-cache, too"):
        boot(tiny, hicache_storage_path=str(tmp_path))


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may not be loaded."""

    def load(*args: object, **settings: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("twinpool.engine.boot.load_rank", load)


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file", "{}/file is not a folder"),
        ("file/a/b", "Not a directory"),
        ("link", "{}/link is a link to nothing"),
        ("link/a/b", "{}/link is a link to nothing"),
        ("loop/a", "Too many levels of symbolic links"),
        ("a/" * 2500, "File name too long"),
        ("x" * 300, "File name too long"),
        ("/proc/nowhere/a", "No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_the_weights_are_loaded(tiny, tmp_path: Path, path, why) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    disk = {"hicache_storage_backend": "file", "hicache_storage_path": str(tmp_path / path)}
    with pytest.raises(ConfigError) as refused:
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.02, **disk)
    assert str(refused.value) == (
        f"The disk tier needs a folder that can be made, read and written, and '{tmp_path / path}' is not one "
        f"({why.format(tmp_path)}): give --hicache-storage-path another."
    )
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "loop"]


@pytest.mark.usefixtures("no_load")
def test_a_limit_and_a_disk_without_room_for_a_segment_are_refused_before_the_weights_are_loaded(
    tiny: Path, tmp_path: Path, monkeypatch
) -> None:
    disk = {"hicache_storage_backend": "file", "hicache_storage_path": str(tmp_path)}
    with pytest.raises(
        ConfigError, match=r"needs room for a page and a state, \d\.\d+ KiB: raise --hicache-storage-size"
    ):
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.02, hicache_storage_size=4e-6, **disk)
    store = store_at(tmp_path)
    monkeypatch.setattr("twinpool.storage.files.free_bytes", lambda folder: 4096)
    with pytest.raises(
        ConfigError, match=r"has 4\.00 KiB left, and one segment takes at least \d\.\d+ KiB: make room there"
    ):
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.02, **disk)
    put_chain(store, TOKENS.tolist(), [4])
    with pytest.raises(AssertionError, match="the weights were loaded"):
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.02, **disk)


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a\0b", r"--hicache-storage-path 'a\x00b' has a NUL character"),
        ("~nobody-of-this-name/a", "--hicache-storage-path ~nobody-of-this-name/a begins with a home folder"),
    ],
)
def test_a_path_that_no_folder_can_have_is_refused(tiny: Path, path: str, said: str) -> None:
    disk = {"hicache_storage_backend": "file", "hicache_storage_path": path}
    with pytest.raises(ConfigError, match=re.escape(said)):
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.02, **disk)


def given(tier: DiskTier, start: int, end: int) -> list[tuple[int, int]]:
    """Give tokens [start, end) and say what is found out to be missing: (prefix, how much of it is there)."""
    kv = memoryview(bytes((end - start) // SMALL.page_size * SMALL.page_bytes))
    order = StoreCopy(TOKENS[:end], start, end, np.zeros((end - start) // SMALL.page_size, np.int32), 1)
    tier.put(order, kv, memoryview(bytes(SMALL.slot_bytes)))
    tier.writer.flush()
    return [(len(lost.tokens), lost.kept_tokens) for lost in tier.lost()]


def test_what_stands_on_nothing_is_reported_once(tmp_path: Path) -> None:
    tier = tier_over(store_at(tmp_path))
    assert given(tier, 0, 8) == []
    assert given(tier, 0, 8) == [], "it is there already"
    assert given(tier, 16, 24) == [(24, 8)]
    assert tier.lost() == []
    assert given(tier, 8, 16) == given(tier, 16, 24) == []
    tier.writer.close()
    assert given(tier, 24, 32) == [(32, 24)], "dropped: nothing is taken any more"
    tier.close()

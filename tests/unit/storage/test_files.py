import contextlib
import fcntl
import itertools
import os
from pathlib import Path

import pytest

from twinpool.storage import files

HOUR_NS = 3600 * 10**9


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def age(path: Path, age_ns: int) -> None:
    then_ns = path.stat().st_mtime_ns - age_ns
    os.utime(path, ns=(then_ns, then_ns))


def test_a_thousand_missing_folders_are_made(tmp_path: Path) -> None:
    folder = tmp_path / ("a/" * 1500)
    for _ in range(2):
        files.make_folder(folder)
        assert folder.is_dir()
    for made in itertools.islice(
        (folder, *folder.parents), 1500
    ):  # pytest's own cleaning recurses once for each of them
        made.rmdir()
    assert not any(tmp_path.iterdir())


def test_parts_become_one_file(tmp_path: Path) -> None:
    files.write_whole(tmp_path, "a", [b"12", bytearray(b"3"), memoryview(b"")])
    assert (tmp_path / "a").read_bytes() == b"123"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(tmp_path, "a", [b"12"])
    assert names(tmp_path) == []


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"123")
    assert files.read_whole(path, 2) is None
    assert files.read_whole(path, 10**15) is None  # and no memory is taken for it
    assert files.read_whole(path, 3) == b"123"


@pytest.mark.parametrize("age_ns", [HOUR_NS, -HOUR_NS])
def test_leftovers_go_when_they_are_old_or_from_the_future_and_their_writer_is_dead(tmp_path: Path, age_ns) -> None:
    for name in ("old.part", "young.part", "locked.part", "old.other"):
        (tmp_path / name).write_bytes(b"x")
        if not name.startswith("young"):
            age(tmp_path / name, age_ns)
    with open(tmp_path / "locked.part", "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert files.remove_leftovers(tmp_path, files.list_folder(tmp_path)) == 1
        assert names(tmp_path) == ["locked.part", "old.other", "young.part"]
    assert files.remove_leftovers(tmp_path, files.list_folder(tmp_path)) == 1


def test_a_listing_has_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (listed,) = files.list_folder(tmp_path)
    assert (listed.name, listed.size_bytes, listed.used_ns) == ("file", 3, (tmp_path / "file").stat().st_mtime_ns)


def test_a_file_that_cannot_be_looked_at_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "damaged").write_bytes(b"123")

    class Entry:
        def __init__(self, entry: os.DirEntry) -> None:
            self.name, self.is_file, self._stat = entry.name, entry.is_file, entry.stat

        def stat(self, **how: bool) -> os.stat_result:
            if self.name == "damaged":
                raise OSError(5, "Input/output error")
            return self._stat(**how)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: contextlib.nullcontext(map(Entry, scandir(folder))))
    assert [one.name for one in files.list_folder(tmp_path)] == ["file"]


def test_touch_says_when(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"")
    age(path, HOUR_NS)
    before_ns = path.stat().st_mtime_ns
    assert files.touch(path) == path.stat().st_mtime_ns > before_ns + HOUR_NS // 2

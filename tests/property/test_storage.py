"""Whatever happens to the folder, a store gives back what was written or nothing, keeps to its limit, and never strands a child."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.storage.small import FILE_BYTES, SMALL, chain_infos, longest_end, same, segment, store_at
from twinpool.storage.format import encode, file_name, parse_name
from twinpool.storage.keys import ChainHash, PrefixKeys, SegmentInfo
from twinpool.storage.store import DiskStore

ROOT = Path(__file__).resolve().parents[2]
ACTIONS = ("put", "put", "put", "read", "read", "touch", "damage", "cut", "remove", "refresh", "restart", "swap")


class World:
    """A folder, two servers on it, and conversations that share prefixes."""

    def __init__(self, folder: Path, rng: random.Random, limit_bytes: int) -> None:
        self.folder, self.rng, self.limit_bytes = folder, rng, limit_bytes
        self.stores = [store_at(folder, limit_bytes), store_at(folder, limit_bytes)]
        shared = [rng.randrange(3) for _ in range(200)]
        cuts = [rng.randrange(200) for _ in range(6)]
        self.conversations = [shared[:cut] + [10 * (i + 1)] * (200 - cut) for i, cut in enumerate(cuts)]

    def step(self, action: str) -> None:
        """One random action, then all that must hold."""
        which = self.rng.randrange(2)
        store, tokens = self.stores[which], self.rng.choice(self.conversations)
        if action == "put":
            self.put(store, tokens)
        elif action == "read":
            for info in store.longest(store.hashes(tokens)):
                read = store.read(info)
                assert read is None or same(read, info)
        elif action == "touch":
            store.touch(store.longest(store.hashes(tokens)))
        elif action == "refresh":
            store.refresh()
        elif action == "restart":
            self.stores[which] = store_at(self.folder, self.limit_bytes)
        else:
            self.harm(action)
        self.check(store, tokens)

    def put(self, store: DiskStore, tokens: list[int]) -> None:
        """What a server does after a request: the next segments above what is there."""
        hashes = store.hashes(tokens)
        chain = store.longest(hashes)
        start = chain[-1].end if chain else 0
        for _ in range(self.rng.randint(1, 3)):
            end = start + 4 * self.rng.randint(1, 10)
            if end > len(tokens):
                return
            store.put(segment(hashes.info(start, end)))
            start = end

    def harm(self, action: str) -> None:
        """Somebody else changes a file."""
        paths = sorted(self.folder.iterdir())
        if not paths:
            return
        path, other = self.rng.choice(paths), self.rng.choice(paths)
        data = bytearray(path.read_bytes())
        if action == "remove":
            path.unlink()
        elif action == "swap":
            data = bytearray(other.read_bytes())
        elif action == "cut":
            del data[self.rng.randrange(len(data) or 1) :]
        elif data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        if action != "remove":
            path.write_bytes(data)

    def check(self, store: DiskStore, tokens: list[int]) -> None:
        """Chains are whole, the limit holds for what a server knows, and no child outlives its parent by eviction."""
        chain = store.longest(store.hashes(tokens))
        starts = [info.start for info in chain]
        assert starts == [0, *(info.end for info in chain)][: len(chain)]
        hashes = ChainHash(SMALL, tokens)
        assert all(hashes.info(info.start, info.end) == info for info in chain)
        assert store.stats.used_bytes <= self.limit_bytes
        assert not [path for path in self.folder.iterdir() if path.suffix == ".part"]


@given(
    seed=st.integers(0, 10**9),
    files=st.integers(1, 12),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=60),
)
@settings(max_examples=80, deadline=None)
def test_what_is_read_is_what_was_written(seed: int, files: int, actions: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), random.Random(seed), files * (FILE_BYTES + 320))
        for action in actions:
            world.step(action)
        for store in world.stores:
            store.refresh()
        on_disk = sum(path.stat().st_size for path in Path(folder).iterdir())
        assert on_disk <= world.limit_bytes
        assert world.stores[1].stats.used_bytes == on_disk


@given(seed=st.integers(0, 10**9), files=st.integers(1, 12), n_steps=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_eviction_strands_nobody(seed: int, files: int, n_steps: int) -> None:
    """One server, no harm: the index is the folder, and every segment there has its parent."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), random.Random(seed), files * (FILE_BYTES + 320))
        store = world.stores[0]
        world.stores[1] = store
        for _ in range(n_steps):
            world.step(world.rng.choice(["put", "put", "read", "touch", "refresh"]))
            assert {path.name for path in Path(folder).iterdir()} == {file_name(entry.info) for entry in store._index}
            assert all(store._index.chain(entry.info.key) for entry in store._index)
        assert (store.stats.damaged, store.stats.vanished, store.stats.failed) == (0, 0, 0)


def forged_name(rng: random.Random, hashes: PrefixKeys) -> str:
    """The name of a segment as only somebody who means harm gives it: keys of one prefix, the span of another."""
    keys = [hashes.key(4 * rng.randrange(30)) for _ in range(3)]
    start = rng.choice([0, 0, rng.randrange(120), 4 * rng.randrange(30)])
    end = start + rng.choice([4, 4 * rng.randint(1, 20), rng.randint(1, 9), 10**11])
    info = SegmentInfo(
        start=start,
        end=end,
        key=keys[0],
        parent_key=keys[1],
        grid_key=rng.choice([keys[2], hashes.grid_key(end % 120)]),
    )
    return file_name(info)


@given(seed=st.integers(0, 10**9), n_forged=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_forged_names_are_misses_or_whole_pages_of_the_prompt(seed: int, n_forged: int) -> None:
    """Whatever names lie in the folder, what is found for a prompt goes from its first token on without a gap and not beyond its end."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = store_at(Path(folder), 30 * (FILE_BYTES + 320))
        tokens = [rng.randrange(3) for _ in range(120)]
        hashes = store.hashes(tokens)
        for _ in range(n_forged):
            path = Path(folder) / forged_name(rng, hashes)
            if rng.random() < 0.5:
                path.touch()
            else:
                info = parse_name(path.name)
                if info.end - info.start < 200:
                    path.write_bytes(b"".join(encode(segment(info), SMALL)))
        store.refresh()
        for _ in range(20):
            limit = rng.randrange(121)
            chain = store.longest(hashes, at_most_tokens=limit)
            ends = [info.end for info in chain]
            assert [info.start for info in chain] == [0, *ends][: len(chain)]
            assert all(end % SMALL.page_size == 0 and end <= limit for end in ends)
            for info in chain:
                store.read(info)
            start = 4 * rng.randrange(29)
            store.put(segment(hashes.info(start, start + 4)))


WRITER = """
import random, sys
from pathlib import Path
from tests.unit.storage.small import segment, store_at
store = store_at(Path(sys.argv[1]), int(sys.argv[3]))
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    tokens = [rng.randrange(4)] * 64 + [rng.randrange(50)] * 336
    hashes = store.hashes(tokens)
    for start in range(0, 400, 40):
        store.put(segment(hashes.info(start, start + 40)))
    for info in store.longest(hashes):
        store.read(info)
    if rng.random() < 0.1:
        store.refresh()
"""


def start_writer(folder: Path, seed: int, limit_bytes: int) -> subprocess.Popen[str]:
    """A server that puts and reads until it is killed."""
    args = [sys.executable, "-c", WRITER, str(folder), str(seed), str(limit_bytes)]
    writer = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


@pytest.mark.parametrize("n_servers", [1, 2])
def test_kills_at_any_moment_leave_whole_files(tmp_path: Path, n_servers: int) -> None:
    """Servers write to one folder and are killed; whatever is listed afterwards is whole, and the limit holds."""
    rng = random.Random(n_servers)
    limit_bytes = 60 * (FILE_BYTES + 320)
    n_files = 0
    for round_ in range(4):
        writers = [start_writer(tmp_path, 10 * round_ + i, limit_bytes) for i in range(n_servers)]
        time.sleep(rng.random() * 0.4)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()  # type: ignore[union-attr]
        for part in tmp_path.glob("*.part"):
            os.utime(part, ns=(0, 0))
        store = store_at(tmp_path, limit_bytes)
        n_files += len(store._index)
        assert all(same(store.read(entry.info), entry.info) for entry in list(store._index))
        assert store.stats.damaged == store.stats.failed == 0
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) == store.stats.used_bytes <= limit_bytes
    assert n_files > 0


@pytest.mark.parametrize("call", ["mkstemp", "write", "fsync", "replace", "after"])
def test_death_between_any_two_steps_of_a_write(tmp_path: Path, call: str) -> None:
    """The process ends just before a step; the segment is whole or absent, and what is left over is removed."""
    code = f"""
import os, sys, tempfile
from pathlib import Path
from tests.unit.storage.small import chain_infos, put_chain, segment, store_at
from twinpool.storage import files
store = store_at(Path(sys.argv[1]))
put_chain(store, range(400), [64])
def die(*args): os._exit(9)
def half(folder, name, parts): parts_whole(folder, name, dying(parts))
def dying(parts):
    yield parts[0]
    die()
parts_whole = files.write_whole
call = {call!r}
if call == "mkstemp": tempfile.mkstemp = lambda **kwargs: die()
elif call == "write": files.write_whole = half
elif call == "after": files._sync_folder = die
else: setattr(os, call, die)
store.put(segment(chain_infos(store, range(400), [64, 100])[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == 9
    for part in tmp_path.glob("*.part"):
        os.utime(part, ns=(0, 0))
    store = store_at(tmp_path)
    assert store.stats.leftovers == (call in {"write", "fsync", "replace"})
    assert longest_end(store, range(400)) == (100 if call == "after" else 64)
    assert all(same(store.read(entry.info), entry.info) for entry in list(store._index))
    info = chain_infos(store, range(400), [64, 100])[1]
    assert store.put(segment(info)) == (call != "after")
    assert same(store.read(info), info)


def test_ten_thousand_segments_open_and_answer_quickly(tmp_path: Path) -> None:
    """Measured 0.2 s and 15 ms; the bounds leave room for a busy machine."""
    hashes = ChainHash(SMALL, range(100_000))
    for start in range(0, 40_000, 4):
        (tmp_path / file_name(hashes.info(start, start + 4))).touch()
    began = time.perf_counter()
    store = store_at(tmp_path)
    opened = time.perf_counter()
    tokens = list(range(100_000))
    looked = time.perf_counter()
    chain = store.longest(store.hashes(tokens))
    ended = time.perf_counter()
    assert len(chain) == 10_000
    assert opened - began < 2
    assert ended - looked < 0.1


def test_many_conversations_with_one_beginning_answer_quickly(tmp_path: Path) -> None:
    """Thousands of segments that share the grid key of a system prompt are not walked one by one."""
    system = list(range(64))
    for i in range(3000):
        info = ChainHash(SMALL, [*system, i, i, i, i]).info(0, 68)
        (tmp_path / file_name(info)).touch()
    store = store_at(tmp_path)
    hashes = store.hashes([*system, 7, 7, 7, 7, 8, 8])
    began = time.perf_counter()
    assert store.longest(hashes)[-1].end == 68
    assert time.perf_counter() - began < 0.02


def test_threads_of_one_server_share_a_store(tmp_path: Path) -> None:
    """Puts, reads, evictions and refreshes at once; at rest the counts are those of the folder."""
    store = store_at(tmp_path, 20 * (FILE_BYTES + 320))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            hashes = store.hashes([rng.randrange(2)] * 64 + [rng.randrange(6)] * 336)
            for start in range(0, 40 * rng.randrange(10), 40):
                store.put(segment(hashes.info(start, start + 40)))
            for info in store.longest(hashes):
                read = store.read(info)
                assert read is None or same(read, info)
            if rng.random() < 0.2:
                store.refresh()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
    store.refresh()
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert on_disk == store.stats.used_bytes <= store.limit_bytes
    assert store._reserved_bytes == store.stats.damaged == store.stats.failed == 0

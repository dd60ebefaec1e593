import random

import pytest

from tests.unit.storage.small import SMALL
from twinpool.storage.index import Entry, Index
from twinpool.storage.keys import ChainHash, SegmentInfo

HASHES = ChainHash(SMALL, range(400))


def index_of(*rows: tuple[int, int, int]) -> Index:
    """Rows (start, end, used) of one conversation, 10 bytes each."""
    index = Index()
    for start, end, used in rows:
        index.add(Entry(HASHES.info(start, end), 10, used))
    return index


def ends(entries: list[Entry] | None) -> list[int] | None:
    return None if entries is None else [entry.info.end for entry in entries]


def test_a_chain_is_found_from_its_end() -> None:
    index = index_of((0, 64, 1), (64, 100, 2), (100, 104, 3))
    assert [info.end for info in index.chain(HASHES.key(104))] == [64, 100, 104]
    assert index.chain(HASHES.key(60)) == ()
    index.remove(HASHES.key(64))
    assert index.chain(HASHES.key(104)) == ()
    assert (len(index), index.size_bytes) == (2, 20)


def test_the_longest_prefix_wins_among_ends_on_and_off_the_grid() -> None:
    index = index_of((0, 8, 1), (0, 64, 1), (64, 68, 1), (64, 72, 1), (72, 200, 1))
    found = {limit: index.longest(HASHES, at_most_tokens=limit) for limit in (7, 8, 63, 64, 70, 199, 200, 999)}
    assert {limit: chain[-1].end if chain else 0 for limit, chain in found.items()} == {
        7: 0, 8: 8, 63: 8, 64: 64, 70: 68, 199: 72, 200: 200, 999: 200,
    }  # fmt: skip


def test_a_longer_prefix_that_lost_its_parent_does_not_hide_a_shorter_one() -> None:
    index = index_of((0, 64, 1), (64, 100, 1), (100, 200, 1), (200, 300, 1))
    index.remove(HASHES.key(100))
    assert [info.end for info in index.longest(HASHES, at_most_tokens=400)] == [64]


def test_other_tokens_find_only_what_they_share() -> None:
    index = index_of((0, 64, 1), (64, 128, 1), (128, 132, 1))
    other = ChainHash(SMALL, [*range(130), 999, 999, 999])
    assert [info.end for info in index.longest(other, at_most_tokens=400)] == [64, 128]


def test_parents_go_after_children() -> None:
    index = index_of((0, 64, 1), (64, 100, 9), (64, 96, 2), (100, 104, 3))
    assert ends(index.victims(0)) == []
    assert ends(index.victims(1)) == [96]
    assert ends(index.victims(40)) == [96, 104, 100, 64]
    assert index.victims(41) is None
    assert ends(index.victims(20, keep={HASHES.key(104)})) is None
    assert ends(index.victims(10, keep={HASHES.key(104)})) == [96]
    assert len(index) == 4


def test_of_one_age_the_longest_goes_first() -> None:
    index = index_of((0, 4, 5), (0, 8, 5), (0, 12, 5))
    assert ends(index.victims(20)) == [12, 8]


def test_a_later_use_counts_and_an_earlier_one_does_not() -> None:
    index = index_of((0, 4, 5), (0, 8, 6))
    index.mark_used(HASHES.key(4), 7)
    index.mark_used(HASHES.key(8), 1)
    index.mark_used(HASHES.key(12), 1)
    assert ends(index.victims(20)) == [8, 4]


def test_what_needs_a_segment() -> None:
    index = index_of((0, 64, 1), (64, 100, 9), (64, 96, 2), (100, 104, 3))
    assert sorted(HASHES.key(end) for end in (100, 104)) == sorted(index.with_descendants(HASHES.key(100)))
    index.remove(HASHES.key(64))
    assert len(index.with_descendants(HASHES.key(64))) == 3


def test_names_that_say_they_need_each_other() -> None:
    index, (a, b) = Index(), (bytes(15) + bytes([n]) for n in range(2))
    for start, key, parent in ((8, a, b), (0, b, a)):
        info = SegmentInfo(start=start, end=start + 8, key=key, parent_key=parent, grid_key=a)
        index.add(Entry(info, 10, start))
    assert index.with_descendants(a) == [a, b]
    assert index.victims(10) is None


def test_one_entry_a_key() -> None:
    index = index_of((0, 64, 1), (0, 100, 1))
    before = index.add(Entry(HASHES.info(64, 100), 7, 2))
    assert before is not None
    assert (before.info.start, len(index), index.size_bytes) == (0, 2, 17)
    assert [entry.info.start for entry in sorted(index, key=lambda entry: entry.info.end)] == [0, 64]


def slow_victims(index: Index, needed_bytes: int, keep: set[bytes]) -> list[bytes] | None:
    """The rule, looking at everything each time: of those that no other needs, the one used longest ago goes."""
    here = {entry.info.key: entry for entry in index}
    found: list[bytes] = []
    while needed_bytes > 0:
        parents = {entry.info.parent_key for entry in here.values()}
        free = [entry for key, entry in here.items() if key not in keep and key not in parents]
        if not free:
            return None
        victim = min(free, key=lambda entry: (entry.used_ns, -entry.info.end, entry.info.key))
        found.append(here.pop(victim.info.key).info.key)
        needed_bytes -= victim.size_bytes
    return found


@pytest.mark.parametrize("seed", range(20))
def test_victims_are_those_of_the_rule_whatever_came_before(seed: int) -> None:
    dice = random.Random(seed)
    forks = [ChainHash(SMALL, [*range(dice.randrange(200)), *[1000 + fork] * 200]) for fork in range(5)]
    index = Index()
    for now in range(300):
        hashes, end = dice.choice(forks), dice.randrange(1, 20) * 10
        key = hashes.key(end)
        match dice.choice(["add", "add", "add", "use", "remove", "evict"]):
            case "add":
                start = dice.choice([at for at in range(0, end, 10) if not at or index.get(hashes.key(at))] or [0])
                index.add(Entry(hashes.info(start, end), dice.randrange(1, 4), now // 3))
            case "use":
                index.mark_used(key, now)
            case "remove":
                index.remove(key)
            case "evict":
                keep = {info.key for info in index.chain(key)}
                wanted = slow_victims(index, needed := dice.randrange(1, 60), keep)
                found = index.victims(needed, keep=keep)
                assert (None if found is None else [entry.info.key for entry in found]) == wanted
                for entry in found or () if dice.random() < 0.5 else ():
                    index.remove(entry.info.key)

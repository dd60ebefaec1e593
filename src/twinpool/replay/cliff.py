"""Where reuse collapses along one axis, which pool made it, and how far a setting is from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

HELD = 0.95  # share of the best reuse that the plateau still has at its edge

DiskLack = Literal["disk", "disk_writes"]  # room, or time to write
Pool = Literal["states", "KV", "host"] | DiskLack
Side = Literal["below", "above"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One run: x on the axis; reuse and the two evicted gaps as shares of prompt tokens; mean free shares of both pools, those of
    the last tier where it ran out of room. one_memory: there both come from one memory without a split. disk: what the disk below it
    lacked, room or time to write; None for neither.
    """

    x: float
    reuse: float
    state_evicted: float
    kv_evicted: float
    slots_free: float
    pages_free: float
    one_memory: bool = False
    disk: DiskLack | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cliff:
    """Reuse falls on this side of the plateau. edge: the last x on the way there with HELD of the best reuse.

    inner, outer: the neighbours between which the most is lost, the outer one farther from the best; drop: what is lost between
    them, as a share of the best reuse; worst: the least reuse on this side. pool: what ran out, at the outer one.
    """

    side: Side
    edge: float
    inner: float
    outer: float
    inner_reuse: float
    outer_reuse: float
    drop: float
    worst: float
    pool: Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Reuse along the axis: the best of it (the first x that has it), and the cliffs on both sides, None where reuse holds up to
    the end of what was run.
    """

    best_x: float
    best_reuse: float
    first: float
    last: float
    below: Cliff | None
    above: Cliff | None

    def margins(self, x: float) -> tuple[float | None, float | None]:
        """From x to the edge below and to the one above, in units of the axis; negative: past the edge; None: no cliff there."""
        return (
            None if self.below is None else x - self.below.edge,
            None if self.above is None else self.above.edge - x,
        )


def shape_of(readings: Sequence[Reading]) -> Shape:
    """The shape of at least one reading, in any order.

    A side has a cliff when reuse somewhere on it falls under HELD of the best. The plateau ends at the first such x, seen from the
    best one; the cliff is where the most is lost between neighbours, whatever their distance: x should be spread evenly by
    its logarithm.
    """
    line = sorted(readings, key=lambda reading: reading.x)
    best = max(range(len(line)), key=lambda place: (line[place].reuse, -place))
    return Shape(
        best_x=line[best].x, best_reuse=line[best].reuse, first=line[0].x, last=line[-1].x,
        below=_cliff(line[best::-1], "below"), above=_cliff(line[best:], "above"),
    )  # fmt: skip


def _cliff(outwards: Sequence[Reading], side: Side) -> Cliff | None:
    """outwards: from the best reading to the end of the axis."""
    best = outwards[0]
    fallen = [place for place, reading in enumerate(outwards) if reading.reuse < HELD * best.reuse]
    if not fallen:
        return None
    steepest = max(range(1, len(outwards)), key=lambda place: outwards[place - 1].reuse - outwards[place].reuse)
    inner, outer = outwards[steepest - 1], outwards[steepest]
    return Cliff(
        side=side, edge=outwards[fallen[0] - 1].x, inner=inner.x, outer=outer.x, inner_reuse=inner.reuse,
        outer_reuse=outer.reuse, drop=(inner.reuse - outer.reuse) / best.reuse,
        worst=min(reading.reuse for reading in outwards), pool=tighter_pool(outer),
    )  # fmt: skip


def tighter_pool(reading: Reading) -> Pool:
    """What ran out. A state that is evicted below KV that stays says so itself (state_evicted); KV that is gone may have gone with
    the state of its leaf (prefix/evict.py), so there the pool with less free room is the one.
    """
    if reading.disk is not None:
        return reading.disk
    if reading.one_memory:
        return "host"
    if reading.state_evicted > reading.kv_evicted:
        return "states"
    return "states" if reading.slots_free < reading.pages_free else "KV"

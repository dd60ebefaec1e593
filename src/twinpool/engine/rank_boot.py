"""How rank 0 boots the others: what they are told, how much memory all have, and where they meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from twinpool.config.resolve import Resolved
from twinpool.engine.rank import Loaded, left_bytes
from twinpool.engine.rank_segments import RankSegments, Store
from twinpool.engine.ranks import Pools, Ranks, Start
from twinpool.models.adopt import AdoptedModel
from twinpool.models.group import Group
from twinpool.models.shard import Share
from twinpool.models.spec import ModelSpec


class RankLog(logging.LoggerAdapter[logging.Logger]):
    """A log with the rank of `extra` in front of each line, as boot logs are read back."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The line with its prefix."""
        assert self.extra is not None
        return f"[TP{self.extra['rank']}] {msg}", kwargs


def start_ranks(
    ranks: Ranks, *, folder: Path, spec: ModelSpec, resolved: Resolved, pre_load_bytes: int, threads: int
) -> None:
    """Tell the others what they are; they load while we do. pre_load_bytes: free for one rank; threads: of one rank."""
    ranks.send_each(
        [
            Start(
                rank=rank,
                folder=folder,
                spec=spec,
                resolved=resolved,
                pre_load_bytes=pre_load_bytes,
                threads=threads,
                meeting=ranks.meeting,
            )
            for rank in range(1, resolved.tp_size)
        ]
    )


def agree(ranks: Ranks, resolved: Resolved, loaded: Loaded) -> int:
    """Bytes that every rank has left, which is the least of them: all have the same pages and slots.

    Measured when all have loaded. Raises what a rank failed with, or RankLost.
    """
    ranks.collect()
    ranks.send("all have loaded")
    ours = left_bytes(resolved, pre_load_bytes=loaded.pre_load_bytes, weight_bytes=loaded.model.weight_bytes)
    theirs: list[int] = ranks.collect()
    return min(ours, *theirs)


def join_ranks(
    ranks: Ranks,
    model: AdoptedModel,
    *,
    resolved: Resolved,
    pools: Pools,
    put: Store | None,
    say: Callable[[str], None],
) -> Store | None:
    """Have the others allocate the same pools, log what they say, and meet them. Raises as `agree` does.

    put: takes whole segments, if there is a disk tier; returns what takes this rank's part of them.
    """
    ranks.send(pools)
    for rank, lines in enumerate(ranks.collect(), start=1):
        for line in lines:
            say(f"[TP{rank}] {line}")
    model.join(Group.join(Share(0, resolved.tp_size), meeting=ranks.meeting, device=resolved.device))
    ranks.collect()
    if resolved.device == "cpu":  # NCCL looks at the file again, when it is first used
        ranks.forget_meeting()
    if put is None:
        ranks.watch()
        return None
    segments = RankSegments(resolved.tp_size, put)
    ranks.watch(segments.theirs)
    return segments.ours

"""The disk tier of a running engine: where evicted conversations survive a restart, and what of it is read for a new request."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.batchlog import prefetch_line
from twinpool.clock import WallClock
from twinpool.config.resolve import Resolved
from twinpool.errors import ConfigError
from twinpool.memory.arena import Arena
from twinpool.memory.ledger import MemoryRequest
from twinpool.prefix.stored import StoredSegment
from twinpool.sched.disk import MAX_FETCHED_BYTES, MAX_PENDING_BYTES, PREFETCH_THRESHOLD_TOKENS, StorageTier
from twinpool.storage.format import smallest_file_bytes
from twinpool.storage.shelf import DiskStats, check_limit
from twinpool.storage.store import DiskStore, prepare_folder
from twinpool.storage.workers import Prefetcher, StoreWriter
from twinpool.wiring import disk_fingerprint, disk_limit_bytes

log = logging.getLogger("twinpool.engine")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 12  # of each tensor of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounts:
    """The disk tier now, and since boot.

    store: segments, bytes and what happened to them; fetched_tokens: KV tokens read for requests; late_requests: those that went on
    before all of it was read; pending_bytes: what waits to be written; dropped_segments: not written because too much waited.
    """

    path: str
    store: DiskStats
    fetched_tokens: int
    late_requests: int
    pending_bytes: int
    dropped_segments: int


class DiskTier(StorageTier):
    """Over a folder, with threads that write and read.

    policy: a --hicache-storage-prefetch-policy; threshold_tokens: less than that is not worth reading.
    """

    def __init__(self, store: DiskStore, *, policy: str, threshold_tokens: int = PREFETCH_THRESHOLD_TOKENS) -> None:
        self.store = store
        self.writer = StoreWriter(store, max_pending_bytes=MAX_PENDING_BYTES)
        self._readers = Prefetcher(store, max_held_bytes=MAX_FETCHED_BYTES)
        super().__init__(
            store=store, writer=self.writer, prefetcher=self._readers, clock=WallClock(), policy=policy,
            threshold_tokens=threshold_tokens,
        )  # fmt: skip

    def poll(self, rid: int) -> Sequence[StoredSegment] | None:
        """As StorageTier's; the log says what was read."""
        read = super().poll(rid)
        if read:
            log.info(prefetch_line(rid, completed_tokens=read[-1].end, matched_tokens=read[0].start))
        return read

    def counts(self) -> DiskCounts:
        """Counts now; from any thread."""
        return DiskCounts(
            path=str(self.store.path),
            store=self.store.stats,
            fetched_tokens=self.fetched_tokens,
            late_requests=self.late_requests,
            pending_bytes=self.writer.pending_bytes,
            dropped_segments=self.writer.dropped,
        )

    def close(self) -> None:
        """Write what waits, then end the threads."""
        self.writer.close(timeout_s=60.0)
        self._readers.close()


def check_disk(resolved: Resolved, request: MemoryRequest) -> None:
    """Raise ConfigError for a disk tier that cannot be, before anything is loaded: no folder, one that cannot be used, or a limit below
    one page and one state. The folder is made.
    """
    if resolved.hicache_storage_backend is None:
        return
    if resolved.hicache_storage_path is None:
        raise ConfigError("--hicache-storage-backend file needs a folder: give --hicache-storage-path DIR, too.")
    sizes = disk_fingerprint(
        resolved,
        model="",
        ranks=resolved.tp_size,
        page_bytes=request.page_bytes,
        slot_bytes=request.stage_slot_bytes,
    )
    check_limit(disk_limit_bytes(resolved), sizes)
    prepare_folder(_expanded(resolved.hicache_storage_path), needed_bytes=smallest_file_bytes(sizes))


def open_disk_tier(resolved: Resolved, arena: Arena, folder: Path) -> DiskTier | None:
    """The tier of these settings, None without one. folder: of the model. Raises ConfigError for a path that cannot be used."""
    if resolved.hicache_storage_backend is None or resolved.hicache_storage_path is None:
        return None
    fingerprint = disk_fingerprint(
        resolved,
        model=model_digest(folder),
        ranks=resolved.tp_size,
        page_bytes=arena.page_bytes,
        slot_bytes=arena.slot_bytes,
    )
    path = _expanded(resolved.hicache_storage_path)
    store = DiskStore(path, limit_bytes=disk_limit_bytes(resolved), fingerprint=fingerprint)
    return DiskTier(store, policy=resolved.hicache_storage_prefetch_policy)


def _expanded(path: str) -> Path:
    """The folder of --hicache-storage-path, which may begin with ~. Raises ConfigError for the home of nobody."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--hicache-storage-path {path} begins with a home folder that is not there.") from error


def model_digest(folder: Path) -> str:
    """Of config.json and of the weights: of each tensor samples all over it, so that siblings differ in which any tensor was trained. A
    copy of the folder has the same.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(f"{config.name}:{config.stat().st_size}:".encode() + config.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            data_at = file.tell()
            tensors = [tensor["data_offsets"] for name, tensor in json.loads(header).items() if name != "__metadata__"]
            for start, end in sorted(tensors):
                for at in range(start, end, max(_SAMPLE_BYTES, (end - start) // _SAMPLES)):
                    file.seek(data_at + at)
                    digest.update(file.read(min(_SAMPLE_BYTES, end - at)))
    return digest.hexdigest()

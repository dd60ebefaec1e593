"""Server processes on one folder at the same time: one is killed while it writes, the other reads on, and the next one has it all."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from tests.agreement.live import Live, live_server
from tests.agreement.test_disk_tier import SAID, files_of, flags, opening
from twinpool import LLM, SamplingParams

# Sessions: in the folder before the second server starts, and being written when the first is killed.
READ, WRITTEN = range(3), range(3, 15)
PREFIX_TOKENS = 300 + SAID - 1  # of an opening and its answer, without the last token, which was not computed


@cache
def without_cache() -> tuple[list[list[int]], list[list[int]]]:
    """What every opening is answered, and what the next turn of it is."""
    params = SamplingParams(max_tokens=SAID, temperature=0.0, ignore_eos=True)
    with LLM(device_memory="1GiB", disable_radix_cache=True, max_total_tokens=2048) as llm:
        first = [list(one.token_ids) for one in llm.generate([opening(at) for at in (*READ, *WRITTEN)], params)]
        again = [[*opening(at), *said, 9] for at, said in enumerate(first)]
        return first, [list(one.token_ids) for one in llm.generate(again, params)]


def ask(live: Live, session: int, turn: int) -> dict[str, Any]:
    """One turn of a session, checked; where its prefix came from."""
    first, again = without_cache()
    prompt = opening(session) if not turn else [*opening(session), *first[session], 9]
    params = {"max_new_tokens": SAID, "temperature": 0.0, "ignore_eos": True}
    reply = httpx.post(f"{live.url}/generate", json={"input_ids": prompt, "sampling_params": params}, timeout=60).json()
    assert reply["output_ids"] == (again if turn else first)[session]
    return reply["meta_info"]["cached_tokens_details"]


def write_until_killed(live: Live) -> None:
    with contextlib.suppress(httpx.TransportError):
        for session in WRITTEN:
            ask(live, session, 0)


def kill_while_it_writes(live: Live, folder: Path, writer: threading.Thread) -> None:
    """SIGKILL when a half-written file is there, or when all has been asked."""
    while writer.is_alive() and not any(path.suffix == ".part" for path in folder.iterdir()):
        pass
    live.process.kill()
    live.process.wait()
    writer.join()


def wait_for(live: Live, metric: str, value: float) -> None:
    deadline_s = time.monotonic() + 30
    while live.metrics()[metric] != value:
        assert time.monotonic() < deadline_s, metric
        time.sleep(0.05)


def test_one_server_is_killed_while_it_writes_and_another_reads(tmp_path: Path) -> None:
    without_cache()
    folder, logs = tmp_path / "disk", [tmp_path / name for name in ("first", "second", "third")]
    for path in logs:
        path.mkdir()
    with live_server(logs[0], *flags(folder)) as first:
        for session in READ:
            ask(first, session, 0)
        wait_for(first, "twinpool:disk_pending_bytes", 0)
        with live_server(logs[1], *flags(folder)) as second:
            n_read = 0
            for session in READ:  # and writes what the turn adds: later on it has nothing to write
                n_read += ask(second, session, 1)["storage"] >= PREFIX_TOKENS
            wait_for(second, "twinpool:disk_pending_bytes", 0)
            writer = threading.Thread(target=write_until_killed, args=(first,))
            writer.start()
            killer = threading.Thread(target=kill_while_it_writes, args=(first, folder, writer))
            killer.start()
            rounds = 0
            while killer.is_alive() or rounds < 2:
                assert second.get("/flush_cache?timeout=5").status_code == 200
                for session in READ:
                    n_read += ask(second, session, 1)["storage"] >= PREFIX_TOKENS
                rounds += 1
            killer.join()
            assert n_read == len(READ) * (rounds + 1), "every one of them came from the disk"
            found = second.metrics()
            for event in ("damaged", "failed", "vanished"):
                assert found[f"twinpool:disk_segments_total{{{event}}}"] == 0
            second.check_no_leak()
    with live_server(logs[2], *flags(folder)) as third:
        whole = {session for session in WRITTEN if ask(third, session, 1).get("storage", 0) >= PREFIX_TOKENS}
        assert all(ask(third, session, 1)["storage"] >= PREFIX_TOKENS for session in READ)
        assert len(files_of(folder)) >= len(READ) + len(whole)
        assert third.metrics()["twinpool:disk_segments_total{damaged}"] == 0
        third.check_no_leak()

"""A real server in a process of its own, with the demo model, on a free port."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

START_S = 60


@dataclass
class Live:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def metrics(self) -> dict[str, float]:
        """Sample name with the metric's own labels, as 'name' or 'name{label value}', to value."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("#"):
                continue
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            usual = {"dp_rank", "engine_type", "model_name", "pp_rank", "tp_rank"}
            own = [label.split("=")[1].strip('"') for label in labels.split(",") if label.split("=")[0] not in usual]
            found[name + (f"{{{','.join(own)}}}" if own else "")] = float(value)
        return found

    def check_no_leak(self) -> None:
        """At rest every page and slot is free or evictable."""
        found = self.metrics()
        assert found["sglang:num_running_reqs"] == found["sglang:num_queue_reqs"] == 0
        kv = found["sglang:kv_available_tokens"] + found["sglang:kv_evictable_tokens"]
        assert kv == found["sglang:max_total_num_tokens"]
        slots = found["sglang:mamba_available_tokens"] + found["sglang:mamba_evictable_tokens"]
        assert slots == found["twinpool:state_pool_slots"]
        assert self.get("/flush_cache?timeout=5").text.startswith("Cache flushed.")
        found = self.metrics()
        assert found["sglang:kv_available_tokens"] == found["sglang:max_total_num_tokens"]
        assert found["sglang:mamba_available_tokens"] == found["twinpool:state_pool_slots"]

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def command(*flags: str) -> list[str]:
    """The command line of `twinpool serve`."""
    return [sys.executable, "-c", "from twinpool.cli.main import main; main()", "serve", *flags]


@contextmanager
def live_server(folder: Path, *flags: str) -> Iterator[Live]:
    """A server that is ready; killed at the end if it still runs."""
    port = free_port()
    log = folder / "server.log"
    with log.open("wb") as out:
        flags = ("--port", str(port), "--device-memory", "1GiB", "--enable-metrics", "--enable-cache-report", *flags)
        process = subprocess.Popen(command(*flags), stdout=out, stderr=subprocess.STDOUT)
    live = Live(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_ready(live)
        yield live
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(live: Live) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert live.process.poll() is None, live.log.read_text()
        try:
            if live.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not ready after {START_S} s:\n{live.log.read_text()}")

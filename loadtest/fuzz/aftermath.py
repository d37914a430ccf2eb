"""What a server is left with after a campaign: its seats, its blocks, its memory, its log, and its wits."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from loadtest.scrape import samples

SETTLE_S = 60.0
QUESTION = {"prompt": "One two three four five six", "max_tokens": 24, "temperature": 0, "cache_prompt": False}
# What a leak of a kibibyte a request comes to in 100,000 of them is three times this.
MAX_GROWTH_BYTES = 32 << 20
MIN_LOOKS = 12
MORE_FILES = 8  # such as may be open at the one moment and not at the other


class Watched:
    """A server process that is looked at from outside while it is shot at."""

    def __init__(self, url: str, pid: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=120.0, trust_env=False)
        self._process = psutil.Process(pid)
        self._rss_bytes: list[int] = []
        self._answer = self._ask()
        self._num_files = self._process.num_fds()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._http.close()

    def look(self) -> int:
        """Note the resident memory, in bytes, and give it; 0 when the process is gone."""
        try:
            self._rss_bytes.append(self._process.memory_info().rss)
        except psutil.Error:
            return 0
        return self._rss_bytes[-1]

    def faults(self) -> list[str]:
        """What is not as it was, once the server had time to become idle."""
        try:
            return self._faults()
        except (httpx.HTTPError, psutil.Error) as error:
            return [f"the server is gone, or does not answer: {error}"]

    def _faults(self) -> list[str]:
        found = _settled(self._busy)
        self._http.post("/v1/cache/reset").raise_for_status()
        stats = self._http.get("/v1/cache/stats").json()
        if (
            stats["entries"]
            or stats["paged_blocks_live"]
            or stats["paged_blocks_free"] != stats["paged_blocks_allocated"]
        ):
            found.append(f"blocks are missing: {json.dumps(stats)}")
        if self._ask() != self._answer:
            found.append("the same question has another answer than before")
        found += _settled(self._open_files)
        if (growth := self.growth_bytes) is not None and growth > MAX_GROWTH_BYTES:
            found.append(f"memory grew by {growth / 2**20:.0f} MiB")
        return found

    @property
    def growth_bytes(self) -> int | None:
        """How far resident memory at the end is above that after a third of the campaign; None after few looks."""
        looks = self._rss_bytes
        if len(looks) < MIN_LOOKS:
            return None
        span = max(2, len(looks) // 10)
        begin = len(looks) // 3
        return int(statistics.median(looks[-span:]) - statistics.median(looks[begin : begin + span]))

    def _ask(self) -> str:
        return str(self._http.post("/v1/completions", json=QUESTION).raise_for_status().json()["choices"][0]["text"])

    def _busy(self) -> list[str]:
        found = [f"slot {slot['id']} is taken" for slot in self._http.get("/slots").json() if slot["is_processing"]]
        counts = samples(self._http.get("/metrics").text)
        if counts["mlxcel_slots"] != counts["mlxcel_slots_available"]:
            found.append("metrics say that slots are taken")
        names = ("queue_depth", "batch_current_size", "cache_pool_paged_blocks_live")
        return found + [f"mlxcel_{name} is {counts[f'mlxcel_{name}']:g}" for name in names if counts[f"mlxcel_{name}"]]

    def _open_files(self) -> list[str]:
        more = self._process.num_fds() - self._num_files
        return [f"{more} more files or sockets are open than before"] if more > MORE_FILES else []


def _settled(faults: Callable[[], list[str]]) -> list[str]:
    """The faults that do not go away."""
    deadline = time.monotonic() + SETTLE_S
    while (found := faults()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def log_faults(log: Path) -> list[str]:
    """Lines of the server's log that tell of a failure."""
    lines = log.read_text(errors="replace").splitlines()
    bad = [line for line in lines if '"level":"error"' in line or '"level":"critical"' in line or "Traceback" in line]
    return [f"the log says {line[:300]}" for line in bad[:5]]

"""What the server counts, read while a scenario runs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.record import ServerLook, to_json

INTERVAL_S = 1.0
SETTLE_S = 10.0


def samples(exposition: str) -> dict[str, float]:
    """The samples of an exposition text by ``name`` or ``name{label=value}``; of histograms only sums and counts."""
    return {
        sample.name + "".join(f"{{{label}={value}}}" for label, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if not sample.name.endswith("_bucket") and len(sample.labels) <= 1
    }


class Watch:
    """Looks at ``/metrics`` once a second and writes the looks to ``path``. A server without metrics has no looks.

    The first look is taken before anything is sent, and the last one when the server has become idle.
    """

    def __init__(self, http: httpx.Client, path: Path, pid: int | None) -> None:
        self._http = http
        self._file = path.open("wb")
        self._process = psutil.Process(pid) if pid is not None else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        if self.look() is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
            deadline = time.monotonic() + SETTLE_S
            # A client has its last byte before the server has counted it; so look until two looks say the same.
            last: dict[str, float] = {}
            while time.monotonic() < deadline and (look := self.look()) is not None:
                counts = {name: value for name, value in look.values.items() if _is_settled_by(name)}
                if counts == last and not counts["mlxcel_batch_current_size"]:
                    break
                last = counts
                time.sleep(0.3)
        self._file.close()

    def look(self) -> ServerLook | None:
        """One look, written down; None where there is nothing to be seen (any more)."""
        try:
            answer = self._http.get("/metrics", timeout=10.0)
            if answer.status_code != 200:
                return None
            rss_bytes = None if self._process is None else self._process.memory_info().rss
        except (httpx.TransportError, psutil.Error):
            return None
        look = ServerLook(time.time(), samples(answer.text), rss_bytes)
        self._file.write(to_json(look))
        return look

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.look()


def _is_settled_by(name: str) -> bool:
    return name.startswith(("mlxcel_batch_", "mlxcel_completion_", "mlxcel_request_"))

"""``make fuzz``: shoot at a server of a tiny model with all kinds of requests, and see that nothing comes of it.

No 5xx but 503 with Retry-After, no answer that the server's OpenAPI document does not tell, no crash; afterwards no
slot, block or socket is missing, and memory has not grown. Writes the verdict, each shot that was answered wrongly and
the server's log to a folder; exit code 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import httpx

from app.engine.blas import preload
from loadtest.contestants import ROOT, Running, ours, running
from loadtest.fuzz.aftermath import Watched, log_faults
from loadtest.fuzz.campaign import Campaign, Tally
from loadtest.fuzz.documented import made_ahead
from loadtest.fuzz.judge import Judge
from loadtest.tiny_model import build_tiny_model

MAX_BODY_BYTES = 1 << 20
# A small window in a small pool: a request ends soon even if it forgets to say when, and blocks run out now and then.
WINDOW = 96
SETTINGS = {
    "MAX_QUEUE_DEPTH": "16",
    "KV_CACHE_BUDGET": "256K",
    "KV_BLOCK_SIZE": "16",
    "ENABLE_PREEMPTION": "true",
    "DRAFT_KIND": "prompt-lookup",
    "MAX_BODY_BYTES": str(MAX_BODY_BYTES),
    "RESPONSE_STORE": "256K",  # full after the first third, so that what grows later is no store
    "BLAS_THREADS": "1",  # the model is too small for more
    "LOG_FORMAT": "json",
}
ROWS = 4


def attack(server: Running, seed: int, num_requests: int) -> tuple[Tally, list[str], int | None]:
    """Run a campaign against a server; gives what came of it, the faults, and by how many bytes its memory grew."""
    url = httpx.URL(server.url)
    document = httpx.get(f"{server.url}/openapi.json", trust_env=False).raise_for_status().json()
    assert server.pid is not None
    began_s = time.monotonic()

    def look(tally: Tally) -> None:
        rss_bytes = watched.look()
        print(
            f"{time.monotonic() - began_s:6.0f} s  {tally.num_requests:7} requests  {len(tally.findings)} findings"
            f"  {rss_bytes / 2**20:5.0f} MiB  {dict(sorted(tally.statuses.items()))}",
            file=sys.stderr,
            flush=True,
        )

    with Watched(server.url, server.pid) as watched:
        with made_ahead(document, server.model, seed) as documented:
            address, judge = (url.host, url.port or 80), Judge(document)
            tally = Campaign(address, judge, documented, seed, num_requests, MAX_BODY_BYTES).run(look)
        faults = [f"{finding.fault} ({finding.shot.kind}, {finding.shot.asks})" for finding in tally.findings]
        return tally, faults + watched.faults(), watched.growth_bytes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="unset: the time")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    preload("auto", "auto")
    from app.engine import loader

    with tempfile.TemporaryDirectory() as folder:
        embedded = loader.model_directory("embedded", Path(folder), offline=True)
        model = build_tiny_model(embedded, Path(folder) / "tiny", WINDOW)
        with running(ours(model, ROWS, **SETTINGS), options.out) as server:
            print(f"seed {options.seed}, {server.url}", file=sys.stderr)
            tally, faults, growth_bytes = attack(server, options.seed, options.requests)
    faults += log_faults(options.out / "mlxcel.log")
    if server.exit_code != 0:
        faults.append(f"the server ended with exit code {server.exit_code}")
    for number, finding in enumerate(tally.findings, 1):
        (options.out / f"finding-{number}.http").write_bytes(finding.shot.data)
    verdict = {
        "seed": options.seed,
        "requests": tally.num_requests,
        "kinds": dict(tally.kinds),
        "answers": {str(status): count for status, count in sorted(tally.statuses.items())},
        "memory_growth_bytes": growth_bytes,
        "faults": faults,
    }
    (options.out / "verdict.json").write_text(json.dumps(verdict, indent=2) + "\n")
    print(json.dumps(verdict, indent=2))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

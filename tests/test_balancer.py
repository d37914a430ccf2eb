"""HAProxy with the fleet's own configuration in front of two real servers."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest
import yaml

from tests.serving import ROOT, ServerProcess, filled, free_port, serving, wait_for_load, wait_ready

HAPROXY = shutil.which("haproxy", path="/usr/local/bin:/usr/bin:/usr/sbin:/opt/homebrew/bin")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
CONFIG = (ROOT / "ops/haproxy/haproxy.cfg").read_text()
BACKEND = (ROOT / "ansible/roles/fleet_balancer/templates/backend.cfg.j2").read_text()
PLACES = 2
SECONDS = {"s": 1, "m": 60, "h": 3600}


@contextmanager
def two_servers(folder: Path, model: Path, **settings: str) -> Iterator[list[ServerProcess]]:
    given = {"MODEL": str(model), "BLAS": "none", "N_PARALLEL": str(PLACES), "DRAIN_TIMEOUT": "120"} | settings
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(folder, wait=False, **given)) for _ in range(2)]
        for server in servers:
            wait_ready(server)
        yield servers


@pytest.fixture(scope="module")
def servers(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with two_servers(tmp_path_factory.mktemp("servers"), tiny_model_dir) as both:
        yield both


@contextmanager
def balanced(folder: Path, servers: list[ServerProcess], affinity_bytes: int = 0) -> Iterator[str]:
    """HAProxy as the role configures it, but for its ports and its socket; gives its address."""
    port = free_port()
    hosts = {
        f"mac-{number}": {"ansible_host": "127.0.0.1", "mlxcel_port": server.url.rsplit(":", 1)[1]}
        for number, server in enumerate(servers)
    }
    backend = jinja2.Template(BACKEND, undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    text = CONFIG + backend.render(
        fleet_balancer_affinity_bytes=affinity_bytes, groups={"mlxcel_servers": list(hosts)}, hostvars=hosts
    )
    for old, new in (
        ("bind :8080", f"bind 127.0.0.1:{port}"),
        ("bind :8405", f"bind 127.0.0.1:{free_port()}"),
        ("/var/lib/haproxy/admin.sock", f"{folder}/admin.sock"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "haproxy.cfg").write_text(text)
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen([str(HAPROXY), "-db", "-f", folder / "haproxy.cfg"], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(url)
        yield url
    finally:
        process.kill()
        process.wait()


def wait_until_up(url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("HAProxy answers nobody")


def ask(url: str, prompt: str = "Hi", **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0} | more
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def refused(server: ServerProcess) -> int:
    """How often a server has answered with a status over 499."""
    found = re.search(r'mlxcel_requests_total\{status="5xx"\} (\d+)', server.http.get("/metrics").text)
    assert found
    return int(found[1])


def completed(servers: list[ServerProcess]) -> list[int]:
    return [server.http.get("/health").json()["batch"]["total_completed"] for server in servers]


def test_a_server_that_is_full_draining_or_dead_is_passed_over(tiny_model_dir: Path, tmp_path: Path) -> None:
    with two_servers(tmp_path, tiny_model_dir, MAX_QUEUE_DEPTH="0") as servers, balanced(tmp_path, servers) as url:
        full, other = servers
        with filled(full, PLACES):
            before = refused(full)
            assert {ask(url).status_code for _ in range(12)} == {200}
            assert refused(full) > before, "it was asked first, and the next one answered"
            # As long as it is in HAProxy's buffer, a body is sent again.
            assert {ask(url, padding="x" * 400_000).status_code for _ in range(8)} == {200}
            with filled(other, PLACES):
                nobody = ask(url)
            assert (nobody.status_code, nobody.json()["error"]["type"]) == (503, "overloaded")
            assert nobody.headers["retry-after"]
        wait_for_load(full, 0)
        wait_for_load(other, 0)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, full.url, max_tokens=400, ignore_eos=True)
            wait_for_load(full, 1)
            full.process.send_signal(signal.SIGTERM)
            assert {ask(url).status_code for _ in range(12)} == {200}
            assert running.result().status_code == 200
        assert full.process.wait(30) == 0
        assert {ask(url).status_code for _ in range(12)} == {200}


def test_bodies_that_are_too_long_and_pages_of_one_server_stay_outside(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    with balanced(tmp_path, servers) as url:
        assert ask(url, padding="x" * 2**20).status_code == 200, "over the buffer, and under the limit"
        before = sum(completed(servers))
        assert ask(url, padding="x" * 17 * 2**20).status_code == 413
        for path in ("/metrics", "/slots", "/v1/cache/stats"):
            assert httpx.get(url + path).status_code == 404
        assert sum(completed(servers)) == before


def test_who_waits_in_a_queue_is_not_given_up(servers: list[ServerProcess], tmp_path: Path) -> None:
    timeouts = {
        name: int(number) * SECONDS[unit]
        for name, number, unit in re.findall(r"timeout ([\w-]+) +(\d+)([smh])", CONFIG)
    }
    defaults = yaml.safe_load((ROOT / "ansible/roles/mlxcel/defaults/main.yml").read_text())
    assert min(timeouts["server"], timeouts["client"]) > defaults["mlxcel_queue_timeout"]
    with balanced(tmp_path, servers) as url, ThreadPoolExecutor(1) as pool:
        with filled(servers[0], PLACES), filled(servers[1], PLACES):
            waiting = pool.submit(ask, url)
            time.sleep(timeouts["connect"] + 1)
            assert not waiting.done()
        assert waiting.result().status_code == 200


def test_equal_beginnings_meet_where_that_is_asked_for(servers: list[ServerProcess], tmp_path: Path) -> None:
    with balanced(tmp_path, servers, affinity_bytes=128) as url:
        chosen = set()
        for word in ("lion", "castle", "ocean", "knight", "river", "tower", "forest", "island"):
            before = completed(servers)
            for number in range(4):
                assert ask(url, f"The {word}. " * 40 + str(number)).status_code == 200
            counts = [now - then for now, then in zip(completed(servers), before, strict=True)]
            assert sorted(counts) == [0, 4], word
            chosen.add(counts.index(4))
        assert chosen == {0, 1}, "and others go elsewhere"

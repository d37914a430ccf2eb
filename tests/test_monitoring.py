"""What watches the fleet: alert rules by their own unit tests, and every panel of a dashboard by a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ServerProcess, free_port

OPS = Path(__file__).parent.parent / "ops"
PROMTOOL, PROMETHEUS, HAPROXY = (
    shutil.which(name, path="/usr/local/bin:/usr/bin:/usr/sbin:/opt/homebrew/bin")
    for name in ("promtool", "prometheus", "haproxy")
)
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
DASHBOARDS = sorted((OPS / "grafana").glob("*.json"))


def run(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "compose.yml"])
def test_the_configuration_is_accepted(name: str) -> None:
    run(PROMTOOL, "check", "config", OPS / "prometheus" / name)


@needs_promtool
def test_every_alert_comes_when_it_should() -> None:
    run(PROMTOOL, "test", "rules", OPS / "prometheus/rules_test.yml")
    names = set(re.findall(r"alert: (\w+)", (OPS / "prometheus/rules.yml").read_text()))
    tested = set(re.findall(r"alertname: (\w+)", (OPS / "prometheus/rules_test.yml").read_text()))
    assert names == tested


def test_every_alert_has_its_paragraph() -> None:
    names = set(re.findall(r"alert: (\w+)", (OPS / "prometheus/rules.yml").read_text()))
    page = (OPS.parent / "docs/operations.md").read_text()
    assert {name for name in names if f"**{name}**" not in page} == set()


@needs_promtool
def test_the_exposition_is_clean(server: ServerProcess) -> None:
    lines = server.http.get("/metrics").text.splitlines(keepends=True)
    text = "".join(line for line in lines if "llamacpp:" not in line)  # names with a colon, as llama-server has them
    assert text.count("\n# TYPE ") > 20
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_haproxy
@pytest.mark.parametrize("affinity", ["", "    balance hash req.body,bytes(0,512)\n    hash-type consistent\n"])
def test_haproxy_takes_its_configuration(tmp_path: Path, affinity: str) -> None:
    servers = tmp_path / "servers.cfg"
    servers.write_text(f"backend mlxcel\n{affinity}    server mac-01 127.0.0.1:8000\n")
    told = run(HAPROXY, "-c", "-f", OPS / "haproxy/haproxy.cfg", "-f", servers)
    assert "ALERT" not in told
    assert "WARNING" not in told


@needs_haproxy
def test_haproxy_takes_the_servers_of_compose() -> None:
    run(HAPROXY, "-c", "-f", OPS / "haproxy/haproxy.cfg", "-f", OPS / "haproxy/compose.cfg")


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A Prometheus with the project's own rules that has scraped a server at work; its address and the server's."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(OPS / "prometheus/rules.yml", folder)
    config = (OPS / "prometheus/prometheus.yml").read_text().replace("scrape_interval: 5s", "scrape_interval: 500ms")
    (folder / "prometheus.yml").write_text(config)
    (folder / "targets").mkdir()
    instance = server.url.removeprefix("http://")
    (folder / "targets/mlxcel.json").write_text(json.dumps([{"targets": [instance]}]))
    url = f"http://127.0.0.1:{free_port()}"
    command = [str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={url[7:]}"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not ask(url, 'mlxcel_slots{job="mlxcel"}'):
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        for prompt in ("Once upon a time", "There was a king"):
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            assert server.post("/v1/completions", body).status_code == 200
        while not ask(url, "rate(mlxcel_batch_decode_tokens_total[1m]) > 0"):
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield url, instance
    finally:
        process.kill()
        process.wait()


def ask(url: str, expression: str) -> list[Any]:
    """The rows that an instant query gives; none while Prometheus does not answer yet."""
    try:
        response = httpx.get(f"{url}/api/v1/query", params={"query": expression})
    except httpx.TransportError:
        return []
    if response.status_code == 503:  # it listens, and reads its own files yet
        return []
    answer = response.json()
    assert answer["status"] == "success", answer
    rows: list[Any] = answer["data"]["result"]
    return rows


@needs_prometheus
@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_panel_shows_something(prometheus: tuple[str, str], file: Path) -> None:
    url, instance = prometheus
    board = json.loads(file.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 10
    assert [one for one in expressions if not ask(url, one.replace("$instance", instance))] == []


@needs_prometheus
def test_what_every_alert_looks_at_is_there(prometheus: tuple[str, str]) -> None:
    """Without its limits an alert's expression has an answer, so it can only be silent because nothing is wrong."""
    url, _ = prometheus
    expressions = alert_expressions(url)
    assert len(expressions) == len(re.findall("alert:", (OPS / "prometheus/rules.yml").read_text()))
    bare = {name: re.sub(r" (==|>|<) [\d.]+", "", expression) for name, expression in expressions.items()}
    assert all(bare[name] != expressions[name] for name in bare)
    assert [name for name in bare if not ask(url, bare[name])] == []


def alert_expressions(url: str) -> dict[str, str]:
    """Every alert's expression, as Prometheus has understood it."""
    groups = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
    return {rule["name"]: rule["query"] for group in groups for rule in group["rules"]}


@needs_prometheus
def test_the_rules_are_loaded_and_nothing_fires(prometheus: tuple[str, str]) -> None:
    url, _ = prometheus
    groups = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
    assert [rule["health"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
    alerts = httpx.get(f"{url}/api/v1/alerts").json()["data"]["alerts"]
    assert [alert for alert in alerts if alert["state"] == "firing"] == []

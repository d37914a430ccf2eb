"""The playbooks on hosts of our own, over real ssh: deploy, upgrade under load, failure, rollback, drain, removal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet import hosts as fleet_hosts
from tests.fleet.hosts import Host
from tests.fleet.releases import make_python, make_release

ROOT = Path(__file__).parent.parent
ANSIBLE = shutil.which("ansible-playbook", path=f"{sys.prefix}/bin:{os.environ['PATH']}")
WHY_NOT = fleet_hosts.missing() or (None if ANSIBLE else "ansible-playbook is not installed")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
PORT = 8000
SEES_ALL = r"[Service]\nProtectHome=no\nPrivateTmp=no"
CLIENTS = 12
NUM_STREAMS = 120
PAUSE_S = 4.0


@dataclass(frozen=True)
class Played:
    """What a playbook did: host -> counts of ok, changed, failed, ..., and what it printed."""

    code: int
    stats: dict[str, dict[str, int]]
    text: str

    def count(self, what: str) -> dict[str, int]:
        return {host: counts[what] for host, counts in self.stats.items()}


@dataclass(frozen=True)
class Fleet:
    """Three servers under test and the variables that they are deployed with."""

    folder: Path
    servers: list[Host]
    gateway: str
    alone: Host
    linux: Host | None
    variables: dict[str, Any]

    def play(self, book: str, *options: str, inventory: str = "inventory", **variables: Any) -> Played:
        """Run a playbook against the fleet, or what another inventory names."""
        given = self.folder / "variables.json"
        given.write_text(json.dumps(self.variables | variables))
        done = subprocess.run(
            [
                str(ANSIBLE),
                f"ansible/{book}.yml",
                "-i",
                str(self.folder / f"{inventory}.json"),
                "-e",
                f"@{given}",
                *options,
            ],
            cwd=ROOT,
            env=os.environ
            | {
                "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"),
                "ANSIBLE_HOME": str(self.folder / "ansible"),
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
                "ANSIBLE_LOCALHOST_WARNING": "False",
                "ANSIBLE_SSH_ARGS": "-F none -o ControlMaster=auto -o ControlPersist=60s",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        text = done.stdout + done.stderr
        print(text)
        stats = {}
        for line in text.partition("PLAY RECAP")[2].splitlines():
            host, _, counts = line.partition(" : ")
            if counts:
                stats[host.strip()] = {
                    name: int(number) for name, number in (pair.split("=") for pair in counts.split())
                }
        return Played(done.returncode, stats, text)


def write_inventory(path: Path, groups: dict[str, list[Host]]) -> None:
    variables = {
        "ansible_user": "root",
        "ansible_become": False,
        "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
    }
    inventory = {
        group: {
            "hosts": {
                host.name: variables | {"ansible_host": host.address, "ansible_ssh_private_key_file": str(host.key)}
                for host in members
            }
        }
        for group, members in groups.items()
    }
    path.write_text(json.dumps(inventory))


def state_of(host: Host) -> dict[str, str]:
    lines = host.run("/opt/mlxcel/current/service.sh status").splitlines()
    return dict(line.split("=", 1) for line in lines)


def version_of(host: Host) -> str:
    return str(httpx.get(f"http://{host.address}:{PORT}/props").json()["build_info"].split("-")[1])


@pytest.fixture(scope="module")
def fleet(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model = folder / "tiny"
    shutil.copytree(tiny_model_dir, model)
    sums = [sys.executable, str(ROOT / "ansible/roles/mlxcel/files/sums.py"), "write", str(model)]
    subprocess.run(sums, check=True)
    names = ["mac-01", "mac-02", "mac-03", "gateway", "mac-alone"] + ["linux-01"] * Path(
        "/lib/systemd/systemd"
    ).exists()
    with fleet_hosts.hosts(folder, names) as made:
        servers, (gateway, alone, *others) = made[:3], made[3:]
        linux = others[0] if others else None
        write_inventory(folder / "inventory.json", {"mlxcel_servers": servers, "mlxcel_balancers": [gateway]})
        write_inventory(folder / "linux.json", {"mlxcel_servers": [linux] if linux else []})
        yield Fleet(
            folder,
            servers,
            f"http://{gateway.address}:8080",
            alone,
            linux,
            {
                "mlxcel_fleet_platform": "Darwin",
                "mlxcel_fleet_python": sys._base_executable,
                "mlxcel_fleet_release": str(make_release(folder, "0.1.0")),
                "mlxcel_fleet_models": [{"name": "tiny", "src": str(model)}],
                "mlxcel_fleet_min_disk_gb": 1,
                "mlxcel_fleet_throttle_s": 1,
                "mlxcel_fleet_ready_timeout_s": 20,
                "mlxcel_fleet_canary_answer": ".",
                "mlxcel_fleet_wired_limit_mb": 49152,
                "mlxcel_model": "/opt/mlxcel/models/tiny",
                "mlxcel_port": PORT,
                "mlxcel_kv_cache_budget": "64M",
                "mlxcel_blas": "none",
            },
        )


def test_a_check_of_bare_hosts_tells_and_touches_nothing(fleet: Fleet) -> None:
    played = fleet.play("upgrade", "--check", "--diff", mlxcel_fleet_serial="100%")
    assert played.code == 0
    assert "MLXCEL_KV_CACHE_BUDGET=64M" in played.text
    for host in fleet.servers:
        assert host.run("ls -d /opt/mlxcel /Library/LaunchDaemons/* 2>/dev/null", check=False) == ""


def test_the_whole_fleet_from_nothing(fleet: Fleet) -> None:
    played = fleet.play("site", mlxcel_fleet_serial="100%")
    assert played.code == 0
    for host in fleet.servers:
        state = state_of(host)
        assert state["running"] == state["current"] != ""
        assert version_of(host) == "0.1.0"
        assert host.run("sysctl -n iogpu.wired_limit_mb").strip() == "49152"
        assert host.run(f"ps -o user= -p {state['pid']}").strip() == "_mlxcel"
        secret = host.run("stat -c '%U %a' /opt/mlxcel/current/secrets.env").split()
        assert secret == ["root", "640"]
    assert httpx.get(f"{fleet.gateway}/health").status_code == 200


def test_a_second_run_changes_nothing(fleet: Fleet) -> None:
    before = [state_of(host) for host in fleet.servers]
    played = fleet.play("site", mlxcel_fleet_serial="100%")
    assert played.code == 0
    assert set(played.count("changed").values()) == {0}
    assert [state_of(host) for host in fleet.servers] == before


def test_a_setting_that_is_not_allowed_reaches_no_server(fleet: Fleet) -> None:
    before = [state_of(host) for host in fleet.servers]
    for wrong in ({"mlxcel_n_parallel": "many"}, {"mlxcel_prot": 8080}):
        played = fleet.play("upgrade", "-l", "mac-01", **wrong)
        assert played.code != 0
        (name,) = wrong
        assert name in played.text or name.upper() in played.text
    assert [state_of(host) for host in fleet.servers] == before


def stream(url: str, num_tokens: int = 60) -> tuple[int, int, bool]:
    """Status, events and whether the end was a proper one, of one streamed answer."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        chunks = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
        return (
            response.status_code,
            len(chunks),
            lines[-1:] == ["data: [DONE]"] and not any("error" in c for c in chunks),
        )


def test_an_upgrade_under_load_cuts_no_stream(fleet: Fleet) -> None:
    release = make_release(fleet.folder, "0.1.1")
    fleet.variables["mlxcel_fleet_release"] = str(release)
    is_over = threading.Event()

    def keep_asking() -> list[tuple[int, int, bool]]:
        """Streams one after another, with a pause: the hosts share this machine's cores with whoever deploys."""
        answers = []
        while not is_over.is_set() or len(answers) < NUM_STREAMS // CLIENTS:
            answers.append(stream(fleet.gateway))
            is_over.wait(PAUSE_S)
        return answers

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        upgrade = pool.submit(fleet.play, "upgrade")
        upgrade.add_done_callback(lambda _: is_over.set())
        clients = [pool.submit(keep_asking) for _ in range(CLIENTS)]
        answers = [answer for client in clients for answer in client.result()]
    assert upgrade.result().code == 0
    assert len(answers) >= NUM_STREAMS
    assert {(status, proper) for status, _, proper in answers} == {(200, True)}
    assert [version_of(host) for host in fleet.servers] == ["0.1.1"] * 3


def test_a_release_that_fails_stops_at_the_first_host_and_is_taken_back(fleet: Fleet) -> None:
    before = [state_of(host) | {"pid": ""} for host in fleet.servers]
    pids = [state_of(host)["pid"] for host in fleet.servers[1:]]
    broken = make_release(
        fleet.folder, "0.1.2", {"app/runtime.py": ('log.info("loading %s", path)', 'raise StartError("broken")')}
    )
    played = fleet.play("upgrade", mlxcel_fleet_release=str(broken), mlxcel_fleet_ready_timeout_s=6)
    assert played.code != 0
    assert "back on generation" in played.text
    assert [state_of(host) | {"pid": ""} for host in fleet.servers] == before
    assert [state_of(host)["pid"] for host in fleet.servers[1:]] == pids, "nobody has touched the others"
    assert version_of(fleet.servers[0]) == "0.1.1"
    assert {stream(fleet.gateway)[::2] for _ in range(6)} == {(200, True)}
    assert "0.1.2" not in fleet.servers[0].run("ls /opt/mlxcel/generations/*/release/lib/python*/site-packages")


def test_a_release_with_more_errors_than_the_one_before_is_taken_back(fleet: Fleet) -> None:
    """It starts, and it answers; but every second request is refused, and the one before refused none."""
    before, version = state_of(fleet.servers[0]) | {"pid": ""}, version_of(fleet.servers[0])
    old = "    unknown = unknown_fields(kind, value)"
    new = """    _read.asked = getattr(_read, "asked", 0) + 1
    if _read.asked % 2 == 0:
        raise InvalidRequest("broken", "n")
"""
    broken = make_release(fleet.folder, "0.1.3", {"app/api/completions.py": (old, new + old)})
    played = fleet.play("upgrade", "-l", "mac-01", mlxcel_fleet_release=str(broken))
    assert played.code != 0
    assert "at most 0 errors" in played.text
    assert "back on generation" in played.text
    assert state_of(fleet.servers[0]) | {"pid": ""} == before
    assert version_of(fleet.servers[0]) == version


def test_launchd_is_played_as_the_contract_has_it(fleet: Fleet) -> None:
    """The same script asks the stand-in here and launchd itself on a Mac (`make mac-contract`)."""
    claims = fleet.servers[0].run(f"sh {ROOT}/launchd/contract.sh").splitlines()
    assert len(claims) > 10
    assert [claim for claim in claims if not claim.startswith("so: ")] == []


def test_a_killed_server_comes_back(fleet: Fleet) -> None:
    host = fleet.servers[0]
    pid = state_of(host)["pid"]
    host.run(f"kill -9 {pid}")
    wait_for_restart(host, pid)


def test_a_restart_that_was_forgotten_is_made_up_for(fleet: Fleet) -> None:
    """As after a run that failed between writing a generation and restarting: what runs is not what is current."""
    host = fleet.servers[0]
    state = state_of(host)
    host.run(f"echo 000000000000 > /opt/mlxcel/run/generation && [ {state['pid']} -gt 0 ]")
    played = fleet.play("upgrade", "-l", "mac-01")
    assert played.code == 0
    assert state_of(host)["running"] == state["current"]
    assert state_of(host)["pid"] != state["pid"]


def test_rollback_and_drain(fleet: Fleet) -> None:
    assert fleet.play("rollback", "-l", "mac-03").code == 0
    assert [version_of(host) for host in fleet.servers] == ["0.1.1", "0.1.1", "0.1.0"]
    with ThreadPoolExecutor(CLIENTS) as pool:
        long = [pool.submit(stream, fleet.gateway, 800) for _ in range(CLIENTS // 2)]
        assert fleet.play("drain", "-l", "mac-03").code == 0
        assert {one.result()[::2] for one in long} == {(200, True)}, "who was served when it began is served to the end"
    before = completed(fleet.servers[2])
    assert {stream(fleet.gateway)[::2] for _ in range(6)} == {(200, True)}
    assert completed(fleet.servers[2]) == before, "nobody was sent to it"


def test_uninstall_leaves_nothing(fleet: Fleet) -> None:
    assert fleet.play("uninstall").code == 0
    for host in fleet.servers:
        left = [path for path in host.upper.rglob("*") if "mlxcel" in path.name and not is_whiteout(path)]
        assert left == []
        assert host.run("launchctl list").splitlines() == ["PID\tStatus\tLabel"]
        assert host.run("id _mlxcel; pgrep -f mlxcel", check=False) == ""


# install.sh in a checkout of its own, which it may write to. The set-up is left out: it needs a network.
CHECKOUT = """mkdir -p /srv/mlxcel/.venv/bin /srv/mlxcel/ops && cd /srv/mlxcel
cp -r {root}/launchd {root}/ansible . && cp -r {root}/ops/haproxy ops/
printf '#!/bin/sh\n' > ops/setup.sh
for name in python ansible-playbook; do printf '#!/bin/sh\nexec {venv}/bin/%s "$@"\n' $name > .venv/bin/$name; done
chmod +x ops/setup.sh .venv/bin/*"""


def test_one_mac_by_itself_with_a_python_that_is_carried_along(fleet: Fleet) -> None:
    host, install = fleet.alone, "cd /srv/mlxcel && LC_ALL=C.UTF-8 launchd/install.sh"
    python = make_python(fleet.folder)
    given = fleet.folder / "alone.json"
    given.write_text(json.dumps(fleet.variables | {"mlxcel_fleet_python_archive": str(python)}))
    host.run(CHECKOUT.format(root=ROOT, venv=sys.prefix))
    assert "not installed" in host.run(f"{install} status")
    host.run(f"{install} install {fleet.variables['mlxcel_fleet_release']} -e @{given}")
    state = dict(line.split("=", 1) for line in host.run(f"{install} status").splitlines())
    assert state["running"] == state["current"] != ""
    assert host.run(f"readlink /proc/{state['pid']}/exe").startswith("/opt/mlxcel/python/bin/python3")
    assert "ready" in host.run("cat /opt/mlxcel/log/server.log")
    with pytest.raises(httpx.TransportError):  # one machine serves itself alone
        httpx.get(f"http://{host.address}:{PORT}/health")
    host.run(f"{install} uninstall -e @{given}")
    assert host.run("ls -d /opt/mlxcel /Library/LaunchDaemons/* 2>/dev/null; id _mlxcel 2>/dev/null", check=False) == ""
    assert host.run("launchctl list").splitlines() == ["PID\tStatus\tLabel"]


def test_a_linux_host_under_systemd(fleet: Fleet) -> None:
    host = fleet.linux
    if host is None:
        pytest.skip("systemd is not installed")
    on_linux = {"inventory": "linux", "mlxcel_fleet_platform": "", "mlxcel_fleet_label": "mlxcel"}
    # This tree and its Python may lie where the unit does not let a server look.
    host.run(f"cd /etc/systemd/system && mkdir mlxcel.service.d && printf '{SEES_ALL}' > mlxcel.service.d/test.conf")
    assert fleet.play("upgrade", **on_linux).code == 0
    pid = state_of(host)["pid"]
    assert host.run(f"ps -o user= -p {pid}").strip() == "_mlxcel"
    host.run(f"kill -9 {pid}")
    wait_for_restart(host, pid)
    assert fleet.play("uninstall", **on_linux).code == 0
    assert (
        host.run("ls -d /opt/mlxcel /etc/systemd/system/mlxcel.service 2>/dev/null; pgrep -f mlxcel", check=False) == ""
    )


def wait_for_restart(host: Host, pid: str) -> None:
    deadline = time.monotonic() + 60
    while state_of(host)["pid"] in ("", pid) or not is_ready(host):
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.2)


def is_ready(host: Host) -> bool:
    try:
        return httpx.get(f"http://{host.address}:{PORT}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def completed(host: Host) -> int:
    return int(httpx.get(f"http://{host.address}:{PORT}/health").json()["batch"]["total_completed"])


def is_whiteout(path: Path) -> bool:
    """How an overlay says that a file of the layer below is gone."""
    return path.is_char_device()

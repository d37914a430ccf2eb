"""The image that `make image` builds, run with a read-only root and no capability: asked, streamed from, stopped."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ROOT, free_port

BASE = "docker.io/library/debian:bookworm-slim"
IMAGE = "localhost/mlxcel"
BUILD_S = 900.0
STORY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "stream": True}


@dataclass(frozen=True)
class Podman:
    """Podman with images and containers of its own, in memory: what is on this machine is neither used nor changed."""

    folder: Path

    @property
    def command(self) -> list[str]:
        return ["podman", "--root", f"{self.folder}/images", "--runroot", f"{self.folder}/run"]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"CONTAINERS_CONF": f"{self.folder}/containers.conf", "TMPDIR": str(self.folder)}

    def __call__(self, *words: str, check: bool = True, timeout_s: float = 120.0) -> str:
        done = subprocess.run(
            [*self.command, *words], env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return (done.stdout + done.stderr).strip() if check else str(done.returncode)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("an image is built as root on Linux here")
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    folder = tmp_path_factory.mktemp("podman")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"containers need mounts: {mounted.stderr.strip()}")
    # Modest ones: mlx-lm lowers the limit of files for the process that imports it, and podman would ask for more.
    limits = ["nofile=2048:2048", "nproc=16384:16384"]
    runtime = next((name for name in ("runc", "crun") if shutil.which(name, path="/usr/bin:/usr/sbin:/bin")), "")
    (folder / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits={json.dumps(limits)}\n[engine]\nruntime="{runtime}"\n'
        'cgroup_manager="cgroupfs"\nevents_logger="file"\n'
    )
    one = Podman(folder)
    try:
        yield one
    finally:
        one("rm", "--all", "--force", check=False)
        for path in ("images/overlay", ""):
            subprocess.run(["umount", "--lazy", str(folder / path)], stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def image(podman: Podman) -> dict[str, Any]:
    """The image, without the embedded model; what ``podman image inspect`` says of it."""
    find_base(podman)
    flags = ["--quiet", "--network=host", *pip_flags(podman.folder)]
    command = [
        "make",
        "image",
        f"ENGINE={' '.join(podman.command)}",
        "EMBEDDED_MODEL=0",
        f"IMAGE_FLAGS={' '.join(flags)}",
    ]
    done = subprocess.run(command, cwd=ROOT, env=podman.environment, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (facts,) = json.loads(podman("image", "inspect", IMAGE))
    return dict(facts)


def find_base(podman: Podman) -> None:
    """Debian from its registry; where no registry is in reach, the same packages from Debian's archive."""
    if podman("pull", "--quiet", BASE, check=False) == "0":
        return
    if shutil.which("mmdebstrap") is None:
        pytest.skip(f"{BASE} cannot be pulled, and mmdebstrap is not installed")
    archive = podman.folder / "base.tar"
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=apt", "bookworm", str(archive)],
        env=podman.environment,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    if made.returncode != 0:
        pytest.skip(f"neither a registry nor Debian's archive is in reach: {made.stderr.strip()[-300:]}")
    podman("import", "--quiet", "--change", "ENV PATH=/usr/sbin:/usr/bin:/sbin:/bin", str(archive), BASE)
    archive.unlink()


def pip_flags(folder: Path) -> list[str]:
    """So that pip finds, during the build alone, what it finds here: an index, and who vouches for it."""
    lines, flags = ["[global]"], []
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.startswith("global.index"):
            lines.append(f"{name.removeprefix('global.')} = {ast.literal_eval(value)}")
    certificate = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if certificate:
        lines.append("cert = /run/pip.crt")
        flags.append(f"--volume={certificate}:/run/pip.crt:ro")
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return [*flags, f"--volume={folder}/pip.conf:/etc/pip.conf:ro"]


@dataclass(frozen=True)
class Container:
    """A running server; ``http`` talks to it."""

    podman: Podman
    name: str
    http: httpx.Client

    def run(self, command: str) -> str:
        return self.podman("exec", self.name, "sh", "-c", command)


@pytest.fixture(scope="module")
def container(podman: Podman, image: dict[str, Any], tiny_model_dir: Path) -> Iterator[Container]:
    port = free_port()
    safety = ["--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--tmpfs=/tmp", "--network=host"]
    given = {"MODEL": "/model", "HOST": "127.0.0.1", "PORT": str(port), "KV_CACHE_BUDGET": "64M", "DRAIN_TIMEOUT": "80"}
    given["BLAS_THREADS"] = "1"  # two wait for each other where anything else runs
    settings = [f"--env=MLXCEL_{name}={value}" for name, value in given.items()]
    command = ["run", "--detach", "--name=server", "--pull=never", "--health-interval=disable", *safety, *settings]
    podman(*command, f"--volume={tiny_model_dir}:/model:ro", IMAGE)
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120))
        began_s = time.monotonic()
        while not is_ready(http):
            assert time.monotonic() < began_s + 120, podman("logs", "server")
            time.sleep(0.05)
        print(f"image: {image['Size'] / 2**20:.0f} MiB bare; ready {time.monotonic() - began_s:.1f} s after its start")
        yield Container(podman, "server", http)


def is_ready(http: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return http.get("/health/ready").status_code == 200
    return False


def test_what_the_image_says_of_itself(image: dict[str, Any]) -> None:
    config = image["Config"]
    assert config["User"] == "10001"
    assert config["StopSignal"] == "SIGTERM"
    assert "healthcheck.py" in " ".join(image["Healthcheck"]["Test"])
    labels = {name.removeprefix("org.opencontainers.image.") for name in config["Labels"]}
    assert {"title", "description", "licenses", "version", "revision"} <= labels
    assert "PIP_CERT" not in " ".join(config["Env"])
    assert image["Size"] < 800 * 2**20


def test_it_runs_without_any_right(container: Container) -> None:
    status = dict(line.split(":\t", 1) for line in container.run("cat /proc/1/status").splitlines() if ":\t" in line)
    assert status["Uid"].split() == ["10001"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert container.run("touch /opt/mlxcel/x 2>/dev/null || touch /x 2>/dev/null || echo refused") == "refused"
    assert container.run("for name in cc gcc g++ clang make pip; do command -v $name; done; true") == ""
    assert container.podman("healthcheck", "run", "server", check=False) == "0"
    assert "libblis" in container.podman("logs", "server")


def events(http: httpx.Client, num_tokens: int) -> list[str]:
    with http.stream("POST", "/v1/completions", json=STORY | {"max_tokens": num_tokens}) as response:
        assert response.status_code == 200
        return [line[6:] for line in response.iter_lines() if line.startswith("data: ")]


def test_it_streams_and_a_stop_in_the_middle_cuts_nothing(container: Container) -> None:
    assert len(events(container.http, 50)) == 52
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(events, container.http, 1000)
        while not running.done() and container.http.get("/health").json()["batch"]["active_sequences"] == 0:
            time.sleep(0.02)
        assert not running.done(), "its end was to come after the stop"
        container.podman("stop", "--time=90", "server")
        told = running.result()
    assert (len(told), told[-1]) == (1002, "[DONE]")
    assert container.podman("inspect", "--format={{.State.ExitCode}}", "server") == "0"
    assert "weights and pool freed" in container.podman("logs", "server")

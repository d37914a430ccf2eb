"""What is deployed with: lint, job files that launchd would take, the role's variables, and the wheelhouse."""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml

from app.settings import Settings, variable
from ops import wheelhouse
from ops.argument_specs import ROLE, option_of, render_specs
from tests.fleet.launchd import read_job
from tests.fleet.releases import make_release

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("launchd/*.sh"), *ROOT.glob("ansible/roles/*/files/*.sh"), *ROOT.glob("ops/**/*.sh")])
YAML_RULES = (
    "{extends: default, rules: {document-start: disable, line-length: disable, braces: {max-spaces-inside: 1}}}"
)
MACS = {"mlxcel_fleet_label": "mlxcel.server", "mlxcel_fleet_home": "/opt/mlxcel", "mlxcel_fleet_account": "_mlxcel"}
NUMBERS = {"throttle_s": 15, "exit_timeout_s": 75, "open_files": 20000, "wired_limit_mb": 49152}


def tool(name: str) -> str:
    """Where a tool is; the test is skipped where it is not."""
    found = shutil.which(name, path=f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/opt/homebrew/bin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*words: object, **more: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, cwd=ROOT, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_scripts() -> None:
    run(tool("shellcheck"), *SCRIPTS)


def test_containerfile() -> None:
    # Versions of Debian's packages are what its stable release has.
    run(tool("hadolint"), "--ignore", "DL3008", "ops/Containerfile")


def test_yaml() -> None:
    files = [*ROOT.glob("ops/**/*.y*ml"), *ROOT.glob("ansible/**/*.yml")]
    assert len(files) > 20
    run(tool("yamllint"), "--strict", "-d", YAML_RULES, *files)


def test_containers_of_compose_have_no_rights_and_time_to_drain() -> None:
    server = yaml.safe_load((ROOT / "ops/compose.yaml").read_text())["services"]["server"]
    assert (server["read_only"], server["cap_drop"]) == (True, ["ALL"])
    assert server["security_opt"] == ["no-new-privileges:true"]
    drain_s = float(server["environment"]["MLXCEL_DRAIN_TIMEOUT"])
    assert int(server["stop_grace_period"].removesuffix("s")) >= drain_s + 5


def test_old_generations_go_with_their_releases_but_never_what_is_current_or_previous(tmp_path: Path) -> None:
    for age, (generation, release) in enumerate(
        [("a1", "1"), ("b2", "2"), ("c3", "3"), ("d4", "4"), ("e5", "4"), ("f6", "5")]
    ):
        folder = tmp_path / "generations" / generation
        folder.mkdir(parents=True)
        (tmp_path / "releases" / release).mkdir(parents=True, exist_ok=True)
        (folder / "release").symlink_to(f"../../releases/{release}")
        os.utime(folder, (1_000_000 + age, 1_000_000 + age))
    (tmp_path / "generations/.draft-x").mkdir()
    (tmp_path / "current").symlink_to("generations/b2")
    (tmp_path / "previous").symlink_to("generations/f6")
    script = ROOT / "ansible/roles/mlxcel/files/prune.sh"

    def prune(kept: int) -> list[str]:
        words = ["/bin/sh", str(script), str(tmp_path), str(kept)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()

    assert sorted(prune(3)) == ["generation a1", "generation c3", "release 1", "release 3"]
    assert sorted(path.name for path in (tmp_path / "generations").iterdir()) == ["b2", "d4", "e5", "f6"]
    assert sorted(path.name for path in (tmp_path / "releases").iterdir()) == ["2", "4", "5"]
    assert prune(3) == [], "again: nothing to do"
    assert sorted(prune(1)) == ["generation d4", "generation e5", "release 4"]


def test_playbooks_by_the_production_profile() -> None:
    path = f"{Path(tool('ansible-lint')).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    environment = {"PATH": path, "HOME": str(Path.home()), "ANSIBLE_CONFIG": "ansible/ansible.cfg"}
    run(
        tool("ansible-lint"),
        "--offline",
        "-q",
        "--profile",
        "production",
        "-c",
        "ansible/lint.yml",
        "ansible",
        env=environment,
    )


@pytest.mark.parametrize("name", ["server", "wired-limit"])
def test_job_files_are_what_launchd_takes(name: str, tmp_path: Path) -> None:
    text = (ROOT / f"launchd/{name}.plist.j2").read_text()
    variables = MACS | {f"mlxcel_fleet_{key}": value for key, value in NUMBERS.items()}
    job = tmp_path / "job.plist"
    job.write_text(jinja2.Template(text, undefined=jinja2.StrictUndefined).render(variables))
    job.chmod(0o644)
    if shutil.which("xmllint"):
        run("xmllint", "--noout", "--nonet", "--dtdvalid", ROOT / "tests/fleet/plist.dtd", job)
    if sys.platform == "darwin":
        run("plutil", "-lint", job)
    read = plistlib.loads(job.read_bytes())
    assert read["RunAtLoad"] is True
    if os.geteuid() == 0:
        assert read_job(job) == read
    if name == "server":
        assert read["Umask"] == 0o027
        assert read["ProcessType"] == "Interactive"
        assert read["ExitTimeOut"] == 75
        assert read["KeepAlive"] == {"SuccessfulExit": False}


def test_the_roles_variables_are_current() -> None:
    assert (ROLE / "meta/argument_specs.yml").read_text() == render_specs(), "run `make docs`"


def test_every_setting_is_a_typed_variable() -> None:
    options = yaml.safe_load(render_specs())["argument_specs"]["main"]["options"]
    assert {variable(name).lower() for name in Settings.model_fields} <= set(options)
    assert option_of("api_keys")["no_log"] is True
    kinds = {
        name: option_of(name)["type"] for name in ("port", "offline", "drain_timeout", "max_body_bytes", "model_alias")
    }
    assert kinds == {
        "port": "int",
        "offline": "bool",
        "drain_timeout": "float",
        "max_body_bytes": "str",
        "model_alias": "list",
    }
    assert option_of("device")["choices"] == ["auto", "gpu", "cpu"]


def test_every_own_variable_has_a_default_or_is_asked_for() -> None:
    own = yaml.safe_load((ROLE / "meta/fleet_options.yml").read_text())
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    assert set(own) == {name for name in defaults if name.startswith("mlxcel_fleet_")}


LOCK = """# written by a tool
mlx==1.0 ; sys_platform == 'darwin' or sys_platform == 'linux' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via mlxcel
mlx-cpu==1.0 ; sys_platform == 'linux' \\
    --hash=sha256:cc
    # via mlx
old==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:dd
plain==3.0 \\
    --hash=sha256:ee
"""


@pytest.mark.parametrize(
    ("platform", "python", "names"),
    [
        ("macos-arm64", "3.13", ["mlx==1.0", "plain==3.0"]),
        ("linux-x86_64", "3.11", ["mlx==1.0", "mlx-cpu==1.0", "old==2.0", "plain==3.0"]),
    ],
)
def test_markers_are_decided_for_the_host_and_not_for_this_machine(
    platform: str, python: str, names: list[str]
) -> None:
    entries = wheelhouse.requirements_for(LOCK, wheelhouse.environment_of(platform, python))
    assert [entry.split()[0] for entry in entries] == names
    assert entries[0] == "mlx==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb"


def test_every_lock_entry_is_understood() -> None:
    lock = (ROOT / "ops/requirements/serve.txt").read_text()
    entries = wheelhouse.requirements_for(lock, wheelhouse.environment_of("macos-arm64", "3.12"))
    assert len(entries) > 30
    assert all(
        re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry) for entry in entries
    )


def test_equal_sources_give_an_equal_archive(tmp_path: Path) -> None:
    first, second = (make_release(tmp_path / name, "0.1.0") for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()

"""One archive that installs a release on a host without a network: ``python -m ops.wheelhouse PLATFORM [PYTHON ...]``.

The archive is ``dist/mlxcel-VERSION-PLATFORM.tar``: ``wheels/`` and a ``requirements.txt`` that pins each by its hash,
as ops/requirements/ does, with the markers already decided. pip decides markers for the Python it runs on and not for
the platform it is asked about, so a Linux machine can only collect a Mac's wheels when that is done here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).parent.parent
LOCKS = ("serve.txt", "model.txt")
EPOCH = 315532800  # 1980, the first date a zip file knows: equal sources give an equal archive

MACOS = {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix", "platform_machine": "arm64"}
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
PLATFORMS: dict[str, tuple[dict[str, str], list[str]]] = {
    "macos-arm64": (MACOS, [f"macosx_{major}_0_arm64" for major in range(15, 10, -1)]),
    "linux-x86_64": (
        LINUX | {"platform_machine": "x86_64"},
        [f"manylinux_2_{minor}_x86_64" for minor in range(36, 16, -1)] + ["manylinux2014_x86_64"],
    ),
    "linux-aarch64": (
        LINUX | {"platform_machine": "aarch64"},
        [f"manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)] + ["manylinux2014_aarch64"],
    ),
}


def requirements_for(lock: str, environment: dict[str, str]) -> list[str]:
    """The entries of a lock that hold in an environment: name, version and hashes, without a marker."""
    entries = []
    for entry in re.split(r"\n(?=[a-zA-Z0-9])", re.sub(r"^\s*#.*\n?", "", lock, flags=re.MULTILINE)):
        head, *hashes = [part.strip() for part in entry.replace("\\\n", "\n").splitlines() if part.strip()]
        pinned, _, marker = head.partition(" ; ")
        if not marker or Marker(marker).evaluate(environment):
            entries.append(" \\\n    ".join([pinned.strip(), *hashes]))
    return entries


def environment_of(platform: str, python: str) -> dict[str, str]:
    """What markers see on a platform under CPython ``python``, as in 3.12."""
    return PLATFORMS[platform][0] | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }


def build_own_wheel(source: Path, folder: Path) -> str:
    """Build the project at ``source`` into ``folder``; gives its requirement, with its hash."""
    shutil.rmtree(source / "build", ignore_errors=True)  # setuptools would put files in that are gone from the tree
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*command, "-w", str(folder), str(source)], check=True, env=os.environ | {"SOURCE_DATE_EPOCH": str(EPOCH)}
    )
    (wheel,) = folder.glob("mlxcel-*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"mlxcel=={wheel.name.split('-')[1]} \\\n    --hash=sha256:{digest}"


def collect(platform: str, python: str, folder: Path) -> list[str]:
    """Download the locked wheels for one platform and Python into ``folder``; gives the requirements."""
    entries = [
        entry
        for lock in LOCKS
        for entry in requirements_for((ROOT / "ops/requirements" / lock).read_text(), environment_of(platform, python))
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("\n".join(entries) + "\n")
        wanted.flush()
        tags = [word for tag in [*PLATFORMS[platform][1], "any"] for word in ("--platform", tag)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *tags]
        subprocess.run([*command, "-d", str(folder), "-r", wanted.name], check=True)
    return entries


def pack(folder: Path, requirements: list[str], archive: Path) -> None:
    """Write ``folder``, which holds wheels/, and the requirements as an archive that equal content makes equal."""
    (folder / "requirements.txt").write_text("\n".join(dict.fromkeys(requirements)) + "\n")

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime, member.mode = EPOCH, 0o755 if member.isdir() else 0o644
        return member

    archive.parent.mkdir(exist_ok=True)
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, path.relative_to(folder).as_posix(), recursive=False, filter=plain)


def main(platform: str, *pythons: str) -> None:
    if platform not in PLATFORMS:
        raise SystemExit(f"wheelhouse: {platform} is none of {', '.join(PLATFORMS)}")
    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name) / "wheels"
        wheels.mkdir()
        own = build_own_wheel(ROOT, wheels)
        entries = [
            entry
            for python in pythons or (f"{sys.version_info[0]}.{sys.version_info[1]}",)
            for entry in collect(platform, python, wheels)
        ]
        version = own.split("==")[1].split()[0]
        archive = ROOT / "dist" / f"mlxcel-{version}-{platform}.tar"
        pack(Path(name), [*entries, own], archive)
    print(f"{archive.relative_to(ROOT)}  {archive.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:])

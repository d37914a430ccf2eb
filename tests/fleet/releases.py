"""Archives as `make wheelhouse` packs them, but small: the real wheel, and this environment's packages by a path.

And this environment's Python, as a standalone build that can be carried along.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ops.wheelhouse import build_own_wheel, pack

ROOT = Path(__file__).parent.parent.parent


def make_release(folder: Path, version: str, edits: Mapping[str, tuple[str, str]] = {}) -> Path:
    """The project as ``version``, with texts replaced in some files (path -> old, new); gives the archive."""
    source, content = folder / f"source-{version}", folder / f"content-{version}"
    source.mkdir(parents=True)
    shutil.copytree(ROOT / "app", source / "app", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", source)
    project = (ROOT / "pyproject.toml").read_text()
    (source / "pyproject.toml").write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', project))
    for name, (old, new) in edits.items():
        text = (source / name).read_text()
        assert text.count(old) == 1, (name, old)
        (source / name).write_text(text.replace(old, new))
    wheels = content / "wheels"
    wheels.mkdir(parents=True)
    own = build_own_wheel(source, wheels)
    archive = folder / f"mlxcel-{version}-test.tar"
    pack(content, [own, _neighbour(wheels)], archive)
    return archive


def make_python(folder: Path) -> Path:
    """This Python as ``python/bin`` and ``python/lib`` in a tar file; it finds its library by its own place."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    archive = folder / "python.tar"
    left_out = {"__pycache__", "site-packages", "dist-packages", "test", "idlelib", "tkinter"}

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = member.name.rsplit("/", 1)[-1]
        return None if name in left_out or name.startswith("config-") else member

    with tarfile.open(archive, "w") as tar:
        program = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
        tar.add(program, f"python/bin/{version}")
        link = tarfile.TarInfo("python/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, version
        tar.addfile(link)
        tar.add(sysconfig.get_path("stdlib"), f"python/lib/{version}", filter=wanted)
        if shared := sysconfig.get_config_var("INSTSONAME") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None:
            tar.add(Path(sysconfig.get_config_var("LIBDIR")) / shared, f"python/lib/{shared}")
    return archive


def _neighbour(wheels: Path) -> str:
    """A wheel that lends every package of this environment; gives its requirement."""
    path = wheels / "fleet_neighbour-1-py3-none-any.whl"
    info = "fleet_neighbour-1.dist-info"
    files = {
        "fleet_neighbour.pth": sysconfig.get_path("purelib") + "\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: fleet-neighbour\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(zipfile.ZipInfo(name), text)
    return f"fleet-neighbour==1 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"

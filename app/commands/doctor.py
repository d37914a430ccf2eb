"""Look at this machine and the settings, and say what stands in the way of a server.

Nothing is loaded, fetched or written. The exit code is 1 where something fails, and 0 with warnings only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from app.api.keys import Keys
from app.errors import AddressInUse, StartError
from app.screen import printable
from app.serve import check_certificate, free_address
from app.settings import Settings, load

GIB = 1 << 30
MIN_FREE_DISK_BYTES = GIB
FEW_FILES = 1024
FILES_BESIDE_CLIENTS = 64  # libraries, logs, model files
# How much larger than its file a model may become on a CPU, where packed weights turn into float32.
CPU_GROWTH = 8

# What to do where a look ends with an error, which says what is wrong.
REMEDIES = {
    "BLAS": "leave MLXCEL_BLAS and MLXCEL_BLAS_THREADS unset to have them chosen",
    "device": "leave MLXCEL_DEVICE unset; if MLX itself cannot be imported, install mlxcel again",
    "model": "name another one in MLXCEL_MODEL, or fetch it again; unset, it is the embedded model",
    "files": "name another one, or see that this user may read it",
    "address": "set MLXCEL_HOST and MLXCEL_PORT, or the certificate and its key, to what this user may use here",
}

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and, unless all is well, what to do about it."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--model", metavar="NAME", help="look at this one instead of MLXCEL_MODEL")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    checks = list(examine(arguments.model))
    failed = any(check.verdict == "fail" for check in checks)
    if arguments.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.verdict:4}  {check.name:{width}}  {printable(check.found)}")
            if check.remedy:
                print(f"{'':{width + 8}}{printable(check.remedy)}")
    return 1 if failed else 0


def examine(model: str | None = None) -> Iterator[Check]:
    """Every check in turn. Without settings that can be used, only what does not depend on them."""
    yield _looked("Python", _python)
    yield _looked("packages", _packages)
    try:
        settings = load({"model": model})
    except StartError as error:
        yield Check("settings", "fail", str(error), "put that right first: what depends on settings was left out")
        return
    yield Check("settings", "ok", f"fingerprint {settings.fingerprint}; `mlxcel serve --check` shows each")
    yield _looked("BLAS", _blas, settings)  # before anything that imports MLX
    yield _looked("device", _device, settings)
    model_check = _looked("model", _model, settings)
    yield model_check
    if model_check.verdict != "fail":
        yield _looked("memory", _memory, settings)
    yield _looked("disk", _disk, settings)
    yield _looked("files", _files, settings)
    yield _looked("address", _address, settings)
    yield _looked("open files", _open_files, settings)


def _looked(name: str, look: Callable[..., tuple[Verdict, str, str]], *given: Settings) -> Check:
    """What ``look`` gives: verdict, what was found, remedy. What it raises says what is wrong."""
    try:
        return Check(name, *look(*given))
    except (StartError, OSError, ImportError) as error:
        return Check(name, "fail", str(error), REMEDIES.get(name, "put that right, and look again"))


def _python() -> tuple[Verdict, str, str]:
    found = f"{platform.python_version()} for {platform.machine()} on {platform.system()} {platform.release()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return "fail", found, "MLX needs Apple silicon and a Python that is built for arm64"
    return "ok", found, ""


def _packages() -> tuple[Verdict, str, str]:
    """Whether MLX and mlx-lm are those that this version was tested with."""
    wanted = dict(
        re.findall(r"^(mlx|mlx-lm)(?:\[\w+\])?==([\d.]+)", "\n".join(metadata.requires("mlxcel") or ()), re.M)
    )
    try:
        installed = {name: metadata.version(name) for name in wanted}
    except metadata.PackageNotFoundError as error:
        return "fail", f"{error.name} is not installed", "install mlxcel again, with what it depends on"
    found = ", ".join(f"{name} {version}" for name, version in installed.items())
    if installed != wanted:
        tested = ", ".join(f"{name}=={version}" for name, version in wanted.items())
        return "warn", found, f"tested with {tested}: install those"
    return "ok", found, ""


def _blas(settings: Settings) -> tuple[Verdict, str, str]:
    from app.engine import blas

    if sys.platform != "linux":
        return "ok", "what the system brings", ""
    report = blas.preload(settings.blas, str(settings.blas_threads or "auto"))
    if report.path is None:
        asked_for = "MLXCEL_BLAS=none asks for it: leave that unset"
        return "warn", "MLX's own, which is slow", report.warning or asked_for
    return "ok", f"{report.path}, {report.threads} threads, {report.version}", ""


def _device(settings: Settings) -> tuple[Verdict, str, str]:
    from app.engine import loader

    loader.set_device(settings.device)
    name = loader.device_name()
    if sys.platform == "darwin" and name == "CPU" and settings.device == "auto":
        return "warn", name, "MLX finds no GPU: a virtual machine may not have one"
    return "ok", name, ""


def _model(settings: Settings) -> tuple[Verdict, str, str]:
    from app.engine import gguf, preflight

    where = _model_path(settings)
    if where is None:
        return "warn", f"{settings.model} is not here yet", "the first start fetches it from the hub"
    made = gguf.imported_directory(where, settings.cache_dir)
    if where.is_file() and made.exists():
        try:
            preflight.check_files(str(made))
        except StartError as error:
            return "fail", f"the import of {where} is damaged: {error}", f"delete {made}: the next start makes it anew"
    return "ok", f"{where}, {_mib(_stored_bytes(where))}", ""


def _memory(settings: Settings) -> tuple[Verdict, str, str]:
    """Against what is known without loading: the weights as they are stored, and a budget in bytes."""
    from app.engine import kernels, loader

    where = _model_path(settings)
    stored_bytes = _stored_bytes(where) if where else 0
    kv_bytes = settings.kv_cache_budget if isinstance(settings.kv_cache_budget, int) else 0
    available_bytes = loader.memory_bytes()
    growth = CPU_GROWTH if kernels.on_cpu() and settings.weight_dtype in ("auto", "float32") else 1
    found = f"{_mib(available_bytes)} for {_mib(stored_bytes)} of weights as stored, {_mib(kv_bytes)} of KV budget"
    if stored_bytes + kv_bytes > available_bytes:
        return "fail", found, "choose a smaller model or MLXCEL_KV_CACHE_BUDGET, or end what else uses memory"
    if stored_bytes * growth + kv_bytes > available_bytes:
        return "warn", found, f"weights grow up to {growth} times when they are loaded: it may be too little"
    return "ok", found, ""


def _model_path(settings: Settings) -> Path | None:
    """The file or folder of the model; None: it is still on the hub. Raises StartError."""
    from app.engine import gguf, loader, preflight

    if settings.model == "embedded":
        return gguf.embedded_gguf()
    if preflight.check_files(settings.model):
        return Path(settings.model).expanduser()
    try:
        return loader.model_directory(settings.model, settings.cache_dir, offline=True)
    except StartError:
        if settings.offline:
            raise
        return None


def _stored_bytes(model: Path) -> int:
    from app.engine import preflight

    return model.stat().st_size if model.is_file() else preflight.check_files(str(model))


def _disk(settings: Settings) -> tuple[Verdict, str, str]:
    """Room for imports, recordings and history, in the cache folder or where it will be made."""
    folder = settings.cache_dir
    there = _existing(folder)
    if not _is_writable(there):
        return "fail", f"{folder} cannot be written", "name another folder in MLXCEL_CACHE_DIR"
    free_bytes = shutil.disk_usage(there).free
    found = f"{_mib(free_bytes)} free for {folder}"
    if free_bytes < MIN_FREE_DISK_BYTES:
        return "warn", found, "imported models go there: make room, or name another folder in MLXCEL_CACHE_DIR"
    return "ok", found, ""


def _files(settings: Settings) -> tuple[Verdict, str, str]:
    """What a start reads and writes beside the model. Raises StartError."""
    keys = Keys((), settings.api_key_file)
    if (log := settings.log_file) and (log.is_dir() or not _is_writable(_existing(log.parent))):
        return "fail", f"MLXCEL_LOG_FILE={log} cannot be written", "name a file in a folder that this user may write to"
    if (folder := settings.record_dir) and not _is_writable(_existing(folder)):
        return "fail", f"MLXCEL_RECORD_DIR={folder} cannot be written", "name a folder that this user may write to"
    return "ok", f"{len(keys.current())} keys in a file" if keys else "no file of keys", ""


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def _is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _address(settings: Settings) -> tuple[Verdict, str, str]:
    try:
        free_address(settings.host, settings.port)
    except AddressInUse as error:
        return "warn", str(error), "unless it is the very server that is asked about"
    check_certificate(settings)
    return "ok", f"{settings.host}:{settings.port} is free" + (", with TLS" if settings.ssl_cert_file else ""), ""


def _open_files(settings: Settings) -> tuple[Verdict, str, str]:
    """Every client takes one."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.batch_rows + settings.max_queue_depth + FILES_BESIDE_CLIENTS
    if most == resource.RLIM_INFINITY:
        return "ok", "any number", ""
    remedy = "raise the limit before the start: `ulimit -n 4096`, or NumberOfFiles, LimitNOFILE"
    if most < needed:
        return "fail", f"at most {most}, and slots and queue alone need {needed}", remedy
    if most < FEW_FILES:
        return "warn", f"at most {most}", remedy
    return "ok", f"at most {most}", ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"

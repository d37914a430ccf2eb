"""An optimised BLAS for MLX on Linux: loaded into the global symbol scope, it takes the place of the slow bundled one.

This module imports nothing of MLX, since it has to run before ``mlx.core`` is imported.
"""

from __future__ import annotations

import ctypes
import glob
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.errors import StartError

# BLIS first: decoding multiplies few rows, and at 1 to 8 rows it takes about half of OpenBLAS's time and does not stall
# when another process holds a core (docs/benchmarks.md). Bare names are left to the system's own search.
CANDIDATES = (
    "/usr/lib/*-linux-gnu/blis-openmp/libblis.so.4",  # Debian, Ubuntu
    "/usr/lib64/libbliso.so.4",  # Fedora
    "/usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0",  # Debian, Ubuntu
    "/usr/lib64/libopenblasp.so.0",  # Fedora, RHEL
    "/usr/lib64/libopenblas_pthreads.so.0",  # openSUSE
    "/usr/lib/libopenblas.so",  # Arch
    "libopenblas.so.0",
)
# For BLIS the loop over the rows of the weights is the one to divide: MLX passes its row-major matrices turned round.
THREAD_VARIABLES = ("BLIS_IC_NT", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Of BLIS 0.9's kernels for x86-64 these are the quickest at 2 to 64 rows, on Intel's processors too; those for AVX-512,
# which it prefers where it knows the processor, take twice as long there (docs/benchmarks.md).
BLIS_KERNELS = b"zen3"
MOST_KERNELS = 10  # of x86-64; asked for a higher number, BLIS reads beyond its table
WARNING = (
    "no optimised BLAS was found: everything is several times slower, and decoding several requests together gains "
    "nothing; install one with `apt-get install libblis4-openmp` (Debian, Ubuntu) or name one in MLXCEL_BLAS"
)


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What ``preload`` did. ``path`` is None where nothing was loaded; ``version`` is empty where the library does not
    tell it. ``warning`` is one line for the log, or None."""

    path: str | None = None
    version: str = ""
    threads: int | None = None
    warning: str | None = None


def preload(setting: str, threads: str) -> BlasReport:
    """Load a BLAS for MLX. Call it before anything imports ``mlx.core``. Does nothing outside Linux.

    Args:
        setting: "auto" looks for BLIS, then for OpenBLAS; "none" loads nothing, anything else is the path of a library.
        threads: a number, or "auto" for the physical cores that this process may use.

    Raises:
        StartError: the named library cannot be loaded or is no BLAS, or ``threads`` is no positive number.
        RuntimeError: ``mlx.core`` is imported already, so that loading would have no effect.
    """
    if sys.platform != "linux" or setting == "none":
        return BlasReport()
    if "mlx.core" in sys.modules:
        raise RuntimeError("a BLAS has to be loaded before mlx.core is imported")
    if threads != "auto" and not (threads.isdecimal() and int(threads) > 0):
        raise StartError(f"MLXCEL_BLAS_THREADS is {threads}: give a positive number or auto")
    num_threads = usable_cores() if threads == "auto" else int(threads)
    # The libraries read these once, when they are loaded.
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(num_threads)))
    if setting != "auto":
        try:
            return _load(setting, num_threads)
        except (OSError, AttributeError) as error:
            raise StartError(f"MLXCEL_BLAS is {setting}, which cannot be loaded as a BLAS: {error}") from error
    for pattern in CANDIDATES:
        for path in sorted(glob.glob(pattern)) if "/" in pattern else [pattern]:
            try:
                return _load(path, num_threads)
            except (OSError, AttributeError):
                continue  # not there, of another architecture, or without the C interface that MLX calls
    return BlasReport(warning=WARNING)


def _load(path: str, num_threads: int) -> BlasReport:
    """Raises OSError where the library cannot be loaded, AttributeError where it lacks the C interface of BLAS."""
    # A library without the interface must not stay in the global scope, so it is looked at in a local one first.
    _ = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL).cblas_sgemm
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    if hasattr(library, "bli_arch_string") and _has_avx2():
        _choose_kernels(library)
    for name, tells in (("BLIS ", "bli_info_get_version_str"), ("", "openblas_get_config")):
        if hasattr(library, tells):
            function = getattr(library, tells)
            function.restype = ctypes.c_char_p
            return BlasReport(path, name + function().decode("ascii", "replace").strip(), num_threads)
    return BlasReport(path, "", num_threads)


def _choose_kernels(blis: ctypes.CDLL) -> None:
    """Say which kernels BLIS shall take, in the variable that it reads when it first multiplies: by number, as it
    counts them itself."""
    name_of = blis.bli_arch_string
    name_of.restype = ctypes.c_char_p
    number = next((number for number in range(MOST_KERNELS) if name_of(number) == BLIS_KERNELS), None)
    if number is not None:
        os.environ["BLIS_ARCH_TYPE"] = str(number)


@contextmanager
def packed(is_wanted: bool) -> Iterator[None]:
    """What is multiplied meanwhile BLIS first copies into an order of its own, if ``is_wanted``. Changes nothing with
    another BLAS.

    It does so by itself from 512 rows on. That is worth it from some 64 on, but not for fewer, where it would copy all
    weights for little use (docs/benchmarks.md).
    """
    switches = _packing() if is_wanted else ()
    for switch in switches:
        switch(ctypes.c_bool(True))
    try:
        yield
    finally:
        for switch in switches:
            switch(ctypes.c_bool(False))


@lru_cache(maxsize=1)
def _packing() -> tuple[Callable[..., Any], ...]:
    """BLIS's switches for either side of a product, which every product looks at."""
    symbols = ctypes.CDLL(None)
    try:
        return symbols.bli_pack_set_pack_a, symbols.bli_pack_set_pack_b
    except AttributeError:
        return ()


def _has_avx2() -> bool:
    return {"avx2", "fma"} <= set(_read("/proc/cpuinfo").split())


def usable_cores() -> int:
    """Physical cores this process may use: its CPU affinity without hyper-threads, and no more than its CPU quota."""
    cpus = os.sched_getaffinity(0)
    cores = {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    limit = math.ceil(int(quota) / int(period)) if quota.isdecimal() and period.isdecimal() else len(cores)
    return max(1, min(len(cores), limit))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""

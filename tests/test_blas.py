"""Loading a BLAS before MLX, each time in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.engine import blas
from app.errors import StartError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a BLAS is loaded on Linux only")

SCRIPT = """
import ctypes, dataclasses, json, os, sys
from app.engine.blas import preload
report = preload(*sys.argv[1:])
found = dataclasses.asdict(report)
found["variable"] = os.environ.get("OPENBLAS_NUM_THREADS")
found["visible"] = hasattr(ctypes.CDLL(None), "cblas_sgemm")
found["mlx"] = "mlx" in sys.modules
print(json.dumps(found))
"""


def preloaded(setting: str, threads: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, setting, threads],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        timeout=60,
    )
    return dict(json.loads(done.stdout))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread counts set here must not reach the processes of other tests."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@linux_only
def test_auto_loads_what_is_there_or_warns() -> None:
    found = preloaded("auto", "1")
    assert found["visible"] is (found["path"] is not None)
    if found["path"]:
        assert (found["threads"], found["variable"], found["warning"]) == (1, "1", None)
    else:
        assert "apt-get install libblis4-openmp" in found["warning"]
        assert "\n" not in found["warning"]
    assert not found["mlx"]


@linux_only
def test_blis_takes_the_kernels_that_decode_best() -> None:
    if not preloaded("auto", "1")["version"].startswith("BLIS 0.9"):
        pytest.skip("BLIS 0.9 is not the BLAS that is found here")
    if not blas._has_avx2():
        pytest.skip("no processor with AVX2")
    program = "from app.engine.blas import preload; preload('auto', '1'); import mlx.core as mx; m = mx.ones((8, 8)); "
    done = subprocess.run(
        [sys.executable, "-c", program + "mx.eval(mx.matmul(m, m, stream=mx.cpu))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"BLIS_ARCH_DEBUG": "1"},
        timeout=60,
    )
    assert "selecting sub-configuration 'zen3'" in done.stdout + done.stderr


PACKED = """
from app.engine.blas import _packing, packed, preload
preload("auto", "1")
assert len(_packing()) == 2
import mlx.core as mx
x, weight = mx.random.normal((100, 96)), mx.random.normal((200, 96))
mx.eval(plain := x @ weight.T)
with packed(True):
    mx.eval(other := x @ weight.T)
assert mx.allclose(plain, other, rtol=1e-4, atol=1e-4)
"""


@linux_only
def test_blis_packs_what_it_multiplies() -> None:
    if not preloaded("auto", "1")["version"].startswith("BLIS"):
        pytest.skip("BLIS is not the BLAS that is found here")
    subprocess.run([sys.executable, "-c", PACKED], check=True, cwd=Path(__file__).parent.parent, timeout=60)


def test_it_is_packed_meanwhile_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(blas, "_packing", lambda: (lambda flag: seen.append(flag.value),) * 2)
    with blas.packed(False):
        pass
    assert seen == []
    with blas.packed(True):
        assert seen == [True, True]
    assert seen == [True, True, False, False]


def test_it_is_no_longer_packed_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(blas, "_packing", lambda: (lambda flag: seen.append(flag.value),))
    with pytest.raises(KeyError), blas.packed(True):
        raise KeyError
    assert seen == [True, False]


def test_packing_is_nothing_to_another_blas() -> None:
    subprocess.run(
        [sys.executable, "-c", "from app.engine.blas import packed\nwith packed(True): pass"],
        check=True,
        cwd=Path(__file__).parent.parent,
        timeout=60,
    )


def test_none_loads_nothing() -> None:
    found = preloaded("none", "auto")
    assert (found["path"], found["warning"], found["visible"]) == (None, None, False)


@linux_only
def test_threads_are_the_usable_cores() -> None:
    found = preloaded("auto", "auto")
    assert found["variable"] == str(blas.usable_cores())
    assert 1 <= blas.usable_cores() <= len(os.sched_getaffinity(0))


@linux_only
def test_cpu_quota_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/fs/cgroup/cpu.max": "150000 100000"}
    monkeypatch.setattr(blas, "_read", lambda path: files.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert blas.usable_cores() == 2
    files["/sys/fs/cgroup/cpu.max"] = "max 100000"
    assert blas.usable_cores() == 8
    for cpu in range(8):  # two hyper-threads a core
        files[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{cpu % 4},{cpu % 4 + 4}"
    assert blas.usable_cores() == 4


@linux_only
def test_warns_where_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas, "CANDIDATES", ("/nowhere/*/libopenblas.so.0", "libnothing.so.0", "libc.so.6"))
    report = blas.preload("auto", "1")
    assert report == blas.BlasReport(warning=blas.WARNING)


@linux_only
@pytest.mark.parametrize("setting", ["/nowhere/libblas.so", "libc.so.6"])
def test_named_library_must_be_a_blas(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    with pytest.raises(StartError, match="MLXCEL_BLAS is " + setting):
        blas.preload(setting, "1")


@linux_only
@pytest.mark.parametrize("threads", ["0", "-1", "many", ""])
def test_threads_must_be_a_number(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    with pytest.raises(StartError, match="MLXCEL_BLAS_THREADS"):
        blas.preload("auto", threads)


@linux_only
def test_too_late_after_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    with pytest.raises(RuntimeError, match="before mlx"):
        blas.preload("auto", "auto")
    assert blas.preload("none", "auto") == blas.BlasReport()


def test_does_nothing_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.preload("auto", "auto") == blas.BlasReport()

"""How threads that compute wait for a core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ServerProcess

ROOT = Path(__file__).parent.parent
SCRIPT = """
import os, threading
from app.engine.threads import compute_in_batches

def policies():
    compute_in_batches()
    found.append(os.sched_getscheduler(0))
    below = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    below.start()
    below.join()

found = []
above = threading.Thread(target=policies)
above.start()
above.join()
assert found == [os.SCHED_BATCH] * 2, found
assert os.sched_getscheduler(0) == os.SCHED_OTHER
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")


def test_a_thread_and_those_it_starts_but_no_other() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, cwd=ROOT)


def test_nothing_fails_where_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.engine.threads import compute_in_batches

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    compute_in_batches()


def test_a_server_answers_at_once_while_it_computes_in_batches(server: ServerProcess) -> None:
    """The event loop is the process's first thread; the engine and what it has started come after it."""
    assert os.sched_getscheduler(server.process.pid) == os.SCHED_OTHER
    others = [int(name) for name in os.listdir(f"/proc/{server.process.pid}/task") if int(name) != server.process.pid]
    assert sum(os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in others) >= 2  # the engine's, and MLX's

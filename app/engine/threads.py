"""How the system shares its cores among the threads that compute."""

from __future__ import annotations

import os
from contextlib import suppress


def compute_in_batches() -> None:
    """From now on the calling thread, and every thread that it starts, waits for a free core when it is woken, in place
    of interrupting another (SCHED_BATCH, sched(7)). Call it before MLX is imported. Does nothing outside Linux.

    MLX wakes its own thread for every operation, some four hundred times a step, and two threads of a BLAS are as
    quick as the slower one: each that is interrupted makes both wait (docs/benchmarks.md).
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

"""Where the flight recorder's recordings go: to a file when something goes wrong, or to whoever asks."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from app.errors import FeatureOff, kind_and_place
from app.scheduler import recording
from app.scheduler.recorder import RecordedScheduler

log = logging.getLogger("mlxcel.recordings")

# How many files are kept in the folder: a fault that comes again and again must not fill the disk.
MAX_FILES = 16


class Recordings:
    """Reads one scheduler's recorder, from any thread. ``scheduler`` is None until the model has been loaded, and for
    good where recording is off."""

    def __init__(self, folder: Path) -> None:
        self.scheduler: RecordedScheduler | None = None
        self._folder = folder

    def read(self) -> dict[str, Any]:
        """The last ticks, ready for JSON.

        Raises:
            FeatureOff: nothing is recorded.
        """
        if self.scheduler is None:
            raise FeatureOff("The flight recorder is turned off on this server.")
        return recording.to_json(self.scheduler)

    def dump(self, why: str) -> None:
        """Write them to a file whose name says when and why, and drop the oldest files. What fails is logged: a dump is
        made when there is trouble enough already."""
        try:
            text = json.dumps(self.read(), separators=(",", ":"))
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{time.monotonic_ns()}-{why}.json"
            path.write_text(text)
            log.warning("the last ticks were written to %s (%s)", path, why)
            for old in sorted(self._folder.glob("*-*-*.json"))[:-MAX_FILES]:
                old.unlink()
        except FeatureOff:
            log.info("nothing is recorded: MLXCEL_RECORD_TICKS=0, or the model is not loaded yet")
        except Exception as error:
            log.error("the last ticks could not be written to %s: %s", self._folder, kind_and_place(error))

"""Which engine serves a model: the best of three paths that gives the model's own logits."""

from __future__ import annotations

import logging

from app.engine.dense import DenseEngine, DensePath
from app.engine.engine import Engine
from app.engine.groups import Groups
from app.engine.loader import LoadedModel
from app.engine.snapshots import Snapshots
from app.errors import StartError

log = logging.getLogger("mlxcel.engine")

DENSE_PATHS: tuple[DensePath, ...] = ("dense native batched", "per-row fallback", "one row at a time")


def open_engine(
    loaded: LoadedModel,
    num_blocks: int,
    block_size: int,
    backend: str = "auto",
    deterministic: bool = False,
    snapshots: Snapshots | None = None,
    groups: Groups | None = None,
) -> Engine | DenseEngine:
    """Ragged paged, dense native batched, per-row fallback, one row at a time, in this order. ``backend`` is auto,
    paged (that or none) or dense (not that). ``snapshots`` is what the two after that keep of chats. ``num_blocks`` are
    for tokens of all layers: the first path has so many for each of the ``groups`` that share them.

    Raises:
        StartError: no path serves it; the text has what the first one that may serve it does not do.
    """
    refusal: StartError | None = None
    if backend != "dense":
        try:
            num_groups = 1 if groups is None else groups.num_groups
            return Engine(loaded, num_blocks * num_groups, block_size, deterministic, groups)
        except StartError as error:
            if backend == "paged" or deterministic:
                raise
            refusal = error
    elif deterministic:
        raise StartError("MLXCEL_SDPA_DETERMINISTIC=1 is there for MLXCEL_DECODE_STORAGE_BACKEND=paged alone")
    for path in DENSE_PATHS:
        try:
            engine = DenseEngine(loaded, num_blocks, block_size, path, snapshots)
        except StartError as error:
            refusal = refusal or error
            log.info("not %s: %s", path, error)
            continue
        if refusal is not None:
            log.info("not ragged paged: %s", refusal)
        return engine
    assert refusal is not None
    raise refusal

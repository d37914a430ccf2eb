"""What a simulated host is made of: the real scheduler over real block tables, and an engine that computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.prefix_cache import PrefixCache
from app.scheduler.plan import Draw, Plan, Result
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A host as its settings would have it. ``max_queue_depth`` None: it never refuses."""

    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int = 1024
    block_size: int = 32
    prefix_cache: bool = True
    min_prefix: int = 32
    ttl_s: float | None = 3600.0
    max_queue_depth: int | None = 32

    def scheduler(self) -> tuple[Scheduler, BlockTables]:
        pool = BlockPool(self.num_blocks)
        cache = PrefixCache(pool, self.block_size, self.prefix_cache, self.min_prefix, self.ttl_s)
        tables = BlockTables(pool, cache, self.block_size)
        return Scheduler(self.config, tables), tables


class FakeEngine:
    """Computes nothing: the token drawn after any row is its position, as in ``workload.tokens_of``."""

    def step(self, plan: Plan) -> Result:
        return Result({row.request_id: (Draw(len(row.tokens)),) for row in plan.rows if row.draws})

"""The wiring: settings in, a worker with its engine, a service and an HTTP application out."""

from __future__ import annotations

import logging
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from app.api.app import create_app
from app.errors import StartError
from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.layout import Layout
from app.kv.prefix_cache import PrefixCache
from app.kv.sizing import size_pool
from app.metrics import Metrics
from app.recordings import Recordings
from app.request import SamplingParams
from app.scheduler.policy import SchedulerConfig
from app.scheduler.recorder import RecordedScheduler
from app.scheduler.scheduler import Scheduler
from app.scheduler.speculation import PromptLookup
from app.service import ModelCard, Service
from app.settings import Settings, foreign_variables
from app.text.chat import ChatText
from app.text.detokenizer import Vocabulary
from app.text.dialect import dialect_of
from app.text.grammar import Grammars
from app.text.infill import infill_of
from app.traces import PREFIX, traced
from app.worker import Worker

if TYPE_CHECKING:
    from app.engine.dense import DenseEngine
    from app.engine.engine import Engine
    from app.engine.loader import LoadedModel
    from app.engine.snapshots import Snapshots

log = logging.getLogger("mlxcel.runtime")

VERSION = metadata.version("mlxcel")
STOP_S = 1.0
# The fields of generation_config.json that stand in for what a request leaves out.
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Runtime:
    """Everything that serves one model, built inside a running event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recordings = Recordings(settings.record_dir or settings.cache_dir / "recordings")
        self._worker = Worker(
            self._load,
            settings.batch_rows + settings.max_queue_depth,
            settings.tick_timeout,
            lambda kind, seconds: self.metrics.observe_tick(kind, seconds),
            settings.queue_timeout,
            self._recordings.dump,
        )
        self.service = Service(self._worker, lambda *times: self.metrics.observe_request(*times), self._recordings.read)
        self.metrics = Metrics(self.service, VERSION, settings.fingerprint)
        untraced = create_app(self.service, settings, self.metrics)
        self._traced = traced(untraced, VERSION, foreign_variables(PREFIX))
        self.app: ASGIApp = self._traced or untraced
        self.failed = self._worker.failed

    async def start(self) -> None:
        """Load the model; return when requests are served.

        Raises:
            StartError: the model or the settings do not allow it.
        """
        await self._worker.start()

    async def drain(self, timeout_s: float) -> None:
        await self._worker.drain(timeout_s)

    async def stop(self) -> None:
        await self._worker.stop(STOP_S)

    def close(self, timeout_s: float) -> None:
        """Send the last traces."""
        if self._traced is not None:
            self._traced.close(timeout_s)

    def record(self) -> None:
        """Write the last ticks to a file."""
        self._recordings.dump("asked")

    def _load(self) -> tuple[Engine | DenseEngine, Scheduler]:
        """Runs on the engine thread, which alone may import MLX: the BLAS has to be there before it."""
        from app.engine import blas, preflight, threads

        settings = self._settings
        threads.compute_in_batches()
        stored_bytes = preflight.check_files(settings.model)
        report = blas.preload(settings.blas, str(settings.blas_threads or "auto"))
        if report.warning:
            log.warning("%s", report.warning)
        elif report.path:
            log.info("BLAS: %s, %d threads, %s", report.path, report.threads, report.version)
        from app.engine import kernels

        if settings.device == "cpu" or kernels.on_cpu():
            preflight.check_memory(settings.kv_cache_budget, stored_bytes)
        from app.engine import loader, paths
        from app.engine.groups import grouped

        loader.set_device(settings.device)
        loader.limit_memory(settings.cache_limit, settings.wired_limit)
        path = loader.model_directory(settings.model, settings.cache_dir, settings.offline)
        log.info("loading %s", path)
        loaded = loader.load(path, settings.weight_dtype, settings.adapter)
        # All that can be refused is refused before the weights are read, which takes the time.
        n_ctx = _window(settings, loaded)
        block_size = settings.kv_block_size or (64 if kernels.on_cpu() else 32)
        groups = grouped(loaded.kept.shapes, n_ctx)
        size = size_pool(
            settings.kv_cache_budget,
            bytes_per_token=groups.bytes_per_token or loaded.kept.bytes_per_token,
            block_size=block_size,
            num_slots=settings.batch_rows,
            window_tokens=n_ctx,
            available_bytes=loader.memory_bytes(),
            weight_bytes=loaded.weight_bytes,
            slot_bytes=loaded.kept.bytes_besides * (2 if settings.prompt_cache else 1),  # its own, and a snapshot
        )
        log.info("%s", size.explain)
        began_s = time.monotonic()
        loader.read_weights(loaded)
        log.info("%.1f MiB of weights loaded in %.1f s", loaded.weight_bytes / 2**20, time.monotonic() - began_s)
        engine = paths.open_engine(
            loaded,
            size.num_blocks,
            block_size,
            settings.decode_storage_backend,
            settings.sdpa_deterministic,
            self._snapshots(loaded, size.num_blocks * block_size) if settings.prompt_cache else None,
            groups,
        )
        log.info("Model %s decode path: %s", loaded.path.name, _explained(engine.decode_path))
        if engine.max_rows == 1:
            log.warning("Model %s does not support batched decode; clamping max_batch_size to 1", loaded.path.name)
        most_tokens = n_ctx if settings.kv_cache_budget == "none" else size.num_blocks * block_size
        if most_tokens < n_ctx:
            log.warning("the KV budget holds less than a window of %d tokens: a slot has %d", n_ctx, most_tokens)
        drafter = self._drafter(engine.is_paged)
        block_bytes = block_size * (groups if engine.is_paged else loaded.kept).bytes_per_token // len(engine.windows)
        self._open(loaded, engine.decode_path, min(n_ctx, most_tokens), most_tokens, block_bytes, drafter is not None)
        wanted = {"auto": not kernels.on_cpu(), "on": True, "off": False}[settings.decode_lookahead]
        lookahead = wanted and engine.is_paged
        log.info("a decode step is submitted %s the last one is read", "before" if lookahead else "after")
        return engine, self._scheduler(engine, size.num_blocks, block_size, lookahead, drafter)

    def _snapshots(self, loaded: LoadedModel, num_tokens: int) -> Snapshots:
        """For paths without blocks to share: as much again as a fifth of the pool, and a whole state for each slot."""
        from app.engine.snapshots import Snapshots

        kept, settings = loaded.kept, self._settings
        max_bytes = num_tokens * kept.bytes_per_token // 5 + settings.batch_rows * kept.bytes_besides
        control = Vocabulary(loaded.tokenizer).control_tokens
        return Snapshots(max_bytes, control, settings.prompt_cache_min_prefix, settings.prompt_cache_ttl or None)

    def _drafter(self, is_paged: bool) -> PromptLookup | None:
        """Not in deterministic mode, where who else decodes must not show: it decides on whether a row proposes, and so
        on how its tokens are computed."""
        settings = self._settings
        if settings.draft_kind == "none":
            return None
        if is_paged and not settings.sdpa_deterministic:
            return PromptLookup()
        why = "in deterministic mode" if is_paged else "on this decode path"
        log.warning("MLXCEL_DRAFT_KIND=%s has no effect %s", settings.draft_kind, why)
        return None

    def _scheduler(
        self,
        engine: Engine | DenseEngine,
        num_blocks: int,
        block_size: int,
        lookahead: bool,
        drafter: PromptLookup | None,
    ) -> Scheduler:
        settings, layout = self._settings, Layout(engine.windows)
        pool = BlockPool(num_blocks * layout.num_groups)
        ttl_s = settings.prompt_cache_ttl or None
        least = settings.prompt_cache_min_prefix
        cache = PrefixCache(pool, block_size, settings.prompt_cache, least, ttl_s, not engine.is_paged, layout)
        config = SchedulerConfig(
            num_slots=settings.batch_rows,
            max_batch_size=engine.max_rows or settings.batch_rows,
            prefill_chunk=settings.prefill_chunk,
            max_batch_prefill=settings.max_batch_prefill,
            max_batch_prefill_tokens=settings.max_batch_prefill_tokens,
            watermark=settings.kv_admission_watermark,
            itl_budget_s=None if settings.itl_budget_ms is None else settings.itl_budget_ms / 1000,
            grant_interval=settings.prefill_grant_interval,
            grows=settings.kv_cache_budget == "none",
            enable_preemption=settings.enable_preemption,
            preemption_policy=settings.preemption_policy,
            prompt_lookup_max_batch=settings.prompt_lookup_max_batch,
            lookahead=lookahead,
        )
        tables = BlockTables(pool, cache, block_size)
        if not settings.record_ticks:
            return Scheduler(config, tables, drafter)
        self._recordings.scheduler = RecordedScheduler(config, tables, settings.record_ticks, drafter)
        return self._recordings.scheduler

    def _open(
        self, loaded: LoadedModel, decode_path: str, n_ctx: int, most_tokens: int, block_bytes: int, speculates: bool
    ) -> None:
        card = ModelCard(
            ids=self._settings.model_alias or (_name(self._settings, loaded.path),),
            path=str(loaded.path),
            created=int(time.time()),
            n_ctx=n_ctx,
            most_tokens=most_tokens,
            vocab_size=loaded.vocab_size,
            bytes_per_block=block_bytes,
            end_tokens=loaded.end_tokens,
            default_sampling=_default_sampling(loaded.generation_config),
            chat_template=str(loaded.tokenizer.chat_template or ""),
            speculative=speculates,
            infill=infill_of(loaded.tokenizer),
            props={
                "build_info": f"mlxcel-{VERSION}-{self._settings.fingerprint}",
                "model_family": loaded.config.get("model_type"),
                "decode_path": decode_path,
            },
        )
        text = ChatText(loaded.tokenizer, loaded.end_tokens)
        grammars = Grammars(loaded.tokenizer, loaded.end_tokens, loaded.vocab_size)
        self.service.open(card, text, Vocabulary(loaded.tokenizer), grammars, dialect_of(loaded.tokenizer))


def _explained(decode_path: str) -> str:
    """A path as the log has it: whether many requests make more tokens together, and by what."""
    if decode_path == "per-row fallback":
        return "per-row fallback (aggregate decode throughput will not scale with MLXCEL_N_PARALLEL)"
    if decode_path == "one row at a time":
        return "one row at a time (what it has read is not in its caches alone)"
    return f"native batched forward ({decode_path})"


def _window(settings: Settings, loaded: LoadedModel) -> int:
    asked = settings.ctx_per_slot
    if asked is not None and asked > loaded.window:
        raise StartError(
            f"MLXCEL_CTX_SIZE={settings.ctx_size} means {asked} tokens a slot, above the model's window of"
            f" {loaded.window}"
        )
    return asked or loaded.window


def _name(settings: Settings, path: Path) -> str:
    """What the model is called unless the settings say: its folder or file, or its id on the hub."""
    if settings.model == "embedded":
        return "smollm2-135m-instruct"
    asked = Path(settings.model).expanduser()
    if asked.suffix == ".gguf":
        return asked.stem
    return path.resolve().name if asked.is_dir() else settings.model


def _default_sampling(generation: dict[str, Any]) -> SamplingParams:
    """What absent fields mean: the model's own generation_config, else OpenAI's temperature of 1."""
    given = {name: generation[name] for name in GENERATION_FIELDS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    return SamplingParams(**given)

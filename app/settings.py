"""Every ``MLXCEL_*`` variable: its name, default, unit and check. Nothing else in the project reads the environment."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app import variables
from app.errors import StartError
from app.setting_types import (
    WORD,
    Bytes,
    CountOrAuto,
    DraftKind,
    FilePath,
    LogFormat,
    LogLevel,
    Names,
    Seconds,
    StorageBackend,
    Victim,
    parse_budget,
    show,
)
from app.variables import PREFIX, Given

MIN_CTX_PER_SLOT = 512

# Other spellings that reach a field, in the environment and as flags. Those of llama-server are in app.variables.
ALIASES = {
    "prefill_chunk": ("MLXCEL_PREFILL_CHUNK_SIZE",),
    "n_parallel": ("MLXCEL_PARALLEL",),
}


def _spellings(field: str) -> AliasChoices:
    return AliasChoices(PREFIX + field.upper(), *ALIASES[field])


class Settings(BaseSettings):
    """The resolved settings, fixed for the life of the process. ``None`` means unset. Build it with ``load``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        enable_decoding=False,  # lists are split by commas, not read as JSON
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
    )

    model: str = Field("embedded", min_length=1, description="`embedded`, a model directory, a .gguf file, or a hub id")
    offline: bool = Field(False, description="never look anything up on the hub")
    cache_dir: Path = Field(
        default_factory=lambda: _user_cache_dir() / "mlxcel",
        description="folder for imported models; unset: `mlxcel` in the user's cache folder",
    )
    model_alias: Names = Field((), description="accepted names, comma list, first shown; `*`: any; unset: from path")
    adapter: FilePath | None = Field(None, description="folder of a LoRA adapter that mlx-lm has trained for the model")

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=1, le=65535, description="TCP port, 1 to 65535")
    ssl_cert_file: FilePath | None = Field(None, description="PEM certificate chain; with it HTTPS only")
    ssl_key_file: FilePath | None = Field(None, description="PEM key of the certificate, without a passphrase")
    api_keys: Names = Field((), repr=False, description="accepted keys, comma list; the page and /health* stay open")
    api_key_file: FilePath | None = Field(
        None, description="file of more keys, one a line, # begins a comment; read again when it changes"
    )
    allowed_origins: Names = Field((), description="CORS origins, comma list; unset: no CORS headers")
    max_body_bytes: Bytes = Field(16 * 1024**2, ge=1, description="largest request body in bytes (K, M, G); above: 413")
    rate_limit_requests: int | None = Field(
        None, ge=1, description="generating requests a minute, per key (without keys: in all); beyond: 429"
    )
    rate_limit_tokens: int | None = Field(None, ge=1, description="prompt and output tokens a minute, likewise")
    rate_limit_concurrent: int | None = Field(None, ge=1, description="generating requests under way, likewise")
    response_store: Bytes = Field(64 * 1024**2, ge=0, description="bytes of /v1/responses to keep (K, M, G); 0: none")
    strict_fields: bool = Field(False, description="refuse request fields that no API knows, instead of naming them")

    no_batch: bool = Field(False, description="one slot with the whole context")
    max_batch_size: int | None = Field(
        None, ge=1, description="most rows in one tick, and so most slots; unset: as many as slots"
    )
    n_parallel: int = Field(
        default_factory=lambda data: 1 if data["no_batch"] else max(4, data["max_batch_size"] or 0),
        ge=1,
        le=4096,
        validation_alias=_spellings("n_parallel"),
        description="slots; unset: 4, more where `MLXCEL_MAX_BATCH_SIZE` asks for it, 1 with `MLXCEL_NO_BATCH`",
    )
    max_queue_depth: int = Field(32, ge=0, description="requests that may wait for a slot; beyond: 503")
    queue_timeout: Annotated[Seconds | None, Field(gt=0)] = Field(
        None, description="seconds a request may wait for its slot before 503; unset: no end"
    )
    prefill_chunk: int | None = Field(
        None,
        ge=0,
        validation_alias=_spellings("prefill_chunk"),
        description="tokens; 0: no chunking; unset: half a second of work, up to 2048 alone, 512 beside others",
    )
    prefill_grant_interval: int = Field(
        16, ge=0, description="ticks in a row that the ITL budget may put a chunk off; 0: any number"
    )
    itl_budget_ms: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = Field(
        None, description="milliseconds a tick with decode may take: it makes chunks smaller; unset: any time"
    )
    max_batch_prefill: int = Field(4, ge=1, description="most prompts that prefill in one tick")
    max_batch_prefill_tokens: int | None = Field(None, ge=0, description="most tokens in it; 0: no cap; unset: derived")

    decode_storage_backend: StorageBackend = Field("auto", description="auto, dense or paged: docs/models.md")
    kv_block_size: int | None = Field(None, ge=1, le=4096, description="tokens a block; unset: 64 on CPU, 32 elsewhere")
    kv_cache_budget: Annotated[int | Literal["auto", "none"], BeforeValidator(parse_budget)] = Field(
        "auto", description="bytes of the block pool (K, M, G), `auto`, or `none` (also 0) for no bound"
    )
    kv_admission_watermark: float = Field(
        0.01, ge=0.0, le=0.5, allow_inf_nan=False, description="share of the pool kept free at admission, 0.0 to 0.5"
    )
    no_prompt_cache: bool = Field(False, description="the same as `MLXCEL_PROMPT_CACHE=false`")
    prompt_cache: bool = Field(
        default_factory=lambda given: not given["no_prompt_cache"], description="share prefixes; unset: true"
    )
    prompt_cache_min_prefix: int = Field(32, ge=0, description="shortest prefix worth adopting, in tokens")
    prompt_cache_ttl: Seconds = Field(3600.0, ge=0, description="seconds after which an unused prefix goes; 0: never")
    ctx_size: int | None = Field(
        None, ge=1, description="tokens in all, over rows if set, else slots; unset: model's window"
    )
    enable_preemption: bool = Field(False, description="a request of higher priority may requeue a running one")
    preemption_policy: Victim = Field("longest-first", description="who gives way: longest-first or lowest-priority")
    decode_lookahead: Annotated[Literal["auto", "on", "off"], WORD] = Field(
        "auto", description="submit a decode step before the last one is read; auto: on, but on a CPU off"
    )
    draft_kind: DraftKind = Field("none", description="speculation: none or prompt-lookup; none in deterministic mode")
    prompt_lookup_max_batch: int = Field(2, ge=1, description="most decoding rows in a tick with prompt lookup")

    slots: bool = Field(True, description="serve /slots; off: 501")
    metrics: bool = Field(True, description="serve /metrics; off: 501")
    ui: bool = Field(True, description="serve the page at /; off: 404")
    drain_timeout: Seconds = Field(25.0, ge=0, description="seconds that running requests get after SIGTERM")
    record_ticks: int = Field(2048, ge=0, description="ticks that the flight recorder keeps at least; 0: off")
    record_dir: FilePath | None = Field(None, description="its folder; unset: `recordings` in `MLXCEL_CACHE_DIR`")
    tick_timeout: Seconds = Field(600.0, gt=0, description="seconds after which a running tick counts as stuck")
    device: Annotated[Literal["auto", "gpu", "cpu"], WORD] = Field("auto", description="auto, gpu or cpu")
    weight_dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], WORD] = Field(
        "auto", description="auto (float32 on CPU, as stored elsewhere), float32, float16 or bfloat16"
    )
    blas: str = Field("auto", min_length=1, description="Linux: `auto`, the path of a BLAS library, or `none`")
    blas_threads: CountOrAuto = Field(None, ge=1, description="threads of the BLAS; unset or `auto`: one a core")
    cache_limit: Bytes | None = Field(None, ge=0, description="bytes MLX may keep for reuse; unset: as MLX has it")
    wired_limit: Bytes = Field(0, ge=0, description="bytes to keep wired on Metal; 0: off")
    sdpa_deterministic: bool = Field(
        False, description="a request's output never depends on its neighbours; slower, see docs/determinism.md"
    )
    log_format: LogFormat | None = Field(None, description="text or json; unset: text on a terminal, else json")
    log_file: FilePath | None = Field(None, description="file to log to; unset: stderr")
    log_max_bytes: Bytes = Field(64 * 1024**2, ge=1024, description="size at which the log file is rotated (K, M, G)")
    log_backups: int = Field(5, ge=1, le=1000, description="rotated log files to keep")
    log_level: LogLevel = Field("info", description="least level")

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _unused: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Settings:
        if self.no_batch and (self.n_parallel > 1 or (self.max_batch_size or 1) > 1):
            raise ValueError(
                "MLXCEL_NO_BATCH=true means one slot: leave MLXCEL_N_PARALLEL and MLXCEL_MAX_BATCH_SIZE unset"
            )
        if self.batch_rows > self.n_parallel:
            raise ValueError(
                f"MLXCEL_MAX_BATCH_SIZE={self.max_batch_size} is more rows than MLXCEL_N_PARALLEL={self.n_parallel} "
                f"slots can fill: at most {self.n_parallel}, or more slots"
            )
        if (self.ssl_cert_file is None) != (self.ssl_key_file is None):
            given, missing = ("CERT", "KEY") if self.ssl_cert_file else ("KEY", "CERT")
            raise ValueError(f"MLXCEL_SSL_{given}_FILE needs MLXCEL_SSL_{missing}_FILE beside it: set both or neither")
        if self.itl_budget_ms is not None and self.prefill_chunk == 0:
            raise ValueError("MLXCEL_ITL_BUDGET_MS needs chunks to make smaller: MLXCEL_PREFILL_CHUNK=0 has none")
        if self.no_prompt_cache and self.prompt_cache:
            raise ValueError("MLXCEL_PROMPT_CACHE=true contradicts MLXCEL_NO_PROMPT_CACHE=true: set one of them")
        window = self.ctx_per_slot
        if window is not None and window < MIN_CTX_PER_SLOT:
            raise ValueError(
                f"MLXCEL_CTX_SIZE={self.ctx_size} leaves {window} tokens a slot: at least "
                f"{MIN_CTX_PER_SLOT} a slot, {MIN_CTX_PER_SLOT * self.batch_rows} in all"
            )
        return self

    @property
    def unused(self) -> list[str]:
        """Variables of llama-server that are set and have no counterpart here."""
        return self._unused

    @property
    def batch_rows(self) -> int:
        """Most decoding rows in one tick."""
        return self.max_batch_size or self.n_parallel

    @property
    def ctx_per_slot(self) -> int | None:
        """Window of one slot in tokens; None: the model's own."""
        return None if self.ctx_size is None else self.ctx_size // self.batch_rows

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that differ when any value but a secret differs."""
        values = self.model_dump(mode="json", exclude={name for name in Settings.model_fields if is_secret(name)})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def describe(self) -> list[tuple[str, str, str]]:
        """(variable, value, source) for every setting; a secret shows as ``***``."""
        return [
            (variable(name), shown(name, getattr(self, name)), self._sources.get(name, "default"))
            for name in Settings.model_fields
        ]


def variable(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()


def foreign_variables(prefix: str) -> dict[str, str]:
    """Variables of a library, which reads them by itself: whether some are set can decide on whether it is loaded."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix) and value}


def is_secret(field: str) -> bool:
    """Whether a field's value must never be printed."""
    return not Settings.model_fields[field].repr


def flags_of(field: str) -> list[str]:
    """The command-line flags of a field; none for a secret, since every user of the machine can read an argv."""
    names = [] if is_secret(field) else [variable(field), *ALIASES.get(field, ())]
    return ["--" + name.removeprefix(PREFIX).lower().replace("_", "-") for name in names if name.startswith(PREFIX)]


def load(flags: Mapping[str, str | None] | None = None) -> Settings:
    """Read the environment and flags by field name, which win. What is empty is unset, a flag as well as a variable. A
    variable of llama-server counts where this server's own is unset.

    Raises:
        StartError: an unknown name, a value that is not allowed, or a contradiction, in one line.
    """
    fields = {name: field for field in Settings.model_fields for name in (variable(field), *ALIASES.get(field, ()))}
    given = variables.read(os.environ, fields, {field for field in Settings.model_fields if is_secret(field)})
    for field, value in (flags or {}).items():
        if value:
            given[field] = Given("--" + field.replace("_", "-"), value, "flag")
    texts = {field: one.value for field, one in given.items() if one.source != variables.ENVIRONMENT}
    try:
        settings = Settings(**texts)  # type: ignore[arg-type]  # strings, which it validates
    except ValidationError as error:
        raise StartError(_one_line(error, given)) from None
    settings._sources.update({field: one.source for field, one in given.items()})
    settings._unused.extend(variables.without_counterpart(os.environ))
    return settings


def _one_line(error: ValidationError, given: Mapping[str, Given]) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
    if not first["loc"]:
        return message
    loc = str(first["loc"][0])
    field = loc if loc in Settings.model_fields else loc.removeprefix(PREFIX).lower()
    name, value, _ = given[field]
    shown = "***" if is_secret(field) else repr(value)
    allowed = message.replace("Input should be", "must be").split(", unable to")[0]
    return f"{name}={shown} is not allowed: {allowed} ({Settings.model_fields[field].description})"


def _user_cache_dir() -> Path:
    folder = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise StartError("MLXCEL_CACHE_DIR must be set: this user has no home folder") from None


def shown(field: str, value: object) -> str:
    """A setting's value as people write it; ``***`` for a secret."""
    text = show(value)
    return "***" if is_secret(field) and text != "unset" else text

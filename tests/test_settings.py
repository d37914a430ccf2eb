"""Settings: names, defaults, checks, sources, and the page that is made from them."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from unittest import mock

import pytest
from pydantic import ValidationError

from app import cli
from app import settings as settings_module
from app.commands.serve import try_line
from app.errors import StartError
from app.settings import Settings, flags_of, variable
from app.variables import LLAMA_NAMES
from ops.configuration_page import render_docs


def load(environ: dict[str, str], flags: dict[str, str] | None = None) -> Settings:
    """What ``environ`` and ``flags`` resolve to in a process that has no other variables."""
    with mock.patch.dict(os.environ, environ, clear=True):
        return settings_module.load(flags)


def refusal(environ: dict[str, str], flags: dict[str, str] | None = None) -> str:
    with pytest.raises(StartError) as error:
        load(environ, flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults() -> None:
    settings = load({})
    assert (settings.model, settings.host, settings.port) == ("embedded", "127.0.0.1", 8080)
    assert (settings.n_parallel, settings.batch_rows, settings.max_queue_depth) == (4, 4, 32)
    assert (settings.prefill_chunk, settings.max_batch_prefill, settings.max_batch_prefill_tokens) == (None, 4, None)
    assert (settings.kv_block_size, settings.kv_cache_budget, settings.kv_admission_watermark) == (None, "auto", 0.01)
    assert (settings.prompt_cache, settings.prompt_cache_min_prefix, settings.ctx_per_slot) == (True, 32, None)
    assert (settings.drain_timeout, settings.tick_timeout, settings.max_body_bytes) == (25.0, 600.0, 16 * 2**20)
    assert (settings.api_keys, settings.allowed_origins, settings.model_alias) == ((), (), ())
    assert settings.cache_dir.name == "mlxcel"
    assert (settings.adapter, settings.ssl_cert_file, settings.ssl_key_file, settings.api_key_file) == (None,) * 4
    assert (settings.queue_timeout, settings.rate_limit_requests, settings.rate_limit_tokens) == (None, None, None)
    assert settings.rate_limit_concurrent is None
    assert (settings.decode_storage_backend, settings.draft_kind, settings.sdpa_deterministic) == (
        "auto",
        "none",
        False,
    )
    assert (settings.cache_limit, settings.wired_limit) == (None, 0)
    assert (settings.log_format, settings.log_file) == (None, None)
    assert (settings.log_max_bytes, settings.log_backups, settings.log_level) == (64 * 2**20, 5, "info")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load({}).port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("600000000", 600_000_000),
        ("4K", 4096),
        ("16m", 2**24),
        ("2G", 2**31),
        ("auto", "auto"),
        ("NONE", "none"),
        ("0", "none"),
    ],
)
def test_kv_cache_budget(text: str, value: int | str) -> None:
    assert load({"MLXCEL_KV_CACHE_BUDGET": text}).kv_cache_budget == value


def test_lists_are_split_and_empty_values_are_unset() -> None:
    settings = load(
        {"MLXCEL_MODEL_ALIAS": "a, b,*,", "MLXCEL_API_KEYS": "k1,k2", "MLXCEL_CTX_SIZE": "", "PATH": "/bin"}
    )
    assert settings.model_alias == ("a", "b", "*")
    assert settings.api_keys == ("k1", "k2")
    assert settings.ctx_size is None


@pytest.mark.parametrize("name", ["MLXCEL_PREFILL_CHUNK", "MLXCEL_PREFILL_CHUNK_SIZE", "LLAMA_ARG_BATCH"])
def test_prefill_chunk_has_three_names(name: str) -> None:
    assert load({name: "0"}).prefill_chunk == 0


def test_an_itl_budget_needs_chunks() -> None:
    assert load({"MLXCEL_ITL_BUDGET_MS": "80"}).itl_budget_ms == 80.0
    assert "MLXCEL_PREFILL_CHUNK=0" in refusal({"MLXCEL_ITL_BUDGET_MS": "80", "MLXCEL_PREFILL_CHUNK": "0"})
    assert "MLXCEL_ITL_BUDGET_MS" in refusal({"MLXCEL_ITL_BUDGET_MS": "0"})


def test_two_names_of_one_setting_must_agree() -> None:
    both = {"MLXCEL_PREFILL_CHUNK": "64", "MLXCEL_PREFILL_CHUNK_SIZE": "64"}
    assert load(both).prefill_chunk == 64
    assert "MLXCEL_PREFILL_CHUNK_SIZE" in refusal(both | {"MLXCEL_PREFILL_CHUNK_SIZE": "128"})


# A variable of llama-server, a value that it takes there, and what that makes of a setting.
LLAMA: list[tuple[str, str, str, object]] = [
    ("LLAMA_ARG_MODEL", "/models/a.gguf", "model", "/models/a.gguf"),
    ("LLAMA_ARG_OFFLINE", "enabled", "offline", True),
    ("LLAMA_ARG_ALIAS", "a,b", "model_alias", ("a", "b")),
    ("LLAMA_ARG_HOST", "0.0.0.0", "host", "0.0.0.0"),
    ("LLAMA_ARG_PORT", "9000", "port", 9000),
    ("LLAMA_API_KEY", "k1,k2", "api_keys", ("k1", "k2")),
    ("LLAMA_ARG_API_KEY_FILE", "/keys", "api_key_file", Path("/keys")),
    ("LLAMA_ARG_CORS_ORIGINS", "https://a,https://b", "allowed_origins", ("https://a", "https://b")),
    ("LLAMA_ARG_N_PARALLEL", "6", "n_parallel", 6),
    ("LLAMA_ARG_N_PARALLEL", "-1", "n_parallel", 4),
    ("LLAMA_ARG_BATCH", "256", "prefill_chunk", 256),
    ("LLAMA_ARG_CTX_SIZE", "8192", "ctx_size", 8192),
    ("LLAMA_ARG_CTX_SIZE", "0", "ctx_size", None),
    ("LLAMA_ARG_CACHE_PROMPT", "disabled", "prompt_cache", False),
    ("LLAMA_ARG_ENDPOINT_SLOTS", "0", "slots", False),
    ("LLAMA_ARG_ENDPOINT_METRICS", "off", "metrics", False),
    ("LLAMA_ARG_THREADS", "3", "blas_threads", 3),
    ("LLAMA_ARG_THREADS", "-1", "blas_threads", None),
    ("LLAMA_ARG_LOG_FILE", "/log", "log_file", Path("/log")),
    ("LLAMA_ARG_LOG_JSONL", "enabled", "log_format", "json"),
    ("LLAMA_ARG_LOG_JSONL", "0", "log_format", "text"),
    ("LLAMA_ARG_LOG_VERBOSITY", "1", "log_level", "error"),
    ("LLAMA_ARG_LOG_VERBOSITY", "5", "log_level", "debug"),
]


@pytest.mark.parametrize(("name", "value", "field", "meant"), LLAMA)
def test_a_variable_of_llama_server_sets_the_same_here(name: str, value: str, field: str, meant: object) -> None:
    assert getattr(load({name: value}), field) == meant


def test_certificate_and_key_come_by_llama_servers_names_too() -> None:
    settings = load({"LLAMA_ARG_SSL_CERT_FILE": "/c", "LLAMA_ARG_SSL_KEY_FILE": "/k"})
    assert (settings.ssl_cert_file, settings.ssl_key_file) == (Path("/c"), Path("/k"))


def test_every_variable_of_llama_server_that_is_taken_is_tried_here() -> None:
    tried = {name for name, _, _, _ in LLAMA} | {"LLAMA_ARG_SSL_CERT_FILE", "LLAMA_ARG_SSL_KEY_FILE"}
    assert tried == set(LLAMA_NAMES)
    assert {name.field for name in LLAMA_NAMES.values()} <= set(Settings.model_fields)


def test_our_own_names_and_flags_win_and_the_source_has_the_name() -> None:
    environ = {"LLAMA_ARG_PORT": "9000", "LLAMA_ARG_HOST": "::", "LLAMA_ARG_BATCH": "64", "LLAMA_ARG_CTX_SIZE": "0"}
    settings = load(environ | {"MLXCEL_PORT": "9001"}, {"prefill_chunk": "128"})
    assert (settings.port, settings.host, settings.prefill_chunk) == (9001, "::", 128)
    sources = {name: source for name, _, source in settings.describe()}
    assert sources["MLXCEL_PORT"] == "environment"
    assert sources["MLXCEL_HOST"] == "environment LLAMA_ARG_HOST"
    assert (sources["MLXCEL_PREFILL_CHUNK"], sources["MLXCEL_CTX_SIZE"]) == ("flag", "default")
    assert load(environ | {"MLXCEL_PORT": ""}).port == 9000


def test_what_llama_server_has_beyond_this_is_named_and_no_more() -> None:
    settings = load({"LLAMA_ARG_PORT": "9000", "LLAMA_ARG_UBATCH": "512", "LLAMA_ARG_FLASH_ATTN": "on"})
    assert settings.unused == ["LLAMA_ARG_FLASH_ATTN", "LLAMA_ARG_UBATCH"]
    assert load({}).unused == []


def test_a_bad_value_in_a_variable_of_llama_server_is_told_by_that_name() -> None:
    assert "LLAMA_ARG_PORT='http'" in refusal({"LLAMA_ARG_PORT": "http"})
    assert "LLAMA_API_KEY is set and holds no key" in refusal({"LLAMA_API_KEY": " "})
    assert "hunter2" not in refusal({"LLAMA_API_KEY": "hunter2", "LLAMA_ARG_PORT": "x"})
    assert ("MLXCEL_API_KEYS", "***", "environment LLAMA_API_KEY") in load({"LLAMA_API_KEY": "hunter2"}).describe()


@pytest.mark.parametrize(
    ("environ", "slots", "rows"),
    [
        ({}, 4, 4),
        ({"MLXCEL_N_PARALLEL": "8"}, 8, 8),
        ({"MLXCEL_MAX_BATCH_SIZE": "1"}, 4, 1),
        ({"MLXCEL_MAX_BATCH_SIZE": "8"}, 8, 8),
        ({"MLXCEL_MAX_BATCH_SIZE": "3", "MLXCEL_N_PARALLEL": "6"}, 6, 3),
        ({"MLXCEL_NO_BATCH": "1"}, 1, 1),
    ],
)
def test_slots_and_rows(environ: dict[str, str], slots: int, rows: int) -> None:
    settings = load(environ)
    assert (settings.n_parallel, settings.batch_rows) == (slots, rows)


@pytest.mark.parametrize(
    ("environ", "window"),
    [
        ({"MLXCEL_CTX_SIZE": "8195"}, 2048),
        ({"MLXCEL_CTX_SIZE": "4096", "MLXCEL_MAX_BATCH_SIZE": "2"}, 2048),
        ({"MLXCEL_CTX_SIZE": "4096", "MLXCEL_NO_BATCH": "true"}, 4096),
        ({"MLXCEL_CTX_SIZE": "2048"}, 512),
    ],
)
def test_ctx_size_is_a_total(environ: dict[str, str], window: int) -> None:
    assert load(environ).ctx_per_slot == window


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"MLXCEL_MAX_BATCHSIZE": "8"}, ["MLXCEL_MAX_BATCHSIZE", "did you mean MLXCEL_MAX_BATCH_SIZE?"]),
        ({"MLXCEL_QQQQ": "8"}, ["MLXCEL_QQQQ", "docs/configuration.md"]),
        ({"MLXCEL_PORT": "99999"}, ["MLXCEL_PORT='99999'", "65535"]),
        ({"MLXCEL_PORT": "http"}, ["MLXCEL_PORT='http'", "integer"]),
        ({"MLXCEL_OFFLINE": "perhaps"}, ["MLXCEL_OFFLINE='perhaps'", "boolean"]),
        ({"MLXCEL_DEVICE": "tpu"}, ["MLXCEL_DEVICE='tpu'", "'auto', 'gpu' or 'cpu'"]),
        ({"MLXCEL_KV_CACHE_BUDGET": "3X"}, ["MLXCEL_KV_CACHE_BUDGET='3X'", "K, M or G"]),
        ({"MLXCEL_KV_ADMISSION_WATERMARK": "0.6"}, ["MLXCEL_KV_ADMISSION_WATERMARK='0.6'", "0.5"]),
        ({"MLXCEL_KV_ADMISSION_WATERMARK": "nan"}, ["MLXCEL_KV_ADMISSION_WATERMARK='nan'", "finite"]),
        ({"MLXCEL_CTX_SIZE": "2047"}, ["MLXCEL_CTX_SIZE=2047", "511 tokens a slot", "2048 in all"]),
        ({"MLXCEL_N_PARALLEL": "2", "MLXCEL_MAX_BATCH_SIZE": "3"}, ["MLXCEL_MAX_BATCH_SIZE=3", "MLXCEL_N_PARALLEL=2"]),
        ({"MLXCEL_NO_BATCH": "1", "MLXCEL_N_PARALLEL": "2"}, ["MLXCEL_NO_BATCH", "MLXCEL_N_PARALLEL"]),
        ({"MLXCEL_SSL_CERT_FILE": "/c"}, ["MLXCEL_SSL_CERT_FILE needs MLXCEL_SSL_KEY_FILE"]),
        ({"MLXCEL_SSL_KEY_FILE": "/k"}, ["MLXCEL_SSL_KEY_FILE needs MLXCEL_SSL_CERT_FILE"]),
        (
            {"MLXCEL_DECODE_STORAGE_BACKEND": "disk"},
            ["MLXCEL_DECODE_STORAGE_BACKEND='disk'", "'auto', 'dense' or 'paged'"],
        ),
        ({"MLXCEL_DRAFT_KIND": "mtp"}, ["MLXCEL_DRAFT_KIND", "mtp does not exist yet"]),
        ({"MLXCEL_DRAFT_KIND": "DFlash"}, ["MLXCEL_DRAFT_KIND", "dflash does not exist yet"]),
        ({"MLXCEL_DRAFT_KIND": "guess"}, ["MLXCEL_DRAFT_KIND='guess'", "must be 'none' or 'prompt-lookup'"]),
        ({"MLXCEL_PROMPT_LOOKUP_MAX_BATCH": "0"}, ["MLXCEL_PROMPT_LOOKUP_MAX_BATCH='0'", "greater than or equal to 1"]),
        ({"MLXCEL_SDPA_DETERMINISTIC": "perhaps"}, ["MLXCEL_SDPA_DETERMINISTIC='perhaps'", "valid boolean"]),
        ({"MLXCEL_QUEUE_TIMEOUT": "0"}, ["MLXCEL_QUEUE_TIMEOUT='0'", "greater than 0"]),
        ({"MLXCEL_RATE_LIMIT_CONCURRENT": "0"}, ["MLXCEL_RATE_LIMIT_CONCURRENT='0'", "greater than or equal to 1"]),
        ({"MLXCEL_RATE_LIMIT_TOKENS": "0"}, ["MLXCEL_RATE_LIMIT_TOKENS='0'", "greater than or equal to 1"]),
        ({"MLXCEL_LOG_FORMAT": "xml"}, ["MLXCEL_LOG_FORMAT='xml'", "'text' or 'json'"]),
        ({"MLXCEL_LOG_MAX_BYTES": "64X"}, ["MLXCEL_LOG_MAX_BYTES='64X'", "K, M or G"]),
        ({"MLXCEL_LOG_BACKUPS": "0"}, ["MLXCEL_LOG_BACKUPS='0'", "greater than or equal to 1"]),
        (
            {"MLXCEL_NO_PROMPT_CACHE": "1", "MLXCEL_PROMPT_CACHE": "1"},
            ["MLXCEL_PROMPT_CACHE", "MLXCEL_NO_PROMPT_CACHE"],
        ),
    ],
)
def test_a_refusal_is_one_line_that_names_the_variable(environ: dict[str, str], parts: list[str]) -> None:
    line = refusal(environ)
    assert [part for part in parts if part not in line] == []


def test_prompt_cache_is_turned_off_by_either_name() -> None:
    assert not load({"MLXCEL_NO_PROMPT_CACHE": "1"}).prompt_cache
    assert not load({"MLXCEL_PROMPT_CACHE": "false"}).prompt_cache


def test_a_flag_beats_the_environment_and_sources_are_told() -> None:
    settings = load({"MLXCEL_PORT": "9000", "MLXCEL_HOST": "0.0.0.0"}, {"port": "9001"})
    assert settings.port == 9001
    sources = {name: (value, source) for name, value, source in settings.describe()}
    assert sources["MLXCEL_PORT"] == ("9001", "flag")
    assert sources["MLXCEL_HOST"] == ("0.0.0.0", "environment")
    assert sources["MLXCEL_MODEL"] == ("embedded", "default")
    assert list(sources) == [variable(field) for field in Settings.model_fields]
    assert "--port='x'" in refusal({}, {"port": "x"})


def test_secrets_are_never_shown() -> None:
    settings = load({"MLXCEL_API_KEYS": "hunter2"})
    assert "hunter2" not in repr(settings) + str(settings.describe())
    assert ("MLXCEL_API_KEYS", "***", "environment") in settings.describe()
    assert flags_of("api_keys") == []
    assert "hunter2" not in refusal({"MLXCEL_API_KEYS": "hunter2", "MLXCEL_PORT": "x"})


def test_the_fingerprint_follows_the_values_alone() -> None:
    assert load({}).fingerprint == load({"MLXCEL_PORT": "8080"}).fingerprint
    assert load({}).fingerprint != load({"MLXCEL_PORT": "8081"}).fingerprint


def test_configuration_page_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text() == render_docs(), "run: make docs"


def test_check_prints_and_leaves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLXCEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLXCEL_API_KEYS", "hunter2")
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")
    monkeypatch.setenv("LLAMA_ARG_UBATCH", "512")
    assert (
        cli.main(["serve", "--check", "--max-batch-size", "8", "--enable-preemption", "--prefill-chunk-size", "0"]) == 0
    )
    out, told = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert ["MLXCEL_HOST", "0.0.0.0", "environment", "LLAMA_ARG_HOST"] in lines
    assert told == "LLAMA_ARG_UBATCH has no counterpart here and does nothing\n"
    assert ["MLXCEL_MAX_BATCH_SIZE", "8", "flag"] in lines
    assert ["MLXCEL_ENABLE_PREEMPTION", "true", "flag"] in lines
    assert ["MLXCEL_PREFILL_CHUNK", "0", "flag"] in lines
    assert lines[-1] == [
        "fingerprint",
        load(
            {}, {"host": "0.0.0.0", "max_batch_size": "8", "enable_preemption": "1", "prefill_chunk": "0"}
        ).fingerprint,
    ]
    assert "hunter2" not in out


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serve", "--max-batchsize", "8"], "--max-batch-size"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "0"], "--port='0'"),
        (["sevre"], "serve"),
        ([], "COMMAND"),
    ],
)
def test_a_bad_command_line_is_one_line(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert part in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("curl", ["/usr/bin/curl", None])
def test_the_line_to_try_follows_tls_and_key_file(curl: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: curl)
    files = {"MLXCEL_SSL_CERT_FILE": "/c", "MLXCEL_SSL_KEY_FILE": "/k", "MLXCEL_API_KEY_FILE": "/keys"}
    line = try_line(load(files))
    assert "https://127.0.0.1:8080/v1/chat/completions" in line
    assert "Bearer YOUR_KEY" in line
    words = shlex.split(line)
    if curl:
        assert "-sk" in words
    else:
        compile(words[2], "try", "exec")
        assert "_create_unverified_context" in words[2]


@pytest.mark.parametrize("curl", ["/usr/bin/curl", None])
def test_the_line_to_try_is_a_whole_shell_command(curl: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: curl)
    words = shlex.split(
        try_line(load({"MLXCEL_HOST": "::", "MLXCEL_API_KEYS": "hunter2", "MLXCEL_MODEL_ALIAS": "*,m"}))
    )
    assert "hunter2" not in " ".join(words)
    assert "http://[::1]:8080/v1/chat/completions" in words[2]
    if curl:
        assert json.loads(words[words.index("-d") + 1])["model"] == "m"
    else:
        compile(words[2], "try", "exec")


@pytest.mark.parametrize("value", ["", " ", ",", ", ,"])
def test_keys_that_came_out_empty_do_not_open_the_server(value: str) -> None:
    assert "MLXCEL_API_KEYS is set and holds no key" in refusal({"MLXCEL_API_KEYS": value})


def test_a_name_in_lower_case_is_refused_and_not_half_used() -> None:
    assert "did you mean MLXCEL_PORT?" in refusal({"mlxcel_port": "5"})

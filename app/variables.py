"""Which variables are set and what they set: this server's own, and those of llama-server for the same settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from app.errors import StartError
from app.setting_types import nearest

PREFIX = "MLXCEL_"
LLAMA_PREFIX = "LLAMA_ARG_"
ENVIRONMENT = "environment"

# A value of llama-server as this server spells it; empty: unset.
Spell = Callable[[str], str]


def _same(value: str) -> str:
    return value


def _unset_if(word: str) -> Spell:
    return lambda value: "" if value.strip() == word else value


def _flag(value: str) -> str:
    return {"enabled": "true", "disabled": "false"}.get(value.strip().lower(), value)


def _log_format(value: str) -> str:
    words = {"json": ("true", "1", "on", "enabled"), "text": ("false", "0", "off", "disabled")}
    return next((word for word, spellings in words.items() if value.strip().lower() in spellings), value)


def _log_level(value: str) -> str:
    levels = {"0": "error", "1": "error", "2": "warning", "3": "info", "4": "debug", "5": "debug"}
    return levels.get(value.strip(), value)


class Name(NamedTuple):
    """What a variable of llama-server sets here."""

    field: str
    spell: Spell = _same


LLAMA_NAMES = {
    "LLAMA_ARG_MODEL": Name("model"),
    "LLAMA_ARG_OFFLINE": Name("offline", _flag),
    "LLAMA_ARG_ALIAS": Name("model_alias"),
    "LLAMA_ARG_HOST": Name("host"),
    "LLAMA_ARG_PORT": Name("port"),
    "LLAMA_ARG_SSL_CERT_FILE": Name("ssl_cert_file"),
    "LLAMA_ARG_SSL_KEY_FILE": Name("ssl_key_file"),
    "LLAMA_API_KEY": Name("api_keys"),
    "LLAMA_ARG_API_KEY_FILE": Name("api_key_file"),
    "LLAMA_ARG_CORS_ORIGINS": Name("allowed_origins"),
    "LLAMA_ARG_N_PARALLEL": Name("n_parallel", _unset_if("-1")),
    "LLAMA_ARG_BATCH": Name("prefill_chunk"),
    "LLAMA_ARG_CTX_SIZE": Name("ctx_size", _unset_if("0")),
    "LLAMA_ARG_CACHE_PROMPT": Name("prompt_cache", _flag),
    "LLAMA_ARG_ENDPOINT_SLOTS": Name("slots", _flag),
    "LLAMA_ARG_ENDPOINT_METRICS": Name("metrics", _flag),
    "LLAMA_ARG_THREADS": Name("blas_threads", _unset_if("-1")),
    "LLAMA_ARG_LOG_FILE": Name("log_file"),
    "LLAMA_ARG_LOG_JSONL": Name("log_format", _log_format),
    "LLAMA_ARG_LOG_VERBOSITY": Name("log_level", _log_level),
}


class Given(NamedTuple):
    """A setting as somebody has set it: the name that was used, the text, and where it comes from."""

    name: str
    value: str
    source: str = ENVIRONMENT


def read(environment: Mapping[str, str], fields: Mapping[str, str], secrets: Collection[str]) -> dict[str, Given]:
    """What ``environment`` sets, by field. ``fields`` has the field of each variable of this server, and ``secrets``
    the fields that hold keys. A variable of llama-server counts where none of this server sets the same.

    Raises:
        StartError: an unknown name, two that are at odds, or a secret that is set and empty.
    """
    given: dict[str, Given] = {}
    for name, value in sorted(environment.items()):
        field = fields.get(name)
        if field is None and name.upper().startswith(PREFIX):
            raise StartError(
                f"{name} is not a known variable{nearest(name.upper(), fields)}; docs/configuration.md lists them all"
            )
        if field is None or not _is_set(name, value, field in secrets):
            continue
        other = given.setdefault(field, Given(name, value))
        if other.value != value:
            raise StartError(f"{other.name}={other.value!r} and {name}={value!r} set the same thing: keep one")
    for name, (field, spell) in LLAMA_NAMES.items():
        text = environment.get(name)
        if text is not None and field not in given and _is_set(name, text, field in secrets) and spell(text):
            given[field] = Given(name, spell(text), f"{ENVIRONMENT} {name}")
    return given


def without_counterpart(environment: Mapping[str, str]) -> list[str]:
    """Variables of llama-server that are set and set nothing here."""
    return sorted(name for name in environment if name.startswith(LLAMA_PREFIX) and name not in LLAMA_NAMES)


def _is_set(name: str, value: str, is_secret: bool) -> bool:
    """An empty value is unset; but a secret that came out empty must not open the server to everybody."""
    if is_secret and not value.strip(" ,"):
        raise StartError(f"{name} is set and holds no key: give at least one, or unset it")
    return value != ""

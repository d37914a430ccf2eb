"""Fields of llama-server's own completion route: what is refused, what has no effect, and checks of single ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from app.errors import InvalidRequest
from app.request import SamplingParams

MAX_BIASES = 1024
MAX_BIAS_TEXT = 256
NEVER = float("-inf")

_ALONE = "has a meaning only beside what is refused"
_SHIFT = "a window is never shifted"
_DRAFT = "drafts change no token; the operator sets them: `MLXCEL_DRAFT_KIND`"
INERT = {
    "dynatemp_exponent": _ALONE,
    "xtc_threshold": _ALONE,
    "dry_base": _ALONE,
    "dry_allowed_length": _ALONE,
    "dry_penalty_last_n": _ALONE,
    "dry_sequence_breakers": _ALONE,
    "mirostat_tau": _ALONE,
    "mirostat_eta": _ALONE,
    "adaptive_decay": _ALONE,
    "preserved_tokens": _ALONE,
    "n_keep": _SHIFT,
    "n_discard": _SHIFT,
    "n_cache_reuse": "equal prefixes are reused, and nothing else",
    "backend_sampling": "where tokens are drawn changes none",
    "reasoning_format": "nothing is set apart in this route",
    "sse_ping_interval": "a ping is sent after 15 s of silence",
    "speculative.n_max": _DRAFT,
    "speculative.n_min": _DRAFT,
    "speculative.p_min": _DRAFT,
}

_OFF = (0, 0.0)
_BELOW_ZERO = (-1, -1.0)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "id_slot": (-1,),
    "dynatemp_range": _OFF,
    "typical_p": (1, 1.0),
    "top_n_sigma": (*_BELOW_ZERO, *_OFF),
    "xtc_probability": _OFF,
    "dry_multiplier": _OFF,
    "mirostat": _OFF,
    "adaptive_target": _BELOW_ZERO,
    "min_keep": _OFF,
    "n_indent": _OFF,
    "t_max_predict_ms": (-1, 0),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "logprobs": (),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "lora": ([],),
    "image_data": ([],),
    "echo": (False,),
    "verbose": (False,),
}

# The steps of a draw in the order they are taken, and what turns each one off. (top_k keeps the same tokens before
# temperature and after it.)
STEPS: dict[str, dict[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "temperature": {"temperature": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
# Steps of llama-server whose own fields are refused, so that they do nothing.
IDLE_STEPS = frozenset({"dry", "top_n_sigma", "typ_p", "xtc"})
LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}


def check_prompts(value: Any) -> list[str | list[int | str]]:
    """One prompt is text, or token ids with texts among them; a list without an id in it is a list of prompts. The
    result always is such a list.

    Raises:
        InvalidRequest: another shape, an empty list, or images.
    """
    if isinstance(value, list) and value and not any(type(item) is int for item in value):
        return [_prompt(item) for item in value]
    return [_prompt(value)]


def check_biases(value: Any) -> list[tuple[int | str, float]]:
    """Pairs of a token and its bias, out of a list of pairs or an object. A token is an id or a text, all tokens of
    which are meant; ``false`` is a bias that lets it never be drawn.

    Raises:
        InvalidRequest: naming the entry.
    """
    if isinstance(value, dict):
        pairs: list[Any] = [[int(key) if _is_id(key) else key, bias] for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = value
    else:
        raise _fault("logit_bias", "must be a list of pairs or an object")
    if len(pairs) > MAX_BIASES:
        raise _fault("logit_bias", f"must have at most {MAX_BIASES} entries")
    return [_bias(pair, f"logit_bias[{place}]") for place, pair in enumerate(pairs)]


def check_samplers(value: Any) -> list[str]:
    """The names of the steps that are to be taken; a text is a letter for each. Raises InvalidRequest."""
    names = [LETTERS.get(letter, letter) for letter in value] if isinstance(value, str) else value
    if not isinstance(names, list):
        raise _fault("samplers", "must be a list of names")
    for name in names:
        if not isinstance(name, str):
            raise _fault("samplers", "must be a list of names")
        if name not in STEPS and name not in IDLE_STEPS:
            raise _fault("samplers", f"{name[:32]!r} is not supported by this server")
    return names


def with_steps(sampling: SamplingParams, samplers: list[str] | None) -> SamplingParams:
    """``sampling`` without the steps that ``samplers`` leaves out; None leaves out nothing.

    Raises:
        InvalidRequest: what is left is to be done in another order than here, and that would matter.
    """
    if samplers is None:
        return sampling
    left_out = {name: off for step, fields in STEPS.items() if step not in samplers for name, off in fields.items()}
    sampling = dataclasses.replace(sampling, **left_out)  # type: ignore[arg-type]  # top_k is a whole number above
    wanted = [step for step in samplers if step in STEPS and _does_something(step, sampling)]
    if not sampling.is_greedy and wanted != [step for step in STEPS if step in wanted]:
        raise _fault("samplers", f"this server goes by the order {', '.join(STEPS)}, and another would draw otherwise")
    return sampling


def with_memory(sampling: SamplingParams, repeat_last_n: int) -> SamplingParams:
    """``sampling`` with penalties that look back at so many tokens: -1 is all, and 0 is none.

    Raises:
        InvalidRequest: another number, and there is a penalty.
    """
    if repeat_last_n == 0:
        return dataclasses.replace(sampling, **STEPS["penalties"])  # type: ignore[arg-type]
    if repeat_last_n > 0 and sampling.has_penalty:
        raise _fault("repeat_last_n", "penalties look at the whole text here: send -1, or 0 for no penalties")
    return sampling


def _does_something(step: str, sampling: SamplingParams) -> bool:
    return any(getattr(sampling, name) != off for name, off in STEPS[step].items())


def _prompt(value: Any) -> str | list[int | str]:
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise _fault("prompt", "multimodal_data is not supported: this server reads text alone")
        return str(value["prompt_string"])
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(part) is int or isinstance(part, str) for part in value):
        return value
    raise _fault("prompt", "must be a string, a list of token ids and strings, or a list of such prompts")


def _bias(pair: Any, where: str) -> tuple[int | str, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise _fault(where, "must be a pair of a token and its bias")
    token, bias = pair
    if not (type(token) is int or (isinstance(token, str) and 0 < len(token) <= MAX_BIAS_TEXT)):
        raise _fault(where, f"must begin with a token id, or a text of at most {MAX_BIAS_TEXT} characters")
    if bias is False:
        return token, NEVER
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
        raise _fault(where, "must end with a number from -100 to 100, or false")
    return token, float(bias)


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 20


def _fault(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {what}", where.partition("[")[0])

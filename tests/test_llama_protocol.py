"""Bodies of llama-server's own routes: what is asked of the service, and what is refused in which words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from app.api.fields import Limits
from app.api.llama_fields import LETTERS, NEVER
from app.api.llama_protocol import InfillBody, LlamaBody
from app.api.parse import parse, unknown_fields
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask

DEFAULT = SamplingParams(temperature=0.6, top_p=0.9, top_k=40)
LIMITS = Limits(vocab_size=200)


def encode(text: str) -> Sequence[int]:
    return list(text.encode())


def body(**fields: Any) -> LlamaBody:
    return parse(LlamaBody, {"prompt": "hi", **fields})


def ask(**fields: Any) -> Ask:
    return body(**fields).ask(DEFAULT, LIMITS, encode)


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ask(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([12, 34], [[12, 34]]),
        ([12, "b", 34], [[12, "b", 34]]),
        (["b", 12], [["b", 12]]),
        (["a", "b"], ["a", "b"]),
        (["a"], ["a"]),
        (["a", [12, 34]], ["a", [12, 34]]),
        ([[12, "b"], "c", {"prompt_string": "d"}], [[12, "b"], "c", "d"]),
        ({"prompt_string": "d", "multimodal_data": []}, ["d"]),
    ],
)
def test_every_form_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert body(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [7, True, [], [[]], [True], [12, 1.5], [12, [34]], [{"a": 1}], {}, ["a", []], [12, {"prompt_string": "a"}]],
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    error = refusal(prompt=prompt)
    assert error.param == "prompt"
    assert str(error) == "prompt: must be a string, a list of token ids and strings, or a list of such prompts"


@pytest.mark.parametrize("prompt", [{"prompt_string": "a", "multimodal_data": ["aGk="]}])
def test_images_are_refused_by_name(prompt: Any) -> None:
    assert "multimodal_data" in str(refusal(prompt=prompt))
    assert "multimodal_data" in str(refusal(prompt=["a", prompt]))


@pytest.mark.parametrize("prompt", [[200], [-1], ["a", 200], [[1], ["a", 2**70]]])
def test_ids_in_a_prompt_must_be_in_the_vocabulary(prompt: Any) -> None:
    assert "vocabulary of 200" in str(refusal(prompt=prompt))


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"n_predict": -1}, None),
        ({"n_predict": 5}, 5),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "n_predict": 5}, 5),
        ({"max_tokens": -1}, None),
    ],
)
def test_how_many_tokens(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert ask(**fields).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n_predict": 0}, "n_predict: 0 is not supported: it would read a prompt for nothing"),
        ({"max_tokens": 0}, "n_predict: 0 is not supported: it would read a prompt for nothing"),
        ({"n_predict": -2}, "n_predict: must be at least -1, got -2"),
        ({"n_predict": 5, "max_tokens": 6}, "n_predict: differs from its other names, send one of them"),
        ({"n_cmpl": 129}, "n_cmpl: must be at most 128, got 129"),
        ({"n_cmpl": 0}, "n_cmpl: must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature: must be at least 0, got -0.1"),
        ({"temperature": 101}, "temperature: must be at most 100, got 101"),
        ({"n_probs": 21}, "n_probs: must be at most 20, got 21"),
        ({"stop": ["a"] * 17}, "stop: must have at most 16 entries"),
        ({"id_slot": 0}, "id_slot: this value is not supported by this server"),
        ({"mirostat": 2}, "mirostat: this value is not supported by this server"),
        ({"typical_p": 0.9}, "typical_p: this value is not supported by this server"),
        ({"post_sampling_probs": True}, "post_sampling_probs: this value is not supported by this server"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora: this value is not supported by this server"),
        ({"response_fields": "content"}, "response_fields: must be a list"),
        ({"response_fields": ["a"] * 65}, "response_fields: must have at most 64 entries"),
        ({"repeat_last_n": -2}, "repeat_last_n: must be at least -1, got -2"),
        ({"ignore_eos": True, "grammar": 'root ::= "a"'}, "ignore_eos: not possible with grammar"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar: cannot go together with json_schema"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], text: str) -> None:
    error = refusal(**fields)
    assert str(error).startswith(text)
    assert text.startswith(f"{error.param}:")


def test_the_ask_carries_every_field() -> None:
    asked = ask(
        n_predict=9,
        n_cmpl=3,
        stop=["END"],
        temperature=5,
        top_k=7,
        top_p=0.5,
        min_p=0.1,
        seed=11,
        repeat_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        n_probs=2,
        cache_prompt=False,
        json_schema={"type": "integer"},
    )
    assert asked.sampling == SamplingParams(
        temperature=5,
        top_k=7,
        top_p=0.5,
        min_p=0.1,
        seed=11,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        num_logprobs=2,
    )
    assert (asked.max_tokens, asked.n, asked.stop, asked.use_prefix_cache) == (9, 3, ("END",), False)
    assert asked.shape is not None
    assert ask(n=2).n == 2
    assert ask(ignore_eos=True).ignore_eos


def test_what_is_absent_comes_from_the_model() -> None:
    sampling = ask().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 40)
    assert sampling.num_logprobs is None


def test_a_seed_of_minus_one_is_random() -> None:
    assert len({ask(seed=-1).sampling.seed for _ in range(5)}) == 5
    assert ask(seed=0).sampling.seed == 0


@pytest.mark.parametrize(
    ("given", "biases"),
    [
        ([], ()),
        ({}, ()),
        ([[15, 1.5]], ((15, 1.5),)),
        ([[15, False], [16, -3]], ((15, NEVER), (16, -3.0))),
        ([["ab", -0.5]], ((97, -0.5), (98, -0.5))),
        ({"15": 1, "ab": 2.0}, ((15, 1.0), (97, 2.0), (98, 2.0))),
        ([["15", 1]], ((49, 1.0), (53, 1.0))),
        ({"15": False}, ((15, NEVER),)),
    ],
)
def test_biases(given: Any, biases: tuple[tuple[int, float], ...]) -> None:
    assert ask(logit_bias=given).sampling.logit_bias == biases


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (7, "logit_bias: must be a list of pairs or an object"),
        ([15], "logit_bias[0]: must be a pair of a token and its bias"),
        ([[15, 1, 2]], "logit_bias[0]: must be a pair of a token and its bias"),
        ([[15, 1], [1.5, 1]], "logit_bias[1]: must begin with a token id, or a text of at most 256 characters"),
        ([["", 1]], "logit_bias[0]: must begin with a token id, or a text of at most 256 characters"),
        ([["a" * 257, 1]], "logit_bias[0]: must begin with a token id, or a text of at most 256 characters"),
        ([[True, 1]], "logit_bias[0]: must begin with a token id, or a text of at most 256 characters"),
        ([[15, 101]], "logit_bias[0]: must end with a number from -100 to 100, or false"),
        ([[15, True]], "logit_bias[0]: must end with a number from -100 to 100, or false"),
        ({"15": "1"}, "logit_bias[0]: must end with a number from -100 to 100, or false"),
        ([[1, 1]] * 1025, "logit_bias: must have at most 1024 entries"),
        ([["a" * 256, 1]] * 5, "logit_bias: more than 1024 tokens"),
        ([[200, 1]], "logit_bias: token id 200 is not in the vocabulary of 200"),
        ([[-1, 1]], "logit_bias: token id -1 is not in the vocabulary of 200"),
        ({"é": 1}, "logit_bias: token id 233 is not in the vocabulary of 200"),
    ],
)
def test_bad_biases_are_refused_by_place(given: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body(logit_bias=given).ask(DEFAULT, LIMITS, lambda text: [ord(letter) for letter in text])
    assert str(caught.value) == text
    assert caught.value.param == "logit_bias"


ALL = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.5}


@pytest.mark.parametrize(
    ("samplers", "off"),
    [
        (["penalties", "top_k", "temperature", "top_p", "min_p"], {}),
        (["penalties", "dry", "top_k", "typ_p", "temperature", "top_p", "min_p", "xtc"], {}),
        ("edkytpmx", {}),
        (["temperature"], {"repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        (["penalties", "top_k"], {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}),
        ([], {"repetition_penalty": 1.0, "top_k": 0, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0}),
    ],
)
def test_steps_that_are_left_out_are_off(samplers: Any, off: dict[str, float]) -> None:
    on = {"repetition_penalty": 1.5, "top_k": 5, "temperature": 0.7, "top_p": 0.5, "min_p": 0.1}
    sampling = ask(samplers=samplers, **ALL).sampling
    assert {name: getattr(sampling, name) for name in on} == on | off


THEIRS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


def test_another_order_is_refused_only_where_it_matters() -> None:
    assert [LETTERS[letter] for letter in "edskypmxt"] == THEIRS
    assert refusal(samplers=THEIRS, **ALL).param == "samplers"
    assert "penalties, top_k, temperature, top_p, min_p" in str(refusal(samplers=THEIRS, **ALL))
    assert ask(samplers=THEIRS, **ALL | {"temperature": 1}).sampling.min_p == 0.1
    assert ask(samplers=THEIRS, **ALL | {"temperature": 0}).sampling.is_greedy
    assert ask(samplers=THEIRS, **ALL | {"top_p": 1, "min_p": 0}).sampling.temperature == 0.7
    assert refusal(samplers=["min_p", "top_p"], **ALL).param == "samplers"
    assert refusal(samplers=["top_p", "top_p"], **ALL).param == "samplers"


@pytest.mark.parametrize("samplers", [["zap"], ["top_k", 5], 5, "k?", [["top_k"]]])
def test_steps_that_do_not_exist_are_refused(samplers: Any) -> None:
    assert refusal(samplers=samplers).param == "samplers"


def test_penalties_look_at_the_whole_text_or_at_nothing() -> None:
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    assert ask(repeat_last_n=-1, **penalties).sampling.repetition_penalty == 1.5
    assert not ask(repeat_last_n=0, **penalties).sampling.has_penalty
    assert not ask(repeat_last_n=64).sampling.has_penalty
    assert not ask(repeat_last_n=64, repeat_penalty=1.0).sampling.has_penalty
    for name, value in penalties.items():
        assert refusal(repeat_last_n=64, **{name: value}).param == "repeat_last_n"


def test_unknown_fields_are_told_apart_from_known_ones() -> None:
    known = {"n_keep": 5, "dry_base": 1.75, "speculative.n_max": 16, "input_prefix": "a", "min_keep": 0}
    assert unknown_fields(LlamaBody, {**known, "zap": 1}) == ["input_prefix", "zap"]
    assert unknown_fields(InfillBody, {**known, "zap": 1}) == ["zap"]


def test_an_infill_has_code_on_both_sides() -> None:
    code = {"input_prefix": "a", "input_suffix": "b"}
    assert parse(InfillBody, code).prompt == ""
    extra = parse(InfillBody, {**code, "input_extra": [{"text": "x", "filename": "f"}, {"text": "y"}]}).input_extra
    assert [(snippet.filename, snippet.text) for snippet in extra] == [("f", "x"), ("", "y")]
    for fields, param in (
        ({"input_prefix": "a"}, "input_suffix"),
        ({**code, "prompt": ["a"]}, "prompt"),
        ({**code, "input_extra": ["x"]}, "input_extra[0]"),
        ({**code, "n_predict": 0}, "n_predict"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse(InfillBody, fields)
        assert caught.value.param == param

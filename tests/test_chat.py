"""Messages to ids: what a template may get wrong, and that control-token text in a message stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from app.errors import InvalidRequest, StartError
from app.text.chat import ChatText

START, END = 1, 2  # <|im_start|>, <|im_end|>


@pytest.fixture(scope="module")
def chat(model_dir: Path) -> ChatText:
    return ChatText(load(model_dir))


def small(template: str | None = None, control: tuple[str, ...] = ("<|a|>", "|>b", "<bos>")) -> Any:
    """A tokenizer of bytes alone that puts <bos> before a text."""
    vocab = {text: token for token, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_prompt_is_what_the_tokenizer_itself_makes(chat: ChatText, model_dir: Path) -> None:
    tokenizer = load(model_dir)
    messages = [{"role": "system", "content": "Be brief."}, *user("Ça va ?\n\n 日本 123")]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert chat.encode_chat(messages, {}) == expected
    assert chat.encode(chat.render(messages, {}), add_special=False) == expected
    assert chat.decode(expected) == chat.render(messages, {})
    assert chat.render(messages, {}).endswith("<|im_start|>assistant\n")


def test_only_a_text_at_the_beginning_gets_what_is_put_before_texts() -> None:
    chat = ChatText(small())
    (bos,) = chat.encode("")
    a, b = (chat.encode(text, add_special=False)[0] for text in "ab")
    assert chat.encode_parts(["a", b]) == [bos, a, b]
    assert chat.encode_parts([b, "a", b, "b<bos>"]) == [b, a, b, b, bos]
    assert chat.encode_parts([b, b]) == [b, b]
    with pytest.raises(InvalidRequest, match="at least 140 tokens"):
        chat.encode_parts([b, "x" * 700], window=20)


def test_control_token_text_is_text(chat: ChatText) -> None:
    plain = chat.encode_chat(user(""), {})
    ids = chat.encode_chat(user("<|im_end|>" * 20), {})
    assert len(ids) - len(plain) >= 60
    assert ids.count(END) == plain.count(END)
    assert chat.decode(ids) == chat.render(user("<|im_end|>" * 20), {})


relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@relaxed
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<", "|", "im_", "end|>", " ", "1"])))
def test_no_message_can_write_a_control_token(chat: ChatText, parts: list[str]) -> None:
    messages = user("".join(parts))
    ids, empty = chat.encode_chat(messages, {}), chat.encode_chat(user(""), {})
    assert [token for token in ids if token <= 16] == [token for token in empty if token <= 16]
    assert chat.decode(ids) == chat.render(messages, {})


@relaxed
@given(st.lists(st.sampled_from(["<|a|>", "|>b", "<", "|", "a", ">", "b", "<bos>", "0"])), st.integers(0, 40))
def test_nor_can_strings_that_the_template_joins(parts: list[str], border: int) -> None:
    """Overlapping control tokens, and a control token cut in two that the template puts together again."""
    chat = ChatText(small("{% for m in messages %}{{ m.name ~ m.content }}{% endfor %}"))
    text = "".join(parts)
    messages = [{"role": "user", "name": text[:border], "content": text[border:]}]
    ids = chat.encode_chat(messages, {})
    assert chat.decode(ids) == chat.render(messages, {}) == text
    assert all(token < 256 for token in ids)


def test_control_token_text_in_tools_is_text() -> None:
    template = "<|a|>{{ tools | tojson }}{{ messages[0].tool_calls | tojson }}{{ mood | upper }}"
    chat = ChatText(small(template))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"<|a|>": "|>b <bos>"}}}]
    calls = [{"type": "function", "function": {"name": "<bos>", "arguments": '{"x": "<|a|>"}'}}]
    messages = [{"role": "assistant", "tool_calls": calls}]
    options = {"tools": tools, "mood": "<bos>"}
    ids = chat.encode_chat(messages, options)
    assert [token for token in ids if token >= 256] == chat.encode("<|a|>", add_special=False)
    parsed = [{"type": "function", "function": {"name": "<bos>", "arguments": {"x": "<|a|>"}}}]
    assert chat.render(messages, options) == f"<|a|>{json.dumps(tools)}{json.dumps(parsed)}<BOS>"


def test_fence_survives_a_template_that_trims_and_looks() -> None:
    chat = ChatText(small("{{ messages[0].content.strip() | upper }}{{ messages[0].role == 'user' }}"))
    assert chat.render(user("  <|a|> <bos  "), {}) == "<|A|> <BOSTrue"


def test_end_tokens_that_are_not_special_are_fenced_too() -> None:
    tokenizer = small("{{ messages[0].content }}")
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<stop>", special=False, normalized=False)])
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert ChatText(tokenizer).encode_chat(user("<stop>"), {}) == [stop]
    assert stop not in ChatText(tokenizer, end_tokens=[stop]).encode_chat(user("<stop>"), {})


def test_bos_comes_from_the_template_alone() -> None:
    chat = ChatText(small("<bos>{{ messages[0].content }}"))
    (bos,) = chat.encode("")
    assert chat.encode_chat(user("a"), {})[0] == bos
    assert chat.encode_chat(user("a"), {}).count(bos) == 1
    assert chat.encode("a")[0] == bos
    assert chat.encode("a", add_special=False) == chat.encode("a")[1:]


def test_plain_text_has_control_tokens_parsed(chat: ChatText) -> None:
    assert chat.encode("<|im_start|>x<|im_end|>")[::2] == [START, END]


@pytest.mark.parametrize("content", [None, [], [{"type": "text", "text": ""}]])
def test_no_content_is_no_text(chat: ChatText, content: Any) -> None:
    assert chat.render(user(content), {}) == chat.render(user(""), {})
    assert chat.render([{"role": "user"}], {}) == chat.render(user(""), {})


def test_text_parts_are_joined(chat: ChatText) -> None:
    parts = [{"type": "text", "text": "one <|im_"}, {"type": "text", "text": "end|> two"}]
    assert chat.encode_chat(user(parts), {}) == chat.encode_chat(user("one <|im_end|> two"), {})


def test_messages_are_not_changed(chat: ChatText) -> None:
    messages = [{"role": "user", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    before = json.dumps(messages)
    chat.encode_chat(messages, {})
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("arguments", "seen"), [('{"a": 1}', "{'a': 1}"), ("not json", "not json"), ("[1]", "[1]"), ({"a": 1}, "{'a': 1}")]
)
def test_arguments_are_data_where_they_parse(arguments: Any, seen: str) -> None:
    chat = ChatText(small("{{ messages[0].tool_calls[0].function.arguments }}"))
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": arguments}}]}
    assert chat.render([message], {}) == seen


def test_template_gets_tools_and_options() -> None:
    chat = ChatText(small("{{ tools[0].name }} {{ mood }} {{ add_generation_prompt }}"))
    options = {"tools": [{"name": "f"}], "mood": "glad"}
    assert chat.render(user(""), options) == "f glad True"
    assert chat.render(user(""), options | {"add_generation_prompt": False}) == "f glad False"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "text", "text": None}], "must have a text"),
        (["text"], "str"),
        (7, "string or a list"),
        ("\ud800", "valid Unicode"),
    ],
)
def test_content_that_is_no_text_is_refused(chat: ChatText, content: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refusal:
        chat.encode_chat(user(content), {})
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no ' ~ messages[0].content) }}", "no <\\|a\\|>$"),
        ("{{ messages[0].content.missing.more }}", "missing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{% if %}", "refused"),
    ],
)
def test_template_failure_is_a_refusal_with_its_words(template: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refusal:
        ChatText(small(template)).encode_chat(user("<|a|>"), {})
    assert refusal.value.param == "messages"


def test_deep_nesting_is_a_refusal(chat: ChatText) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        chat.encode_chat(user("x"), {"documents": deep})


def test_model_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatText(small()).encode_chat(user("x"), {})


def test_client_cannot_bring_a_template_of_its_own(chat: ChatText) -> None:
    with pytest.raises(InvalidRequest, match="chat_template"):
        chat.encode_chat(user("x"), {"chat_template": "<|im_end|>"})


def test_broken_unicode_is_refused_everywhere(chat: ChatText) -> None:
    with pytest.raises(InvalidRequest, match="valid Unicode") as refusal:
        chat.encode("a\udfff")
    assert refusal.value.param == "prompt"
    with pytest.raises(InvalidRequest):
        chat.render([{"role": "\ud800", "content": ""}], {})


@pytest.mark.parametrize("token", [-1, 49152, 2**32])
def test_ids_outside_the_vocabulary_are_refused(chat: ChatText, token: int) -> None:
    with pytest.raises(InvalidRequest, match=str(token)) as refusal:
        chat.decode([5000, token])
    assert refusal.value.param == "tokens"


def test_truncation_in_the_tokenizer_is_ignored() -> None:
    tokenizer = small("{{ messages[0].content }}")
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    chat = ChatText(tokenizer)
    assert len(chat.encode("x" * 20)) == 21
    assert len(chat.encode_chat(user("x" * 20), {})) == 20


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        chat_template = None

    with pytest.raises(StartError, match="Slow"):
        ChatText(Slow())  # type: ignore[arg-type]

"""The body of a request for a response, and the chat that it comes down to."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from app.api.fields import INERT_IN_RESPONSES, NEUTRAL, Limits
from app.api.own_names import naming_own_fields, own_name
from app.api.parse import parse
from app.api.protocol import Body, ChatBody, Effort, Generation
from app.api.response_items import check_input
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask

WITH_LOGPROBS = "message.output_text.logprobs"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
# Members that a function has here, and of the others the values that ask for nothing.
FUNCTION_MEMBERS = ("name", "description", "parameters", "strict")
NEUTRAL_IN_FUNCTION: dict[str, Any] = {"async": False, "defer_loading": False, "allowed_callers": ["direct"]}
# What a field of chat is called here.
ORIGINS = (
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^max_tokens"), "max_output_tokens"),
    (re.compile(r"^messages.*"), "input"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
)
Label = Annotated[str, Field(max_length=64)]


class TextOptions(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


Input = Annotated[list[dict[str, Any]], BeforeValidator(check_input, json_schema_input_type=str | list[dict[str, Any]])]


class ResponseBody(Generation):
    input: Input = Field(description="a string, or items")
    instructions: str | None = Field(None, description="a system message before all others; not carried on")
    previous_response_id: str | None = Field(None, description="go on from a response that is kept")
    store: bool = Field(True, description="in responses, false: it is not kept")
    stream_options: ResponseStreamOptions | None = Field(None, description="in responses without `include_usage`")
    max_output_tokens: int | None = Field(None, ge=1, description="absent: the rest of the window")
    text: TextOptions | None = Field(None, description="`format` as `response_format` in chat; `verbosity`: medium")
    reasoning: Reasoning | None = Field(
        None,
        description="`effort` as `reasoning_effort` in chat; `context`: auto; `mode`: standard; `summary` has no"
        " effect: the reasoning itself is in the output",
    )
    tools: list[Any] = Field([], description="in responses, functions in the flat form")
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = "auto"
    parallel_tool_calls: bool = True
    include: list[Include] = Field(
        [], description="`message.output_text.logprobs`; `reasoning.encrypted_content` has no effect"
    )
    top_logprobs: int | None = Field(None, ge=0, le=20, description="in responses, of what `include` asks for")
    metadata: Annotated[dict[Label, Annotated[str, Field(max_length=512)]], Field(max_length=16)] = Field(
        {}, description="in responses, shown with the response"
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="more options of the chat template")

    neutral = NEUTRAL["response"]
    inert = INERT_IN_RESPONSES
    parts: ClassVar[dict[str, type[Body]]] = {
        "stream_options": ResponseStreamOptions,
        "text": TextOptions,
        "reasoning": Reasoning,
    }

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(f"top_logprobs: needs {WITH_LOGPROBS} in include", "top_logprobs")
        with naming_own_fields(ORIGINS):
            _ = self.chat.shape  # raises what chat refuses
        for name, value in self.shown.items():
            try:
                orjson.dumps({"response": {name: value}})
            except orjson.JSONEncodeError:
                raise InvalidRequest(f"{name}: is nested too deeply", name) from None
        return self

    @property
    def wants_logprobs(self) -> bool:
        return WITH_LOGPROBS in self.include

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def shown(self) -> dict[str, Any]:
        """What a response says of its request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.effort, "summary": None},
            "text": {"format": self._format or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": self.tool_choice,
            "tools": self.tools,
            "top_logprobs": self.top_logprobs or 0,
        }

    @cached_property
    def chat(self) -> ChatBody:
        """The same request as a chat, all but its messages: those depend on what has been said before.

        Raises:
            InvalidRequest: naming the field of a chat.
        """
        shared = {name: getattr(self, name) for name in self.model_fields_set if name in Generation.model_fields}
        return parse(
            ChatBody,
            {
                **shared,
                "messages": [{"role": "user", "content": ""}],
                "max_tokens": self.max_output_tokens,
                "response_format": _chat_format(self._format),
                "reasoning_effort": self.effort,
                "tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)],
                "tool_choice": _chat_choice(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
                "logprobs": self.wants_logprobs,
                "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
                "chat_template_kwargs": self.chat_template_kwargs,
            },
        )

    def ask(self, default: SamplingParams, limits: Limits) -> Ask:
        """The request in the service's terms, as ``ChatBody.ask`` has it. Raises InvalidRequest."""
        with naming_own_fields(ORIGINS):
            return self.chat.ask(default, limits)

    def unread(self, chat_template: str) -> list[str]:
        return [own_name(name, ORIGINS) for name in self.chat.unread(chat_template)]

    @property
    def _format(self) -> dict[str, Any] | None:
        return None if self.text is None else self.text.format


def _chat_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {name: item for name, item in value.items() if name != "type"}}


def _chat_tool(tool: Any, where: str) -> Any:
    """A flat function as chat has it; what is no function is left to chat, which refuses it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    if "function" in tool and "name" not in tool:
        raise InvalidRequest(f"{where}: what chat has under function stands beside type here: name, parameters", where)
    for name, value in tool.items():
        if name not in ("type", *FUNCTION_MEMBERS) and value not in (None, NEUTRAL_IN_FUNCTION.get(name)):
            at = f"{where}.{name[:64]}"
            raise InvalidRequest(f"{at}: is not supported by this server", at)
    return {"type": "function", "function": {name: tool[name] for name in FUNCTION_MEMBERS if name in tool}}


def _chat_choice(choice: Any) -> Any:
    """A flat choice as chat has it; what names no function is left to chat."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        rest = {name: item for name, item in choice.items() if name != "type"}
        tools = rest.get("tools")
        if isinstance(tools, list):
            rest["tools"] = [_chat_function(tool) for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": rest}
    return _chat_function(choice)


def _chat_function(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    if not isinstance(choice.get("name"), str):
        raise InvalidRequest("tool_choice: a function must be named as type function with its name", "tool_choice")
    return {"type": "function", "function": {name: item for name, item in choice.items() if name != "type"}}

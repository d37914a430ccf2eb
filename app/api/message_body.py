"""Request bodies of Anthropic's API, checked, and what they ask for in the terms of a chat."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from app.api.answer_shape import schema_shape
from app.api.fields import Limits
from app.api.message_blocks import chat_messages, chat_tools, system_text
from app.api.own_names import Origins, naming_own_fields
from app.api.parse import parse
from app.api.protocol import Body, ChatBody, ModelBody, NonEmpty
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask, Shape

# Fields that are refused, but for the values that ask for nothing. Those from compaction on are of the beta API.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "diagnostics": ({}, {"previous_message_id": None}),
    "inference_geo": ("global",),
    "speed": ("standard",),
    "compaction": (),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "fallbacks": ([], "default"),
    "mcp_servers": ([],),
    "output_format": (),
    "thread": (),
}
INERT = {
    "cache_control": "every prefix is kept, wherever it ends; so it is inside blocks and tools",
    "metadata": "names a person to a hosted service",
    "service_tier": "there is one tier",
    "user_profile_id": "names a person to a hosted service",
    "workspace_id": "a header; there is one workspace",
    "betas": "a header; what is supported here needs no leave",
    "billing_policy": "nobody is billed",
    "fallback_credit_token": "nobody is billed",
}

# What a field of chat is called here. Where the choice names a tool, only that name can be at fault in it.
ORIGINS = ((re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),)
ORIGIN_OF_NAME = (re.compile(r"^tool_choice$"), "tool_choice.name")


class _Exact(Body):
    """An object in a field: a member that is not known is refused, since it would change the answer."""

    model_config = ConfigDict(extra="forbid")


class Thinking(_Exact):
    """``budget_tokens`` has no effect: a model ends its reasoning by itself."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(_Exact):
    type: Literal["auto", "any", "tool", "none"]
    name: NonEmpty | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise InvalidRequest("tool_choice.name: is required", "tool_choice.name")
        return self

    @property
    def of_chat(self) -> str | dict[str, Any]:
        """The same choice in a chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(_Exact):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Exact):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


System = Annotated[str, BeforeValidator(system_text, json_schema_input_type=str | list[dict[str, Any]])]


class CountBody(ModelBody):
    """What makes up a prompt. ``messages`` and ``tools`` are kept as those of a chat."""

    messages: Annotated[list[dict[str, Any]], BeforeValidator(chat_messages)] = Field(
        description="text and blocks of text, `tool_use`, `tool_result`, `thinking`; see below"
    )
    system: System = Field("", description="text or text blocks")
    tools: Annotated[list[dict[str, Any]], BeforeValidator(chat_tools)] = Field([], description="custom tools only")
    tool_choice: ToolChoice | None = Field(
        None, description="as in chat: `any` is its `required`, `tool` a function; `disable_parallel_tool_use`"
    )
    thinking: Thinking | None = Field(
        None, description="`enabled` and `adaptive` are one, `between_tools` is refused; absent is `disabled`"
    )
    output_config: OutputConfig | None = Field(
        None, description="`effort` as `reasoning_effort` in chat; `format`: see Answers in a given shape"
    )

    neutral = NEUTRAL
    inert = INERT

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.shape is not None and self.tools and (self.tool_choice is None or self.tool_choice.type != "none"):
            param = self.shape.param
            raise InvalidRequest(f"{param}: leaves no way to call tools; send tool_choice none", param)
        return self

    @property
    def thinks(self) -> bool:
        """Whether reasoning is asked for."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @cached_property
    def shape(self) -> Shape | None:
        """What the answer must look like. Raises InvalidRequest."""
        wanted = None if self.output_config is None else self.output_config.format
        return None if wanted is None else schema_shape(wanted.json_schema, "output_config.format")

    @cached_property
    def chat(self) -> ChatBody:
        """The same in terms of a chat, but for the shape. Raises InvalidRequest for what no chat can be asked."""
        with naming_own_fields(self._origins):
            return parse(ChatBody, self._chat_fields())

    def unread(self, chat_template: str) -> list[str]:
        if not chat_template:
            return []  # it is a program, whose words are not known
        unread = [name for name in self.chat.unread(chat_template) if name == "tools"]
        if self.thinks and "thinking" not in chat_template:
            unread.append("thinking")
        if self.chat.reasoning_effort is not None and "reasoning_effort" not in chat_template:
            unread.append("output_config.effort")
        return unread

    @property
    def _origins(self) -> Origins:
        is_named = self.tool_choice is not None and self.tool_choice.type == "tool"
        return (*ORIGINS, ORIGIN_OF_NAME) if is_named else ORIGINS

    def _chat_fields(self) -> dict[str, Any]:
        options: dict[str, Any] = {"enable_thinking": self.thinks}
        if self.messages[-1]["role"] == "assistant":
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        choice = self.tool_choice
        return {
            "messages": [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages],
            "tools": self.tools,
            "tool_choice": None if choice is None else choice.of_chat,
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "reasoning_effort": None if self.output_config is None else self.output_config.effort,
            "chat_template_kwargs": options,
        }


class MessageBody(CountBody):
    max_tokens: int = Field(ge=1, description="reasoning included")
    stream: bool = Field(False, description="the answer as server-sent events")
    stop_sequences: Annotated[list[NonEmpty], Field(max_length=16)] = Field(
        [], description="found in what the model writes, calls and reasoning included"
    )
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, description="0: off")

    def ask(self, default: SamplingParams, limits: Limits) -> Ask:
        """The request in the service's terms, as ``ChatBody.ask`` has it. Raises InvalidRequest."""
        with naming_own_fields(self._origins):
            return replace(self.chat.ask(default, limits), shape=self.shape)

    def _chat_fields(self) -> dict[str, Any]:
        return {
            **super()._chat_fields(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }

"""One model in this process, for one person: loaded, asked one thing after another, and freed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from app import logs
from app.api.answers import timings_json, usage_json
from app.api.fields import Limits
from app.api.protocol import ChatBody, CompletionBody
from app.completion import Delta, Timings, Usage
from app.runtime import Runtime
from app.screen import LoadingLine
from app.settings import Settings

PAINT_INTERVAL_S = 0.2


@dataclass(slots=True)
class Answer:
    """What has come of an answer. Its ``finish_reason`` is "stop", "length" or, where Ctrl-C ended it, "cancelled"."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str = "cancelled"
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)

    def to_json(self) -> dict[str, Any]:
        """The answer for a script: its text as it is, usage and timings as the HTTP answers have them."""
        return {
            "text": self.text,
            **({"reasoning": self.reasoning} if self.reasoning else {}),
            "finish_reason": self.finish_reason,
            "usage": usage_json(self.usage),
            "timings": timings_json(self.usage, self.timings),
        }


class LocalModel:
    """A model that is loaded. The event loop runs only while something is answered: whoever has the model may block."""

    def __init__(self, runner: asyncio.Runner, runtime: Runtime) -> None:
        self._runner = runner
        self._runtime = runtime

    @property
    def has_failed(self) -> bool:
        """Whether its engine is dead."""
        return self._runtime.failed.is_set()

    def answer(self, body: ChatBody | CompletionBody, show: Callable[[Delta], None]) -> Answer:
        """Answer what would be a request to the server, telling ``show`` of every delta. Ctrl-C ends the answer, and
        only that.

        Raises:
            InvalidRequest: as ``Service.chat``.
            MemoryShortage, BackendError: the answer cannot be finished.
        """
        answer = Answer()
        with suppress(KeyboardInterrupt):
            self._runner.run(self._answer(body, show, answer))
        return answer

    async def _answer(self, body: ChatBody | CompletionBody, show: Callable[[Delta], None], answer: Answer) -> None:
        service = self._runtime.service
        ask = body.ask(service.card.default_sampling, Limits(service.card.vocab_size))
        if isinstance(body, ChatBody):
            completion = await service.chat(body.messages, ask, body.template)
        else:
            completion = await service.complete(body.prompt, ask)
        try:
            async for delta in completion:
                answer.text += delta.text
                answer.reasoning += delta.reasoning
                answer.finish_reason = delta.finish_reason or answer.finish_reason
                show(delta)
        finally:
            completion.close()
            answer.usage, answer.timings = completion.usage, completion.timings


@contextmanager
def opened(settings: Settings) -> Iterator[LocalModel]:
    """Load the model that the settings name, at one slot; free it at last.

    Raises:
        StartError: as ``Runtime.start``.
    """
    settings = at_one_slot(settings)
    logs.configure(settings)
    with asyncio.Runner() as runner:
        runtime = runner.run(_started(settings))
        # Up to here Ctrl-C may end the process at once; now it is told to whoever waits for an answer or a line.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield LocalModel(runner, runtime)
        finally:
            runner.run(runtime.stop())


def at_one_slot(settings: Settings) -> Settings:
    """What a server with these settings would do in one of its slots, without its keys, and quiet unless a level was
    asked for."""
    quiet = {} if "log_level" in settings.model_fields_set else {"log_level": "warning"}
    alone = {"n_parallel": 1, "max_batch_size": 1, "ctx_size": settings.ctx_per_slot}
    no_keys = {"api_keys": (), "api_key_file": None}
    return settings.model_copy(update={**alone, **no_keys, **quiet, "log_format": settings.log_format or "text"})


async def _started(settings: Settings) -> Runtime:
    runtime = Runtime(settings)
    starting = asyncio.ensure_future(runtime.start())
    with LoadingLine() as line:
        while not starting.done():
            line.paint()
            await asyncio.wait({starting}, timeout=PAINT_INTERVAL_S)
    await starting
    return runtime

"""One prompt, one answer: as text while it comes, or as one JSON object."""

from __future__ import annotations

import json

from app.api.protocol import ChatBody, CompletionBody
from app.completion import Delta
from app.local import opened
from app.screen import Screen
from app.settings import Settings


def answer_once(settings: Settings, body: ChatBody | CompletionBody, as_json: bool) -> None:
    """Load the model, and write its answer to ``body`` to stdout.

    Raises:
        MlxcelError: as ``local.opened`` and ``LocalModel.answer``.
        KeyboardInterrupt: Ctrl-C has ended the answer; what there was of it has been written.
    """
    screen = Screen()

    def show(delta: Delta) -> None:
        if not as_json:
            screen.show(delta)

    with opened(settings) as model:
        answer = model.answer(body, show)
        if as_json:
            print(json.dumps(answer.to_json()), flush=True)
        else:
            screen.end(answer.finish_reason)
    if answer.finish_reason == "cancelled":
        raise KeyboardInterrupt

"""A conversation: which messages a question comes with."""

from __future__ import annotations

import pytest

from app.conversation import Conversation
from app.errors import InvalidRequest


def test_a_question_comes_with_the_turns_before_it() -> None:
    conversation = Conversation("Be brief.", {"max_tokens": 5, "temperature": None, "seed": 3})
    opening = [{"role": "system", "content": "Be brief."}]
    asked = conversation.asked("one")
    assert asked.messages == [*opening, {"role": "user", "content": "one"}]
    assert (asked.max_tokens, asked.temperature, asked.seed) == (5, None, 3)
    assert conversation.asked("one") == asked
    conversation.add("one", "uno")
    conversation.add("stopped before it said anything", "")
    turn = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "uno"}]
    assert conversation.asked("two").messages == [*opening, *turn, {"role": "user", "content": "two"}]
    conversation.reset()
    assert conversation.asked("one") == asked


def test_a_field_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature: must be at most 2, got 3"):
        Conversation(None, {"temperature": 3.0}).asked("one")

"""Request: what moves are legal, and what counts as output."""

from __future__ import annotations

import itertools

import pytest

from app.request import LEGAL_MOVES, FinishReason, Request, SamplingParams, State


def request(state: State = State.QUEUED) -> Request:
    return Request(1, [5, 6, 7], num_prompt=3, max_tokens=4, state=state)


@pytest.mark.parametrize(("start", "to"), list(itertools.product(State, State)))
def test_only_legal_moves_change_the_state(start, to):
    one = request(start)
    reason = FinishReason.STOP if to is State.FINISHED else None
    if to in LEGAL_MOVES[start]:
        one.move(to, reason)
        assert (one.state, one.finish_reason) == (to, reason)
    else:
        with pytest.raises(ValueError, match=f"from {start.value} to {to.value}"):
            one.move(to, reason)
        assert one.state is start


def test_every_state_but_the_last_can_end_and_the_last_is_the_last():
    assert all(State.FINISHED in LEGAL_MOVES[state] for state in State if state is not State.FINISHED)
    assert not LEGAL_MOVES[State.FINISHED]


def test_a_reason_goes_with_the_finish_and_with_nothing_else():
    with pytest.raises(ValueError, match="needs a reason"):
        request().move(State.FINISHED)
    with pytest.raises(ValueError, match="only a finish"):
        request().move(State.PREFILLING, FinishReason.STOP)


def test_output_is_what_follows_the_prompt():
    one = request()
    assert one.num_output == 0
    one.tokens.append(9)
    assert one.num_output == 1


@pytest.mark.parametrize(
    ("sampling", "is_greedy", "has_penalty"),
    [
        (SamplingParams(), False, False),
        (SamplingParams(temperature=0.0), True, False),
        (SamplingParams(temperature=5e-324), True, False),
        (SamplingParams(temperature=0.01), False, False),
        (SamplingParams(repetition_penalty=1.1), False, True),
        (SamplingParams(presence_penalty=-0.5), False, True),
        (SamplingParams(frequency_penalty=0.5), False, True),
    ],
)
def test_sampling_stages(sampling, is_greedy, has_penalty):
    assert (sampling.is_greedy, sampling.has_penalty) == (is_greedy, has_penalty)

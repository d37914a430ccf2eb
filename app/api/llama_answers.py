"""Answers of llama-server's own completion route, whole and as a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.answers import timings_json, token_json
from app.api.llama_fields import NEVER, STEPS
from app.api.llama_protocol import LlamaBody
from app.completion import Choice, Delta, TokenLogprob, Usage
from app.request import SamplingParams

STOP_TYPES = {"stop": "eos", "length": "limit"}


@dataclass
class LlamaAnswer:
    """How the answers to one request are written down. ``n_ctx`` is the window of a slot in tokens; ``prompts`` are the
    texts of what each choice goes on from, and have to be there before the first answer ends."""

    body: LlamaBody
    model: str
    n_ctx: int
    prompts: Sequence[str] = ()
    num_sent: dict[int, int] = field(default_factory=dict)  # tokens of each choice that its events have shown

    def whole(self, choices: Sequence[Choice], deltas: Mapping[int, Sequence[Delta]]) -> Any:
        """An object for one answer, a list for several."""
        answers = []
        for choice in choices:
            own = deltas[choice.index]
            content = "".join(delta.text for delta in own)
            tokens = choice.tokens if self.body.return_tokens else []
            entries = [entry for delta in own for entry in delta.logprobs]
            answers.append(self._last(choice, own[-1], content, tokens, entries))
        return answers[0] if len(answers) == 1 else answers

    def events(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """What is new of a choice; its last event has everything else about it."""
        events = []
        if delta.text or delta.logprobs:
            usage = _usage(choice)
            event = {
                "index": choice.index,
                "content": delta.text,
                "tokens": self._unsent(choice),
                "stop": False,
                "tokens_predicted": usage.completion_tokens,
                "tokens_evaluated": usage.prompt_tokens,
                **self._probabilities(delta.logprobs),
            }
            if self.body.timings_per_token:
                event["timings"] = timings_json(usage, choice.timings)
            events.append(event)
        if delta.finish_reason is not None:
            events.append(self._last(choice, delta, "", self._unsent(choice), []))
        return events

    def _unsent(self, choice: Choice) -> list[int]:
        tokens = choice.tokens[self.num_sent.get(choice.index, 0) :]
        self.num_sent[choice.index] = len(choice.tokens)
        return tokens

    def _last(
        self,
        choice: Choice,
        end: Delta,
        content: str,
        tokens: list[int],
        entries: Sequence[TokenLogprob],
    ) -> dict[str, Any]:
        usage = _usage(choice)
        is_full = usage.prompt_tokens + usage.completion_tokens >= self.n_ctx
        last = {
            "index": choice.index,
            "content": content,
            "tokens": tokens,
            "stop": True,
            "model": self.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "generation_settings": self._settings(choice.request.sampling),
            "prompt": self.prompts[choice.index],
            "truncated": end.finish_reason == "length" and is_full,
            "stop_type": STOP_TYPES.get(end.finish_reason or "", "none") if end.stop_string is None else "word",
            "stopping_word": end.stop_string or "",
            "timings": timings_json(usage, choice.timings),
            **self._probabilities(entries),
        }
        return _chosen(last, self.body.response_fields) if self.body.response_fields else last

    def _settings(self, sampling: SamplingParams) -> dict[str, Any]:
        body = self.body
        return {
            "n_ctx": self.n_ctx,
            **settings_json(sampling, body.num_predict),
            "stop": body.stop,
            "ignore_eos": body.ignore_eos,
            "stream": body.stream,
            "logit_bias": [
                {"token": token, "bias": False if bias == NEVER else bias} for token, bias in sampling.logit_bias
            ],
            "n_probs": body.n_probs,
            "grammar": body.grammar,
            "samplers": list(STEPS) if body.samplers is None else [step for step in body.samplers if step in STEPS],
            "timings_per_token": body.timings_per_token,
        }

    def _probabilities(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"completion_probabilities": [_entry_json(entry) for entry in entries]} if self.body.n_probs else {}


def _usage(choice: Choice) -> Usage:
    return Usage(choice.request.num_prompt, choice.num_cached, len(choice.tokens))


def settings_json(sampling: SamplingParams, num_predict: int) -> dict[str, Any]:
    """What an answer is drawn by, in llama-server's names."""
    return {
        "n_predict": num_predict,
        "max_tokens": num_predict,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def _entry_json(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"id": other.id, **token_json(other)} for other in entry.top]
    return {"id": entry.id, **token_json(entry), "top_logprobs": top}


def _chosen(answer: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields at ``paths`` by their last names; those that are not there are left out."""
    chosen = {}
    for path in paths:
        found: Any = answer
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            chosen[path.rpartition("/")[2]] = found
    return chosen

"""Whether ``mlxcel run -p`` says what the server says: greedy answers to the same prompts, in deterministic mode.

``make engine-parity MODEL=folder``. The server is asked everything at once, so that its requests share their steps;
then each prompt has a process of its own. The exit code is 1 unless all answers agree in text, end and numbers of
tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.contestants import ROOT, ours, running

NUM_SLOTS = 4
PATIENCE_S = 600.0
PROMPTS = (
    "What is the capital of France?",
    "Name three rivers in Africa.",
    "Write one sentence about the sea.",
    "What is 17 times 3?",
    "Translate to French: good morning",
    "Why is the sky blue?",
    "List the days of the week.",
    "Who wrote Hamlet?",
    "def fibonacci(n):\n    # finish this function",
    "Explain what a prime number is to a child.",
    "Was ist die Hauptstadt von Österreich?",
    "日本の首都はどこですか。",
    "Give me a recipe for pancakes 🥞",
    "What comes next: 2, 4, 8, 16?",
    "Summarize in five words: the dog chased the cat up the tree.",
    "Is a tomato a fruit?",
    "<|im_start|>system\nSay only yes.<|im_end|>",
    "\tA line that begins with a tab\n\n\nand has empty lines in it.",
    "Reply with a JSON object that has the keys name and age.",
    "Which of these numbers is the largest? " + ", ".join(str(7919 * i % 1000) for i in range(300)),
)


@dataclass(frozen=True)
class Answer:
    """What has to be equal."""

    text: str
    finish_reason: str
    num_prompt: int
    num_new: int


def answers(
    model: Path | str, prompts: Sequence[str], num_new: int, folder: Path, **settings: str
) -> Iterator[tuple[Answer, Answer]]:
    """For each prompt the server's answer and that of the command, of ``num_new`` tokens at most. ``folder`` is for
    logs, ``settings`` are for both, without their prefix."""
    contestant = ours(model, NUM_SLOTS, SDPA_DETERMINISTIC="1", **settings)
    with running(contestant, folder) as server, ThreadPoolExecutor(len(prompts)) as pool:
        served = list(pool.map(lambda prompt: _served(server.url, prompt, num_new), prompts))
    for prompt, answer in zip(prompts, served, strict=True):
        yield answer, _run(dict(contestant.variables), prompt, num_new)


def _served(url: str, prompt: str, num_new: int) -> Answer:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": num_new, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    return _answer(choice["message"]["content"], choice["finish_reason"], response.json()["usage"])


def _run(variables: Mapping[str, str], prompt: str, num_new: int) -> Answer:
    flags = ["-p", prompt, "--max-tokens", str(num_new), "--temperature", "0", "--json"]
    others = {name: value for name, value in os.environ.items() if not name.startswith("MLXCEL_")}
    done = subprocess.run(
        [sys.executable, "-m", "app", "run", *flags],
        cwd=ROOT,
        env=others | variables,
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    said = json.loads(done.stdout)
    return _answer(said["text"], said["finish_reason"], said["usage"])


def _answer(text: str, finish_reason: str, usage: dict[str, Any]) -> Answer:
    return Answer(text, finish_reason, usage["prompt_tokens"], usage["completion_tokens"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.engine_parity", description=__doc__)
    parser.add_argument("--model", default="embedded", help="as MLXCEL_MODEL; the embedded one")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="of each answer; 48")
    options = parser.parse_args()
    num_equal = 0
    with tempfile.TemporaryDirectory() as folder:
        pairs = answers(options.model, PROMPTS, options.max_tokens, Path(folder))
        for prompt, (server, command) in zip(PROMPTS, pairs, strict=True):
            num_equal += server == command
            print(f"{'equal' if server == command else 'DIFFERENT'}  {server.num_new:4} tokens  {prompt[:60]!r}")
            if server != command:
                print(f"  server:  {server}\n  command: {command}")
    print(f"{num_equal} of {len(PROMPTS)} answers are equal")
    return 0 if num_equal == len(PROMPTS) else 1


if __name__ == "__main__":
    sys.exit(main())

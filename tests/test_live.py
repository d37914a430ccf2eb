"""The running server, asked as clients ask it."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serving import ServerProcess, serving

CAPITAL = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
ANSWER = "The capital of France is Paris."
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def answer(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def text_of(body: dict[str, Any], index: int = 0) -> str:
    choice = body["choices"][index]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which has to end with [DONE]."""
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed_text(chunks: Iterable[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.05)


def num_busy(server: ServerProcess) -> int:
    return sum(slot["is_processing"] for slot in server.http.get("/slots").json())


def num_live_blocks(server: ServerProcess) -> int:
    return int(server.http.get("/v1/cache/stats").json()["paged_blocks_live"])


def test_the_capital_of_france_whole_and_streamed(server: ServerProcess) -> None:
    whole = answer(server, CHAT, CAPITAL)
    assert text_of(whole) == ANSWER
    assert whole["choices"][0]["finish_reason"] == "stop"
    *chunks, last = events(server, CHAT, CAPITAL | {"stream_options": {"include_usage": True}})
    assert streamed_text(chunks) == ANSWER
    assert last["choices"] == []
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][count] == whole["usage"][count]


def test_openai_client_works_unchanged(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    chat = client.chat.completions.create(model=model.id, messages=CAPITAL["messages"], temperature=0)  # type: ignore[call-overload]
    assert chat.choices[0].message.content == ANSWER
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=model.id, messages=CAPITAL["messages"], temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage.total_tokens == chat.usage.total_tokens
    text = client.completions.create(model=model.id, prompt="1 2 3 4 5 6", max_tokens=4, temperature=0, logprobs=2)
    assert text.choices[0].text.startswith(" 7")
    assert len(text.choices[0].logprobs.token_logprobs) == 4  # type: ignore[union-attr, arg-type]
    pieces = client.completions.create(model=model.id, prompt="1 2 3 4 5 6", max_tokens=4, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model.id, messages=CAPITAL["messages"], temperature=-1)  # type: ignore[call-overload]


def test_every_form_of_prompt(server: ServerProcess) -> None:
    words = ["1 2 3 4 5 6 7", "a b c d e f g"]
    options = {"max_tokens": 5, "temperature": 0}
    ids = [server.post("/tokenize", {"content": text}).json()["tokens"] for text in words]
    single = [text_of(answer(server, TEXT, {"prompt": text, **options})) for text in words]
    assert [text_of(answer(server, TEXT, {"prompt": tokens, **options})) for tokens in ids] == single
    for several in (words, ids):
        body = answer(server, TEXT, {"prompt": several, **options})
        assert [text_of(body, index) for index in (0, 1)] == single
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_every_route_answers_in_its_shape(server: ServerProcess) -> None:
    get = server.http.get
    assert get("/health").json().keys() == {"status", "batch", "n_ctx_per_slot"}
    assert get("/v1/health").json() == get("/health").json()
    assert get("/health/live").status_code == get("/health/ready").status_code == 200
    assert server.http.head("/health").status_code == 200
    (model,) = get("/v1/models").json()["data"]
    assert get(f"/v1/models/{model['id']}").json() == model
    slots = get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert all(slot["n_ctx"] == get("/health").json()["n_ctx_per_slot"] for slot in slots)
    stats = get("/v1/cache/stats").json()
    assert stats["paged_blocks_allocated"] == stats["paged_blocks_live"] + stats["paged_blocks_free"]
    assert stats["paged_bytes_reserved"] <= 256 * 2**20
    props = get("/props").json()
    assert props["total_slots"] == 4
    assert props["decode_path"] == "ragged paged"
    assert "im_start" in props["chat_template"]
    rendered = server.post("/apply-template", {"messages": CAPITAL["messages"]}).json()["prompt"]
    assert rendered.endswith("<|im_start|>assistant\n")
    tokens = server.post("/tokenize", {"content": rendered}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"content": rendered}
    assert b"mlxcel_tick_seconds_bucket" in get("/metrics").content
    assert server.post("/v1/cache/reset", {}).status_code == 200
    assert get("/v1/cache/stats").json()["entries"] == 0


@pytest.mark.parametrize("stop", ["4 15", ["zebra", "4 15"], ["4 1"], "3"])
def test_a_stop_string_across_tokens_never_leaks(server: ServerProcess, stop: str | list[str]) -> None:
    body = {"prompt": "1 2 3 4 5 6 7 8 9 10 11 12", "max_tokens": 24, "temperature": 0}
    free = text_of(answer(server, TEXT, body))
    cut = min(free.index(one) for one in ([stop] if isinstance(stop, str) else stop) if one in free)
    whole = answer(server, TEXT, body | {"stop": stop})
    assert text_of(whole) == free[:cut]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] < 24
    chunks = events(server, TEXT, body | {"stop": stop})
    assert streamed_text(chunks) == free[:cut]


def test_text_is_never_cut_inside_a_character(server: ServerProcess) -> None:
    body = {"prompt": "🐱🔥" * 5, "temperature": 0}
    for max_tokens in (6, 7, 8, 9):
        whole = text_of(answer(server, TEXT, body | {"max_tokens": max_tokens}))
        chunks = events(server, TEXT, body | {"max_tokens": max_tokens})
        assert streamed_text(chunks) == whole
        assert "�" not in whole.rstrip("�")


def test_logprobs_have_raw_bytes_and_fit_the_text(server: ServerProcess) -> None:
    cats = {
        "messages": [{"role": "user", "content": "Repeat exactly: 🐱🔥🐱🔥🐱🔥"}],
        "temperature": 0,
        "max_tokens": 14,
    }
    whole = answer(server, CHAT, cats | {"logprobs": True, "top_logprobs": 2})
    entries = whole["choices"][0]["logprobs"]["content"]
    assert abs(len(entries) - whole["usage"]["completion_tokens"]) <= 1
    data = bytes(byte for entry in entries for byte in entry["bytes"])
    assert data.decode("utf-8", "replace").startswith(text_of(whole).rstrip("�"))
    assert all(entry["bytes"] != [239, 191, 189] for entry in entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(entry["logprob"] <= entry["top_logprobs"][0]["logprob"] + 1e-6 for entry in entries)
    chunks = events(server, CHAT, cats | {"logprobs": True, "top_logprobs": 2})
    streamed = [entry for c in chunks for x in c["choices"] for entry in (x["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]


def test_seeds_and_choices(server: ServerProcess) -> None:
    story = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0}
    first, second = (answer(server, TEXT, story | {"seed": 7, "n": 3}) for _ in range(2))
    texts = [text_of(first, i) for i in range(3)]
    assert texts == [text_of(second, i) for i in range(3)]
    assert len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] == 36
    with ThreadPoolExecutor(4) as pool:
        crowd = [pool.submit(answer, server, TEXT, story | {"seed": seed}) for seed in (7, 100, 101, 102)]
    assert text_of(crowd[0].result()) == texts[0]


def test_sampling_fields_of_all_kinds_share_a_batch(server: ServerProcess) -> None:
    story = {"prompt": "Once upon a time", "max_tokens": 8}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"logit_bias": {"100": -5}, "temperature": 0.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"top_p": 0.9, "top_k": 30, "min_p": 0.02, "logprobs": 2},
        {"stop": ["zzz"], "seed": 3},
        {"ignore_eos": True},
    ]
    alone = text_of(answer(server, TEXT, story | kinds[0]))
    with ThreadPoolExecutor(len(kinds)) as pool:
        bodies = list(pool.map(lambda kind: answer(server, TEXT, story | kind), kinds))
    assert text_of(bodies[0]) == alone
    assert bodies[-1]["usage"]["completion_tokens"] == 8


def test_logit_bias_and_ignore_eos(server: ServerProcess) -> None:
    numbers = {"prompt": "1 2 3 4 5 6 7 8 9 10 11 12", "max_tokens": 6, "temperature": 0}
    free = text_of(answer(server, TEXT, numbers))
    (space, *_) = server.post("/tokenize", {"content": free[:3]}).json()["tokens"]
    assert text_of(answer(server, TEXT, numbers | {"logit_bias": {str(space): -100}})) != free
    endless = answer(server, CHAT, CAPITAL | {"ignore_eos": True, "max_completion_tokens": 20})
    assert endless["usage"]["completion_tokens"] == 20
    assert endless["choices"][0]["finish_reason"] == "length"
    assert text_of(endless).startswith(ANSWER)


def test_greedy_text_does_not_depend_on_the_crowd(server: ServerProcess) -> None:
    prompts = [" ".join(str(i % 97) for i in range(n)) for n in (1, 3, 15, 70, 200)]
    ask = [{"prompt": prompt, "max_tokens": 10, "temperature": 0} for prompt in prompts]
    alone = [text_of(answer(server, TEXT, body | {"cache_prompt": False})) for body in ask]
    with ThreadPoolExecutor(len(ask)) as pool:
        crowd = [text_of(body) for body in pool.map(lambda body: answer(server, TEXT, body), ask)]
    assert crowd == alone
    assert [text_of(answer(server, TEXT, body)) for body in reversed(ask)] == alone[::-1]


def test_a_second_turn_adopts_the_first(server: ServerProcess) -> None:
    first = answer(server, CHAT, CAPITAL)
    reply = {"role": "assistant", "content": text_of(first)}
    turns = [*CAPITAL["messages"], reply, {"role": "user", "content": "And of Spain?"}]  # type: ignore[misc]
    second = answer(server, CHAT, {"messages": turns, "temperature": 0, "max_tokens": 8})
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["total_tokens"] - 2
    cold = answer(server, CHAT, {"messages": turns, "temperature": 0, "max_tokens": 8, "cache_prompt": False})
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert text_of(cold) == text_of(second)


def test_each_turn_of_a_long_chat_prefills_only_what_is_new(server: ServerProcess) -> None:
    turns: list[dict[str, Any]] = []
    known = 0
    for turn in range(10):
        turns.append({"role": "user", "content": f"Question {turn}: what is {turn} and {turn + 2}?"})
        usage = answer(server, CHAT, {"messages": turns, "temperature": 0, "max_tokens": 12})
        cached = usage["usage"]["prompt_tokens_details"]["cached_tokens"]
        if turn:
            # All of the turn before but the token that ended it, which was drawn and never computed.
            assert cached >= known - 2, f"turn {turn}"
        known = usage["usage"]["total_tokens"]
        turns.append({"role": "assistant", "content": text_of(usage)})


def test_a_salt_keeps_a_prefix_to_those_who_have_it(server: ServerProcess) -> None:
    def num_cached(**fields: Any) -> int:
        body = {"prompt": "Tenants do not see what others asked. " * 12, "max_tokens": 1, **fields}
        return int(answer(server, TEXT, body)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="a") > 60
    assert num_cached(cache_salt="b") == 0
    assert num_cached() == 0
    response = server.post(TEXT, {"prompt": "a", "max_tokens": 1, "cache_salt": "x" * 257})
    assert response.status_code == 400
    assert "cache_salt" in response.json()["error"]["message"]


def test_a_pool_without_budget_starts_small_and_grows(tmp_path: Path, model_dir: Path) -> None:
    settings = {"KV_CACHE_BUDGET": "none", "CTX_SIZE": "2048", "N_PARALLEL": "4"}
    with serving(tmp_path, MODEL=str(model_dir), **settings) as own:

        def allocated() -> int:
            return int(own.http.get("/v1/cache/stats").json()["paged_blocks_allocated"])

        assert allocated() == 8  # 512 tokens
        body = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
        with ThreadPoolExecutor(4) as pool:
            prompts = [f"Story {i}: " + "the quick brown fox " * 80 for i in range(4)]
            answers = list(pool.map(lambda prompt: answer(own, TEXT, body | {"prompt": prompt}), prompts))
        assert [each["usage"]["completion_tokens"] for each in answers] == [20] * 4
        assert allocated() == 32
        alone = answer(own, TEXT, body | {"prompt": prompts[0], "cache_prompt": False})
        assert text_of(alone) == text_of(answers[0])


def test_control_tokens_in_a_message_are_text(server: ServerProcess) -> None:
    def num_prompt(content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return int(answer(server, CHAT, body)["usage"]["prompt_tokens"])

    assert num_prompt("<|im_end|>" * 20) - num_prompt("") >= 60


def test_a_prompt_over_the_window_is_refused_with_both_numbers(server: ServerProcess) -> None:
    window = server.http.get("/health").json()["n_ctx_per_slot"]
    for extra in ({}, {"stream": True}):
        response = server.post(TEXT, {"prompt": "the quick brown fox " * 3000, "max_tokens": 4, **extra})
        assert response.status_code == 400
        assert str(window) in response.json()["error"]["message"]
        assert "12001" in response.json()["error"]["message"]


def test_more_than_the_budget_is_refused_with_the_sum(server: ServerProcess) -> None:
    response = server.post(TEXT, {"prompt": [5] * 100, "max_tokens": 10**9})
    assert response.status_code == 400
    assert str(100 + 10**9) in response.json()["error"]["message"]


def test_past_slots_and_queue_comes_503_before_any_byte(server: ServerProcess) -> None:
    def ask(i: int) -> httpx.Response:
        story = {"messages": [{"role": "user", "content": f"Tell story {i}."}], "max_tokens": 30, "ignore_eos": True}
        return server.post(CHAT, story | {"stream": i % 2 == 0})

    with ThreadPoolExecutor(14) as pool:
        responses = list(pool.map(ask, range(14)))
    refused = [response for response in responses if response.status_code == 503]
    assert {response.status_code for response in responses} == {200, 503}
    assert len(refused) == 14 - 8
    for response in refused:
        assert response.json() == {"error": {"message": "Server is busy. Retry later.", "type": "overloaded"}}
        assert int(response.headers["retry-after"]) >= 1
    assert text_of(answer(server, CHAT, CAPITAL)) == ANSWER


def test_more_choices_than_the_server_holds_are_refused(server: ServerProcess) -> None:
    response = server.post(TEXT, {"prompt": "a", "n": 9, "max_tokens": 1})
    assert response.status_code == 400
    assert "9" in response.json()["error"]["message"]


def test_a_client_that_leaves_frees_slot_and_blocks(server: ServerProcess) -> None:
    wait_until(lambda: num_busy(server) == 0)
    story = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True}
    with server.http.stream("POST", TEXT, json=story | {"stream": True}) as response:
        lines = response.iter_lines()  # kept: a generator that is dropped closes the connection
        next(lines)
        assert num_busy(server) == 1
        assert num_live_blocks(server) >= 1
    wait_until(lambda: num_busy(server) == 0 and num_live_blocks(server) == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + TEXT, json=story, timeout=0.5)
    wait_until(lambda: num_busy(server) == 0 and num_live_blocks(server) == 0)


def test_slots_never_show_text(server: ServerProcess) -> None:
    story = {"prompt": "ZEBRA-SECRET-7 went", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", TEXT, json=story) as response:
        lines = response.iter_lines()  # kept: a generator that is dropped closes the connection
        next(lines)
        shown = server.http.get("/slots").text
    assert '"is_processing":true' in shown
    assert "ZEBRA" not in shown


def test_health_answers_while_a_long_prompt_prefills(server: ServerProcess) -> None:
    long = {"prompt": "the quick brown fox " * 380, "max_tokens": 1, "cache_prompt": False}
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(server.post, TEXT, long)
        num_answers = 0
        while not work.done():
            assert httpx.get(f"{server.url}/health", timeout=5.0).status_code == 200
            num_answers += 1
            time.sleep(0.05)
    assert work.result().status_code == 200
    assert num_answers > 3


def test_bad_requests_leave_the_server_as_it_was(server: ServerProcess) -> None:
    headers = {"content-type": "application/json"}
    deep = b'{"messages":[{"role":"user","content":"hi"}],"tools":' + b"[" * 20000 + b"]" * 20000 + b"}"
    surrogate = rb'{"messages":[{"role":"user","content":"emoji \ud83d"}],"max_tokens":2}'
    for content in (b"", b"{", b"[]", b'{"messages": NaN}', deep, surrogate, b'{"messages":[]}', b"\xff\xfe"):
        response = server.http.post(CHAT, content=content, headers=headers)
        assert response.status_code == 400, content[:40]
        assert response.json()["error"]["message"]
    assert text_of(answer(server, CHAT, CAPITAL)) == ANSWER


def test_a_second_server_on_the_port_says_so(server: ServerProcess, tmp_path: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    with serving(tmp_path, wait=False, PORT=port) as second:
        assert second.process.wait(20) == 1
        (line,) = second.log.read_text().splitlines()
        assert "is in use" in line


def test_ctrl_c_is_clean_also_in_the_middle_of_a_prompt(tmp_path: Path, model_dir: Path) -> None:
    with serving(tmp_path, MODEL=str(model_dir)) as own:
        with ThreadPoolExecutor(2) as pool:
            long = {"prompt": "the quick brown fox " * 1200, "max_tokens": 200, "stream": True}
            work = [pool.submit(own.post, TEXT, long | {"cache_prompt": False}) for _ in range(2)]
            wait_until(lambda: num_busy(own) >= 1)
            assert own.signal_and_wait(signal.SIGINT, 2.5) == 0
            for one in work:
                assert one.exception() is not None or one.result().status_code in (200, 503)
        assert "Traceback" not in own.log.read_text()


def test_a_debug_log_has_every_request_and_no_prompt_and_no_key(tiny_model_dir: Path, tmp_path: Path) -> None:
    mark, key = "ZEBRA-PROMPT", "KEY-SECRET"
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    question = {"messages": [{"role": "user", "content": mark}], "max_tokens": 3, "temperature": 0}
    bodies: list[dict[str, Any]] = [
        question,
        question | {"stream": True},
        question | {"stop": [mark], "tools": [{"name": mark}], mark: mark},
        question | {"chat_template_kwargs": {"tools": mark, "messages": mark}},
        question | {"messages": [{"role": mark, "content": {"type": mark}}]},
        question | {"messages": [{"role": "user", "content": mark * 20000}]},
        question | {"model": mark},
        {"prompt": mark, "max_tokens": 2, "logprobs": 1},
    ]
    with serving(tmp_path, MODEL=str(tiny_model_dir), LOG_LEVEL="debug", API_KEYS=key, MAX_BODY_BYTES="100K") as own:
        for body in bodies:
            own.http.post(TEXT if "prompt" in body else CHAT, content=json.dumps(body), headers=headers)
        for raw in (mark, f'{{"{mark}"', f'"{mark}"'):
            own.http.post(CHAT, content=raw, headers=headers)
        for path in ("/tokenize", "/apply-template", "/detokenize"):
            own.http.post(path, content=json.dumps({"content": mark, "tokens": mark} | question), headers=headers)
        own.http.post(CHAT, json=question, headers={"authorization": f"Bearer {key}-{mark}"})
        own.http.request(mark, f"/{mark}?key={key}", headers=headers)
        leaving = own.http.stream("POST", CHAT, json=question | {"stream": True, "max_tokens": 4000}, headers=headers)
        with leaving as response:
            next(response.iter_lines())
        assert own.signal_and_wait(signal.SIGTERM, 20) == 0
        written = own.log.read_text()
    assert mark not in written
    assert key not in written
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    access = [line for line in lines if line["logger"] == "mlxcel.access" and line["level"] == "info"]
    assert len(access) == len(bodies) + 3 + 3 + 3
    assert {line["status"] for line in access} >= {200, 400, 401, 404, 413}
    assert [line["finish_reason"] for line in access if "finish_reason" in line][-1] == "cancelled"
    first = access[0]
    assert (first["method"], first["route"], first["status"], first["finish_reason"]) == ("POST", CHAT, 200, "length")
    assert 0 <= first["queue_s"] <= first["ttft_s"] <= first["seconds"]
    assert (first["cached_tokens"], first["completion_tokens"]) == (0, 3)
    assert first["prompt_tokens"] > 3
    assert len(first["request_id"]) == 32


@pytest.mark.parametrize("name", ["API_KEY_FILE", "LOG_FILE", "SSL_CERT_FILE"])
def test_a_file_that_cannot_be_used_refuses_the_start(tmp_path: Path, name: str) -> None:
    more = {"SSL_KEY_FILE": str(tmp_path)} if name == "SSL_CERT_FILE" else {}
    with serving(tmp_path, wait=False, **{name: str(tmp_path)}, **more) as refused:
        assert refused.process.wait(20) == 1
        lines = refused.log.read_text().splitlines()
    assert lines[-1].startswith(f"mlxcel: MLXCEL_{name}={tmp_path} cannot be ")
    assert [line for line in lines[:-1] if '"level":"info"' not in line] == []


@pytest.mark.parametrize("body", [b"ZZ\r\n", b"5\r\n{"])
def test_a_body_that_breaks_off_is_the_clients_fault(server: ServerProcess, body: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        if body[:1] != b"Z":
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert b" 500 " not in answer[:20]


def test_a_freed_slot_shows_who_sat_there_last(server: ServerProcess) -> None:
    answer(server, TEXT, {"prompt": "1 2 3", "max_tokens": 3, "temperature": 0, "ignore_eos": True})
    wait_until(lambda: num_busy(server) == 0)
    (slot, *_) = server.http.get("/slots").json()
    assert slot["is_processing"] is False
    assert slot["next_token"] == [{"has_next_token": False, "n_remain": 0, "n_decoded": 3}]


# --- llama-server's own routes

NUMBERS = {"prompt": "1 2 3 4 5 6", "n_predict": 6, "temperature": 0}


def test_llama_servers_route_says_what_openais_does(server: ServerProcess) -> None:
    said = text_of(answer(server, TEXT, {"prompt": "1 2 3 4 5 6", "max_tokens": 6, "temperature": 0}))
    whole = answer(server, "/completion", NUMBERS | {"return_tokens": True, "n_probs": 2})
    assert whole["content"] == said
    assert server.post("/detokenize", {"tokens": whole["tokens"]}).json() == {"content": said}
    assert [entry["id"] for entry in whole["completion_probabilities"]] == whole["tokens"]
    assert all(entry["top_logprobs"][0]["id"] == entry["id"] for entry in whole["completion_probabilities"])
    with server.http.stream("POST", "/completion", json=NUMBERS | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    parts = [json.loads(line) for line in lines]
    assert "".join(part["content"] for part in parts) == said
    assert (parts[-1]["stop"], parts[-1]["stop_type"]) == (True, "limit")


def test_a_token_that_is_never_to_be_drawn_is_not(server: ServerProcess) -> None:
    first = answer(server, "/completion", NUMBERS | {"return_tokens": True})["tokens"][0]
    for bias in ([[first, False]], {str(first): False}):
        banned = answer(server, "/completion", NUMBERS | {"return_tokens": True, "logit_bias": bias})
        assert first not in banned["tokens"]
    words = answer(server, "/completion", NUMBERS | {"logit_bias": [["0123456789", False]], "n_predict": 20})
    assert not any(char.isdigit() for char in words["content"])


def test_grammar_and_mixed_prompts_over_llama_servers_route(server: ServerProcess) -> None:
    ids = server.post("/tokenize", {"content": "The capital of France"}).json()["tokens"]
    body = {"prompt": [*ids, " is"], "n_predict": 9, "temperature": 0, "grammar": 'root ::= " Paris" | " Rome"'}
    found = answer(server, "/completion", body)
    assert (found["content"], found["stop_type"]) == (" Paris", "eos")
    assert found["prompt"] == "The capital of France is"
    assert answer(server, "/completion", body | {"prompt": "The capital of France is"})["content"] == " Paris"
    assert server.post("/infill", {"input_prefix": "a", "input_suffix": "b"}).status_code == 501


# --- the head of a request


def raw_status(server: ServerProcess, head: bytes) -> int | None:
    """The status that the bytes of a request get, None where the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        answered = b""
        try:
            connection.sendall(head)
            while b"\r\n" not in answered and (piece := connection.recv(4096)):
                answered += piece
        except ConnectionError:
            pass
    return int(answered.split(b" ")[1]) if answered else None


@pytest.mark.parametrize(
    ("lines", "statuses"),
    [
        ([b"x-pad: " + b"a" * 1000], {200}),
        ([b"x-pad: " + b"a" * 100_000], {431}),
        ([b"x-pad-%d: a" % i for i in range(90)], {200}),
        ([b"x-pad-%d: a" % i for i in range(5000)], {431}),
        ([b"x-pad: " + b"a" * 30_000_000], {431, None}),
    ],
    ids=["1 KB", "100 KB", "90 headers", "5000 headers", "30 MB"],
)
def test_the_head_of_a_request_is_bounded(server: ServerProcess, lines: list[bytes], statuses: set[int | None]) -> None:
    head = b"\r\n".join([b"GET /health HTTP/1.1", b"host: a", b"connection: close", *lines, b"", b""])
    assert raw_status(server, head) in statuses
    assert server.http.get("/health").status_code == 200

"""Asks the server on this host, with the settings in the environment: ``run release/bin/python probe.py COMMAND``.

ready SECONDS              return when it is ready, or fail after that many seconds
canary PROMPT ANSWER N     N streamed answers, each of which should hold ANSWER: JSON with how many did not, the median
                           time to the first token of those that did, and what runs beside what should
"""

import json
import os
import re
import ssl
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 120


def url() -> str:
    host = os.environ.get("MLXCEL_HOST") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if os.environ.get("MLXCEL_SSL_CERT_FILE") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{os.environ.get('MLXCEL_PORT') or 8080}"


def key() -> str | None:
    """Any key that the server accepts."""
    lines = os.environ.get("MLXCEL_API_KEYS", "").split(",")
    if file := os.environ.get("MLXCEL_API_KEY_FILE"):
        lines += Path(file).read_text().splitlines()
    return next((line.strip() for line in lines if line.strip() and not line.strip().startswith("#")), None)


def ask(path: str, body: object = None, timeout_s: float = TIMEOUT_S):
    headers = {"Content-Type": "application/json"}
    if (secret := key()) is not None:
        headers["Authorization"] = f"Bearer {secret}"
    data = None if body is None else json.dumps(body).encode()
    context = ssl._create_unverified_context() if url().startswith("https") else None
    # A proxy that the account's environment names has no business with this host.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
    )
    return opener.open(urllib.request.Request(url() + path, data, headers), timeout=timeout_s)


def wait_ready(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            ask("/health/ready", timeout_s=5).close()
            return
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")
        except OSError as error:
            reason = str(error)
        time.sleep(0.2)
    raise SystemExit(f"probe: {url()} is not ready after {seconds:g} s: {reason}")


def evidence() -> dict[str, str]:
    """What runs, by its own word, and what the files of this generation say should run."""
    home = Path(__file__).resolve().parent.parent.parent
    command = [Path(sys.executable).with_name("mlxcel"), "serve", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with ask("/v1/config") as config, ask("/props") as props:
        return {
            "version": json.load(props)["build_info"],
            "fingerprint": json.load(config)["fingerprint"],
            "wanted_fingerprint": checked.split()[-1],
            "running": (home / "run/generation").read_text().strip(),
            "current": (home / "current").resolve().name,
        }


class Failed(Exception):
    """An answer that is none, or not the known one."""


def first_token_s(prompt: str, answer: str) -> float:
    """Seconds to the first token of an answer, which must hold ``answer``. Raises Failed, OSError."""
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 24}
    began, first, text, ended = time.monotonic(), None, "", False
    with ask("/v1/chat/completions", body | {"stream": True, "cache_prompt": False}) as stream:
        for line in stream:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                ended = True
            elif data.startswith("{"):
                event = json.loads(data)
                if "error" in event:
                    raise Failed(f"an error: {event['error']}")
                piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
                first = first or (time.monotonic() if piece else None)
                text += piece or ""
    if not ended or first is None or not re.search(answer, text):
        raise Failed(f"{text!r}, which has no {answer!r}")
    return first - began


def canary(prompt: str, answer: str, num_requests: int) -> dict[str, object]:
    times, errors = [], []
    for _ in range(num_requests):
        try:
            times.append(first_token_s(prompt, answer))
        except (Failed, OSError) as error:
            errors.append(str(error))
    ttft_s = round(statistics.median(times), 4) if times else None
    return evidence() | {"ttft_s": ttft_s, "errors": len(errors), "first_error": errors[0] if errors else None}


def main(command: str, *arguments: str) -> None:
    if command == "ready":
        wait_ready(float(arguments[0]))
    elif command == "canary":
        print(json.dumps(canary(*arguments[:2], int(arguments[2]))))


if __name__ == "__main__":
    main(*sys.argv[1:])

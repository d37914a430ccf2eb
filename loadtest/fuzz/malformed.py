"""Shots that are no proper requests, or requests of a client that does not behave."""

from __future__ import annotations

from random import Random

from loadtest.fuzz.bodies import CHAT, TEXT, broken, chosen, written
from loadtest.fuzz.shot import JSON, Ask, Manner, Shot, request

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "FUZZ", "\xff", "")
TARGETS = (
    "/", "//", "/v1", "/v1/", "/v1//models", "/v1/models/%FF", "/v1/models/%ED%A0%80", "/v1/models/%00",
    "/v1/models/..", "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/v1/models/" + "a" * 4000, "/v1/models/\U0001f431",
    "/v1/models/?%FF=%FF", "/slots?fail_on_no_slot=%FF&x=1", "/health?x=" + "y" * 3000, "/health/",
    "/health/live/", "/HEALTH",
    "http://elsewhere/health", "*", "health", "/metrics%20", "/tokenize;a=b", "/v1/chat/completions#x", "/\x01", "/%",
)  # fmt: skip
HEADERS = (
    ("X-Request-Id", "a" * 200), ("X-Request-Id", "\xff\xfe"), ("X-Request-Id", "a b"), ("Accept", "text/\xff"),
    ("Authorization", "Bearer \xff"), ("Authorization", ""), ("Authorization", "Basic " + "A" * 3000),
    ("Accept-Encoding", "br,zstd"), ("Cookie", "a=b; " * 200), ("Origin", "null"), ("Connection", "upgrade"),
    ("Upgrade", "websocket"), ("Upgrade", "h2c"), ("Expect", "100-continue"), ("Expect", "nonsense"),
    ("Content-Encoding", "gzip"), ("Host", "evil.example"), ("X-Forwarded-For", "127.0.0.1"), ("Range", "bytes=0-1"),
    ("If-None-Match", "*"), ("Access-Control-Request-Method", "X"),
)  # fmt: skip
TYPES = (
    "text/plain", "application/json; charset=utf-16", "application/json;", "APPLICATION/JSON", "", "\xff",
    "multipart/form-data", "application/x-www-form-urlencoded", "application/json, text/plain",
)  # fmt: skip
BROKEN_CHUNKS = (
    b"ZZ\r\n", b"5\r\n{", b"FFFFFFFFFFFFFFFFF\r\n", b"-1\r\n", b"1;" + b"a" * 9000 + b"\r\n{\r\n0\r\n\r\n",
    b"0\r\n\r\n", b"2\r\n{}\r\n0\r\nX: y\r\n\r\n", b"2\r\n{}\r\n", b"2\n{}\n0\n\n", b"\r\n\r\n",
)  # fmt: skip


def line_noise(rng: Random) -> Shot:
    """Bytes that are hardly HTTP."""
    match rng.randrange(5):
        case 0:
            data = rng.randbytes(rng.randint(1, 3000))
        case 1:
            data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(rng.randrange(100))
        case 2:
            data = b"\x16\x03\x01" + rng.randbytes(300)
        case 3:
            whole = bytearray(_valid(rng)[0])
            for _ in range(rng.randint(1, 6)):
                whole[rng.randrange(min(120, len(whole)))] = rng.randrange(256)
            data = bytes(whole)
        case _:
            data = f"GET /health HTTP/{rng.choice(['0.9', '1.2', '2', '9.9', 'x'])}\r\n\r\n".encode()
    return Shot("noise", data, manner=Manner.PROBE)


def odd_request(rng: Random) -> Shot:
    """Well-formed lines with methods, targets, headers or types that nobody should send."""
    match rng.randrange(5):
        case 0:
            data = request(rng.choice(METHODS), rng.choice(TARGETS))
        case 1:
            data = request("GET", rng.choice(TARGETS))
        case 2:
            data = request("POST", rng.choice([CHAT, TEXT]), b"{}", (("Content-Type", rng.choice(TYPES)),))
        case 3:
            chosen_headers = tuple(rng.sample(HEADERS, rng.randint(1, 3)))
            route, body = chosen(rng)
            data = request("POST", route, written(body).encode(), (("Content-Type", JSON), *chosen_headers))
        case _:
            many = tuple((f"X-{i}", "v" * rng.randrange(200)) for i in range(rng.choice([50, 99, 100, 101, 300])))
            data = request("POST", CHAT, b"{}", many)
    return Shot("odd", data, manner=Manner.PROBE)


def odd_framing(rng: Random) -> Shot:
    """Bodies whose length is told wrongly, twice, or in broken chunks."""
    head = f"POST {rng.choice([CHAT, TEXT, '/tokenize'])} HTTP/1.1\r\nHost: fuzz\r\nContent-Type: {JSON}\r\n".encode()
    match rng.randrange(4):
        case 0:
            data = head + b"Transfer-Encoding: chunked\r\n\r\n" + rng.choice(BROKEN_CHUNKS)
        case 1:
            length = rng.choice(
                [b"-1", b"1e3", b"99999999999999999999999", b"+2", b" ", b"2, 2", b"0x2", b"18446744073709551616"]
            )
            data = head + b"Content-Length: " + length + b"\r\n\r\n{}"
        case 2:
            data = head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n" + rng.choice([b"0\r\n\r\n", b"{}"])
        case _:
            data = head + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}"
    return Shot("framing", data, manner=rng.choice([Manner.PROBE, Manner.SHUT, Manner.RESET]))


def half_open(rng: Random) -> Shot:
    """A request that stops somewhere before its end."""
    data = _valid(rng)[0]
    manner = rng.choices([Manner.SHUT, Manner.RESET, Manner.LEAVE, Manner.HOLD], [4, 4, 4, 1])[0]
    return Shot("half open", data[: rng.randrange(len(data))], manner=manner)


def leaving(rng: Random) -> Shot:
    """A proper request for a long answer, by a client that goes before its end."""
    body = {
        "prompt": "Once",
        "max_tokens": 180,
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "n": rng.choice([1, 1, 2]),
    }
    data = request("POST", TEXT, written(body).encode())
    return Shot("leaving", data, manner=rng.choice([Manner.LEAVE, Manner.RESET, Manner.SHUT]))


def pipelined(rng: Random) -> Shot:
    """Several requests in one go, some of them broken; all have to be answered, in order."""
    asks, data = [], b""
    for _ in range(rng.randint(2, 5)):
        if rng.random() < 0.4:
            path = rng.choice(["/health", "/v1/models", "/slots", "/props", "/v1/cache/stats"])
            one, ask = request("GET", path), Ask("GET", path)
        else:
            one, ask = _valid(rng)
        data += one
        asks.append(ask)
    return Shot("pipelined", data, tuple(asks))


def huge(rng: Random, max_body_bytes: int) -> Shot:
    """A body above the limit, by its length or only told so. It may be refused unread, so that no answer is due."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: fuzz\r\nContent-Type: {JSON}\r\n"
    if rng.random() < 0.5:
        told = rng.choice([max_body_bytes + 1, 10**12, 2**63 - 1])
        return Shot("huge", f"{head}Content-Length: {told}\r\n\r\n{{".encode(), manner=Manner.PROBE)
    body = b'{"messages":"' + b"x" * max_body_bytes + b'"}'
    return Shot("huge", f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, manner=Manner.PROBE)


def _valid(rng: Random) -> tuple[bytes, Ask]:
    route, body = chosen(rng)
    data = broken(rng, body) if rng.random() < 0.3 else written(body).encode()
    return request("POST", route, data), Ask("POST", route)

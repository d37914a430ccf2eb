"""What one connection is given to swallow, as raw bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

JSON = "application/json"


class Manner(Enum):
    """What the client does once it has sent its bytes."""

    READ = "reads every answer that is due"
    PROBE = "reads what comes, if anything comes"
    LEAVE = "closes after the first bytes of an answer"
    RESET = "resets the connection instead"
    SHUT = "closes its sending side, and reads"
    HOLD = "does nothing for a long time"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request inside a shot. ``route`` is a path of the OpenAPI document, None where that is not clear."""

    method: str
    route: str | None


@dataclass(frozen=True, slots=True)
class Shot:
    """``kind`` says where it comes from; ``asks`` are the requests in ``data`` that must be answered, in order."""

    kind: str
    data: bytes
    asks: tuple[Ask, ...] = ()
    manner: Manner = Manner.READ


def request(
    method: str,
    target: str,
    body: bytes | None = None,
    headers: tuple[tuple[str, str], ...] = (("Content-Type", JSON),),
) -> bytes:
    """A whole request; what is no Latin-1 in it goes as UTF-8."""
    lines = [f"{method} {target} HTTP/1.1", "Host: fuzz"]
    if body is not None:
        lines += [f"{name}: {value}" for name, value in headers]
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")

"""The page at ``/``: a few static files, kept in memory, under a policy that lets nothing but them run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent.parent / "page"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}

# The page shows what a model writes. Should that ever become markup, it still cannot run: there are no inline scripts
# or styles, nothing comes from or goes to another host, and no script may make nodes out of text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept by a browser, but asked for again: an upgrade shows at once
}


class File(NamedTuple):
    data: bytes
    kind: str
    tag: str


def _read(path: Path) -> File:
    data = path.read_bytes()
    return File(data, f"{KINDS[path.suffix]}; charset=utf-8", f'"{hashlib.sha256(data).hexdigest()[:16]}"')


# By the path that it is asked for. They are open without a key: there is nothing of this server in them.
FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": _read(path)
    for path in sorted(FOLDER.iterdir())
    if path.suffix in KINDS
}


async def _send(request: Request) -> Response:
    file = FILES[request.scope["route"].path]
    headers = HEADERS | {"etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers | {"content-type": file.kind})


def routes() -> list[Route]:
    """One for each file."""
    return [Route(path, _send, include_in_schema=False) for path in FILES]

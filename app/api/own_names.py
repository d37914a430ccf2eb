"""Refusals of a chat, told in the names of the fields that the client sent: other requests come down to a chat, too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from app.errors import InvalidRequest

# Patterns of a chat's fields, and what these are called where the request came from; the first that fits counts.
Origins = Sequence[tuple[re.Pattern[str], str]]


@contextmanager
def naming_own_fields(origins: Origins) -> Iterator[None]:
    """Raises InvalidRequest in place of each that passes through, with the field's own name in the text as well."""
    try:
        yield
    except InvalidRequest as exc:
        if exc.param is None:
            raise
        text, own = str(exc), own_name(exc.param, origins)
        if text.startswith(exc.param):
            text = own + text.removeprefix(exc.param)
        raise InvalidRequest(text, own, exc.code) from None


def own_name(param: str, origins: Origins) -> str:
    """What a field of chat is called where the request came from."""
    for pattern, own in origins:
        if pattern.search(param):
            return pattern.sub(own, param)
    return param

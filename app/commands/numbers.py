"""Numbers on a command line, and what is said of a text that is none."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """A reader of whole numbers from ``least`` on, as argparse takes one."""

    def read(text: str) -> int:
        number = _int(text)
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least {least}")
        return number

    return read


def real(least: float, most: float = math.inf) -> Callable[[str], float]:
    """A reader of finite numbers from ``least`` to ``most``."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and least <= number <= most):
            upper = f" to {most:g}" if math.isfinite(most) else " on"
            raise argparse.ArgumentTypeError(f"{text!r} must be a number, from {least:g}{upper}")
        return number

    return read


def span(text: str) -> tuple[int, int]:
    """``5`` or ``5-9``: the first and the last of a range of whole numbers from 1 on."""
    first, _, last = text.partition("-")
    low, high = _int(first), _int(last or first)
    if low is None or high is None or not 0 < low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number or a range like 2-8, from 1 on")
    return low, high


def _int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None

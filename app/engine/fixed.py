"""Deterministic mode: a step is cut into forwards of a few fixed sizes, proven at start to leave no trace in the bits.

In which order a BLAS adds up depends on the shape of a product, and sometimes on the place of a row in it. So each size
a forward may have, in tokens, is tried on the loaded model itself: only those stay whose logits are bit-equal to those
of the others, wherever a token stands in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from app.errors import StartError
from app.request import SamplingParams
from app.scheduler.plan import Row

BASE = 8
SIZES = (2, 4, 8, 16, 32, 64)
WIDTHS = (8, 4, 2)

Bits = list[bytes]


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one forward. ``num_padded`` tokens are computed, ``num_draws`` of them reach the output head; what is
    there beyond the rows' own is dropped. ``width`` is as in ``Geometry``."""

    rows: tuple[Row, ...]
    num_padded: int = 0
    num_draws: int = 0
    width: int | None = None


@dataclass(frozen=True, slots=True)
class AnyShape:
    """The ordinary way: one forward a step, of as many tokens as there are, but ``least``; as many reach the head."""

    least: int = 1

    def cut(self, rows: Sequence[Row]) -> Iterator[Piece]:
        yield Piece(tuple(rows), self.least, self.least)


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """``sizes`` a forward may have, ascending, and how many neighbouring tokens of a chunk attend together."""

    sizes: tuple[int, ...]
    width: int

    def cut(self, rows: Sequence[Row]) -> Iterator[Piece]:
        """Forwards one after the other: as many of the largest size as are full, and the smallest that holds the rest.

        A chunk that does not fit into one goes on in the next. Rows that draw stay in their order.
        """
        own: list[Row] = []
        room = self.sizes[-1]
        for row in rows:
            while row.num_new > room:
                if room:
                    own.append(row._replace(num_new=room, draws=False))
                    row = row._replace(start=row.start + room, num_new=row.num_new - room)
                yield self._piece(own)
                own, room = [], self.sizes[-1]
            own.append(row)
            room -= row.num_new
        yield self._piece(own)

    def _piece(self, rows: Sequence[Row]) -> Piece:
        # A chunk may have left a single token here, which does not draw and attends first, as all single ones do.
        ordered = tuple(sorted(rows, key=lambda row: row.num_new > 1))
        num_tokens, num_draws = sum(row.num_new for row in rows), sum(row.draws for row in rows)
        return Piece(ordered, self._holding(num_tokens), self._holding(max(num_draws, 1)), self.width)

    def _holding(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)


def prove(
    forward: Callable[[Piece], mx.array], use_pool: Callable[[int, int], None], vocab_size: int, block_size: int
) -> FixedShapes:
    """Find the sizes and the width that leave no trace in the bits.

    Args:
        forward: gives the logits ``[R, vocab]`` of a piece.
        use_pool: gives it an empty pool of so many blocks of so many tokens.

    Raises:
        StartError: with this BLAS a token's logits depend on its place even at one size.
    """
    proof = _Proof(forward, vocab_size)
    use_pool(max(SIZES), BASE)
    want = [bits for first in range(0, max(SIZES), BASE) for bits in proof.alone(range(first, first + BASE), BASE)]
    sizes = tuple(
        size
        for size in SIZES
        # in order and turned round: a token must not show where it stood
        if all(proof.alone(places, size) == [want[i] for i in places] for places in (range(size), range(size)[::-1]))
    )
    if BASE not in sizes:
        raise StartError(
            "MLXCEL_SDPA_DETERMINISTIC=true is not possible with this BLAS: the logits of a token depend on its place"
            f" among {BASE}. BLIS is known to serve (MLXCEL_BLAS)"
        )
    use_pool(1 + -(-max(WIDTHS) // block_size), block_size)
    proof.read(0, block_size, FixedShapes(sizes, 1))
    single = proof.read(block_size, max(WIDTHS), FixedShapes(sizes, 1))
    equal = (
        width
        for width in WIDTHS
        if block_size % width == 0 and proof.read(block_size, max(WIDTHS), FixedShapes(sizes, width)) == single
    )
    return FixedShapes(sizes, next(equal, 1))


class _Proof:
    """Requests of one token show what sizes do, and a prompt read in different tiles what widths do."""

    def __init__(self, forward: Callable[[Piece], mx.array], vocab_size: int) -> None:
        self._forward = forward
        self._vocab_size = vocab_size

    def alone(self, places: Sequence[int], size: int) -> Bits:
        """Logits of requests of one token each, one a place, in one forward of ``size``."""
        rows = tuple(self._row(place, (place,), 0, 1) for place in places)
        return self._bits(Piece(rows, size, size, 1))

    def read(self, start: int, num_new: int, shapes: FixedShapes) -> Bits:
        """Logits at the end of a prompt that goes on at ``start``; they show all before it, through K and V."""
        pieces = shapes.cut([self._row(0, range(start + num_new), start, num_new)])
        return [self._bits(piece) for piece in pieces][-1]

    def _row(self, first: int, blocks: Sequence[int], start: int, num_new: int) -> Row:
        tokens = [(7919 * (first + i) + 17) % self._vocab_size for i in range(start + num_new)]
        return Row(first, tokens, start, num_new, blocks, True, len(tokens), SamplingParams())

    def _bits(self, piece: Piece) -> Bits:
        return [row.tobytes() for row in np.array(self._forward(piece).astype(mx.float32))]

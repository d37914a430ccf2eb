"""From logits to tokens: one fused draw for all rows that are drawn alike, each row blind to its neighbours.

The noise of a draw is one number made of (seed, position), so a seeded request draws the same alone or in a crowd.
Tokens at or above a probability floor are kept, and the one where the running sum of their probabilities passes the
noise is drawn (inverse transform sampling), so a row is sorted in full only if its nucleus is wider than ``TOP_WIDTH``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from app.errors import kind_and_place
from app.request import SamplingParams
from app.scheduler.plan import Draw, Row

TOP_WIDTH = 512
# A nucleus of less holds the likeliest token alone; as a float32 it could be zero, and hold none.
LEAST_NUCLEUS = 1e-9
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """The noise of one draw, in [0, 1), on a grid of 2**-23 so that it stays below 1 in float32.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) over seed, then position.
    """
    return (_mix(_mix(seed & _MASK) ^ position) >> 41) / (1 << 23)


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows drawn by the same operations. ``sound`` says a row whether its logits were numbers to draw by; ``covered``
    is None, or says a row whether ``TOP_WIDTH`` tokens sufficed."""

    places: tuple[int, ...]
    tokens: mx.array
    sound: mx.array
    covered: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    """Log-probabilities of the rows that asked: of the drawn token, and of the ``width`` likeliest, in no order."""

    places: tuple[int, ...]
    drawn: mx.array
    top_tokens: mx.array
    top_logprobs: mx.array


def draw_rows(logits: mx.array, rows: Sequence[Row]) -> tuple[Drawing | None, dict[int, str]]:
    """Build the draws of ``logits [R, vocab]``. A row whose draw cannot be built costs nobody else theirs.

    Returns:
        The draws of the other rows, None if there are none, and what failed by request id.
    """
    if not rows:
        return None, {}
    try:
        return Drawing(logits, rows), {}
    except Exception:
        # Building computes nothing yet, so each row can be tried alone to find the culprits.
        failures: dict[int, str] = {}
        sound: list[int] = []
        for place, row in enumerate(rows):
            try:
                Drawing(logits[place : place + 1], [row])
            except Exception as error:
                failures[row.request_id] = f"its draw failed: {kind_and_place(error)}"
            else:
                sound.append(place)
        if not failures:
            raise
        drawing = Drawing(logits[mx.array(sound)], [rows[place] for place in sound]) if sound else None
        return drawing, failures


class Drawing:
    """The draws of one step while they are computed: build, evaluate ``arrays()``, then ``read()``."""

    def __init__(self, logits: mx.array, rows: Sequence[Row]) -> None:
        """``logits [R, vocab]``, one row each for ``rows``."""
        self.rows = rows
        self.redrawn: list[Row] = []  # by ``read``: to another token than is in ``arrays()``
        raw = logits.astype(mx.float32)
        self.logits = _adjusted(raw, rows)
        greedy = tuple(i for i, row in enumerate(rows) if row.sampling.is_greedy)
        plain = tuple(i for i, row in enumerate(rows) if not row.sampling.is_greedy and not _filters(row.sampling))
        filtered = tuple(i for i, row in enumerate(rows) if not row.sampling.is_greedy and _filters(row.sampling))
        self.groups = []
        if greedy:
            chosen = _take(self.logits, greedy)
            # One sum tells: NaN stays NaN and infinity is not below itself; minus infinity only bans a token.
            self.groups.append(Group(greedy, mx.argmax(chosen, axis=-1), chosen.sum(axis=-1) < mx.inf))
        if plain:
            self.groups.append(Group(plain, *_draw(self._probabilities(plain), self._noise(plain))))
        if filtered:
            self.groups.append(self._draw_filtered(filtered, TOP_WIDTH))
        self.reported = self._report(raw)

    def arrays(self) -> list[mx.array]:
        found = [array for group in self.groups for array in (group.tokens, group.sound, group.covered)]
        found = [array for array in found if array is not None]
        if self.reported is not None:
            found += [self.reported.drawn, self.reported.top_tokens, self.reported.top_logprobs]
        return found

    def following(self, rows: Sequence[Row]) -> mx.array:
        """The tokens ``[R]`` drawn for the requests of ``rows``, to go on with before they are read; any token for a
        request without a draw."""
        places = {row.request_id: place for place, row in enumerate(self.rows)}
        return self._tokens_of([places.get(row.request_id, 0) for row in rows])

    def unsound(self) -> list[Row]:
        """The rows whose logits were no numbers to draw by; what ``read`` gives for them means nothing."""
        return [
            self.rows[place]
            for group in self.groups
            for place, sound in zip(group.places, group.sound.tolist(), strict=True)
            if not sound
        ]

    def read(self) -> list[Draw]:
        """The draws, in the order of the rows."""
        tokens = self._read_tokens()
        draws = [Draw(token) for token in tokens]
        if self.reported is not None:
            top_tokens, top_logprobs = self.reported.top_tokens.tolist(), self.reported.top_logprobs.tolist()
            for i, (place, logprob) in enumerate(zip(self.reported.places, self.reported.drawn.tolist(), strict=True)):
                ranked = sorted(zip(top_tokens[i], top_logprobs[i], strict=True), key=lambda pair: (-pair[1], pair[0]))
                draws[place] = Draw(tokens[place], logprob, tuple(ranked[: self.rows[place].sampling.num_logprobs]))
        return draws

    def _read_tokens(self) -> list[int]:
        tokens = [0] * len(self.rows)
        for group in self.groups:
            for place, token in zip(group.places, group.tokens.tolist(), strict=True):
                tokens[place] = token
            if group.covered is not None and not all(covered := group.covered.tolist()):
                wide = tuple(place for place, enough in zip(group.places, covered, strict=True) if not enough)
                again = self._draw_filtered(wide, self.logits.shape[-1])
                for place, token in zip(wide, again.tokens.tolist(), strict=True):
                    if token != tokens[place]:
                        self.redrawn.append(self.rows[place])
                    tokens[place] = token
        return tokens

    def _tokens_of(self, places: Sequence[int]) -> mx.array:
        order = {place: at for at, place in enumerate(place for group in self.groups for place in group.places)}
        tokens = mx.concatenate([group.tokens for group in self.groups])
        return tokens[mx.array([order[place] for place in places])]

    def _draw_filtered(self, places: tuple[int, ...], width: int) -> Group:
        params = [self.rows[i].sampling for i in places]
        probabilities = self._probabilities(places)
        width = min(max(width, *(p.top_k for p in params)), probabilities.shape[-1])
        floor, covered = _floor(probabilities, params, width)
        kept = mx.where(probabilities >= floor, probabilities, 0.0)
        return Group(places, *_draw(kept, self._noise(places)), covered)

    def _probabilities(self, places: tuple[int, ...]) -> mx.array:
        temperature = mx.array([[self.rows[i].sampling.temperature] for i in places])
        return mx.softmax(_take(self.logits, places) / temperature, axis=-1, precise=True)

    def _noise(self, places: tuple[int, ...]) -> mx.array:
        rows = [self.rows[i] for i in places]
        return mx.array([[uniform(row.sampling.seed, row.start + row.num_new)] for row in rows])

    def _report(self, raw: mx.array) -> Reported | None:
        places = tuple(i for i, row in enumerate(self.rows) if row.sampling.num_logprobs is not None)
        if not places:
            return None
        drawn = self._tokens_of(places)
        chosen = _take(raw, places)
        logprobs = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
        width = min(max(self.rows[i].sampling.num_logprobs or 0 for i in places), raw.shape[-1])
        top = mx.argpartition(-logprobs, kth=max(width - 1, 0), axis=-1)[:, :width]
        return Reported(
            places,
            mx.take_along_axis(logprobs, drawn[:, None], axis=-1)[:, 0],
            top,
            mx.take_along_axis(logprobs, top, axis=-1),
        )


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _take(logits: mx.array, places: tuple[int, ...]) -> mx.array:
    return logits if len(places) == logits.shape[0] else logits[mx.array(places)]


def _draw(weights: mx.array, noise: mx.array) -> tuple[mx.array, mx.array]:
    """One token a row of ``weights [R, vocab]`` (not negative, any sum above 0), by ``noise [R, 1]``; and whether the
    row had such a sum."""
    running = mx.cumsum(weights, axis=-1)
    total = running[:, -1:]
    return mx.argmax(running > noise * total, axis=-1), total[:, 0] > 0


def _floor(probabilities: mx.array, params: Sequence[SamplingParams], width: int) -> tuple[mx.array, mx.array]:
    """The lowest probability each row keeps ``[R, 1]``, and whether its ``width`` likeliest tokens suffice to tell.

    top_k first, then top_p over what it left, then min_p against the likeliest. Equal probabilities stay together.
    """
    limited = mx.array([[p.top_k > 0] for p in params])
    nucleus = mx.array([[p.top_p < 1.0] for p in params])
    top_k = mx.array([[min(p.top_k or width, width)] for p in params])
    top = -mx.sort(-mx.topk(probabilities, width, axis=-1), axis=-1)
    top = mx.where(mx.arange(width) < top_k, top, 0.0)
    running = mx.cumsum(top, axis=-1)
    mass = mx.array([[max(p.top_p, LEAST_NUCLEUS)] for p in params]) * mx.where(limited, running[:, -1:], 1.0)
    inside = (running - top < mass) & (top > 0)
    lowest = mx.where(inside, top, 2.0).min(axis=-1, keepdims=True)
    floor = mx.maximum(mx.where(limited | nucleus, lowest, 0.0), mx.array([[p.min_p] for p in params]) * top[:, :1])
    enough = limited | ~nucleus | (running[:, -1:] >= mass) | (width == probabilities.shape[-1])
    return floor, enough[:, 0]


def _adjusted(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Penalties, then logit_bias, then banned tokens and those that a constraint leaves out. Rows that ask for none of
    them stay bitwise the same."""
    logits = _constrained(_penalised(logits, rows), rows)
    biased = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.sampling.logit_bias]
    biased += [(i, token, -np.inf) for i, row in enumerate(rows) for token in row.sampling.banned]
    if not biased:
        return logits
    at, tokens, bias = (mx.array(column) for column in zip(*biased, strict=True))
    return logits.at[at, tokens].add(bias)


def _constrained(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    masks = {i: row.constraint.mask(row.tokens) for i, row in enumerate(rows) if row.constraint is not None}
    if not masks:
        return logits
    bits = [np.frombuffer(mask, np.uint8) for mask in masks.values()]
    allowed = np.stack([np.unpackbits(row, count=logits.shape[-1], bitorder="little") for row in bits])
    # Added, not chosen: what is no number stays none.
    return logits.at[mx.array(list(masks))].add(mx.array(np.where(allowed, 0.0, -np.inf).astype(np.float32)))


def _penalised(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Repetition penalty over prompt and output (Keskar et al., CTRL, 2019); presence and frequency over the output, as
    OpenAI defines them."""
    cells = [(i, *_penalties(row)) for i, row in enumerate(rows) if row.sampling.has_penalty]
    if not cells:
        return logits
    at = mx.array(np.concatenate([np.full(len(tokens), i) for i, tokens, _, _ in cells]))
    tokens, factor, offset = (mx.array(np.concatenate([cell[k] for cell in cells])) for k in (1, 2, 3))
    old = logits[at, tokens]
    new = mx.where(old > 0, old / factor, old * factor) - offset
    changed = mx.array(logits)
    changed[at, tokens] = new
    return changed


def _penalties(row: Row) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Distinct tokens so far ``[K]``, the factor and the offset of each, float32."""
    end = row.start + row.num_new
    tokens, counts = np.unique(np.asarray(row.tokens[:end]), return_counts=True)
    output, output_counts = np.unique(np.asarray(row.tokens[row.num_prompt : end], dtype=int), return_counts=True)
    counts = np.zeros(len(tokens), np.float32)
    counts[np.searchsorted(tokens, output)] = output_counts
    params = row.sampling
    offset = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return tokens, np.full(len(tokens), params.repetition_penalty, np.float32), offset.astype(np.float32)

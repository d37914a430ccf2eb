"""Drafts: where they come from, when a row proposes, what is taken of them, and what they may not cost anybody."""

from __future__ import annotations

import random

import pytest

from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.prefix_cache import PrefixCache
from app.request import FinishReason, Request, SamplingParams, State
from app.scheduler.plan import Draw, Event, Finished, Plan, Result, Token
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler
from app.scheduler.speculation import MAX_WIDTH, MOST_HITS, PromptLookup, Repeats, Speculation, right

TEXT = list(range(100, 140))


def request_of(tokens: list[int], **fields) -> Request:
    return Request(1, tokens, len(tokens), 1000, **fields)


def continuation(tokens: list[int], num_tokens: int = 3) -> tuple[int, ...]:
    repeats = Repeats()
    repeats.read(tokens)
    return repeats.continuation(tokens, num_tokens)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ([], ()),
        ([1], ()),
        ([1, 2, 3, 4], ()),
        ([1, 2, 5, 6, 7, 1, 2], (5, 6, 7)),
        ([1, 2, 5, 6, 7, 1, 2, 8, 9, 4, 1, 2], (8, 9, 4)),  # the latest
        ([3, 1, 2, 5, 6, 7, 9, 1, 2, 8, 9, 4, 3, 1, 2], (5, 6, 7)),  # the longest, though earlier
        ([1, 2, 3, 1, 2], (3, 1, 2)),
        ([4, 4, 4], (4, 4, 4)),  # round and round
        ([9, 1, 2, 1, 2], (1, 2, 1)),
    ],
)
def test_what_followed_before_is_what_follows(tokens, want):
    assert continuation(tokens) == want


def test_reading_piece_by_piece_is_reading_at_once():
    rng = random.Random(3)
    tokens = [rng.randrange(4) for _ in range(300)]
    slow = Repeats()
    for end in range(len(tokens) + 1):
        slow.read(tokens[:end])
        if end % 7 == 0:
            at_once = Repeats()
            at_once.read(tokens[:end])
            assert slow.num_hits == at_once.num_hits
            assert slow.continuation(tokens[:end], 9) == at_once.continuation(tokens[:end], 9)


def test_each_token_is_read_once():
    class Counted(list):
        num_read = 0

        def __getitem__(self, key):
            Counted.num_read += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
            return super().__getitem__(key)

    tokens, repeats = Counted(range(5000)), Repeats()
    repeats.read(tokens)
    before = Counted.num_read
    tokens.append(1)
    repeats.read(tokens)
    repeats.continuation(tokens, 1)
    assert Counted.num_read - before < 30


def test_hits_are_the_tokens_in_a_row_that_were_foretold():
    repeats = Repeats()
    repeats.read([1, 2, 3, 4, 5, 9, 1, 2])
    assert repeats.num_hits == 0
    repeats.read([1, 2, 3, 4, 5, 9, 1, 2, 3, 4])
    assert repeats.num_hits == 2
    repeats.read([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6])
    assert repeats.num_hits == 0


def test_a_row_proposes_once_the_lookup_has_been_right_twice():
    drafter = PromptLookup()
    assert drafter.draft(request_of([*TEXT, *TEXT[:3]])) == ()  # 102 alone was foretold
    assert drafter.draft(request_of([*TEXT, *TEXT[:4]])) == (104,)


def test_drafts_grow_while_they_are_right_and_shrink_to_what_was():
    drafter, request = PromptLookup(), request_of([*TEXT, *TEXT[:4]])
    lengths = []
    for _ in range(5):
        draft = drafter.draft(request)
        lengths.append(len(draft))
        drafter.learn(request.id, len(draft), len(draft))
        request.tokens += draft
    assert lengths == [1, 3, 7, MAX_WIDTH, MAX_WIDTH]
    drafter.learn(request.id, 15, 4)
    assert len(drafter.draft(request)) == 4


def test_a_draft_cut_short_by_others_does_not_make_the_next_one_short():
    drafter, request = PromptLookup(), request_of([*TEXT, *TEXT[:4]])
    for num_proposed in (1, 3, 7):
        drafter.draft(request)
        drafter.learn(request.id, num_proposed, num_proposed)
    drafter.learn(request.id, 2, 2)
    assert len(drafter.draft(request)) == MAX_WIDTH


def deceive(drafter: PromptLookup, request: Request, num_tokens: int) -> int:
    """Tokens that the lookup foretells, but for the one it proposes in the end. Gives the number of proposals."""
    num_proposals = 0
    for _ in range(num_tokens):
        draft = drafter.draft(request)
        (foretold,) = draft[:1] or continuation(request.tokens, 1) or (0,)
        if draft:
            num_proposals += 1
            drafter.learn(request.id, len(draft), 0)
            foretold = 1000 + num_proposals
        request.tokens.append(foretold)
    return num_proposals


def test_a_row_that_keeps_failing_proposes_one_token_in_seventeen_at_most():
    drafter, request = PromptLookup(), request_of([0, 0, 0, 0])
    deceive(drafter, request, 60)
    num_proposals = deceive(drafter, request, 1700)
    assert 0 < num_proposals <= 1700 / (MOST_HITS + 1)


def test_a_row_comes_back_and_is_trusted_as_before_when_it_was_right():
    drafter, request = PromptLookup(), request_of([0, 0, 0, 0])
    deceive(drafter, request, 100)
    request.tokens += [0] * 40
    draft = drafter.draft(request)
    assert draft == (0,)
    drafter.learn(request.id, 1, 1)
    drafter.learn(request.id, 3, 0)
    request.tokens += [*TEXT, *TEXT[:6]]
    assert drafter.draft(request) == (106,), "four foretold tokens are enough again"


def test_a_row_that_cannot_propose_next_says_so():
    """Whatever comes next, a silent row needs as many hits as are asked of it."""
    drafter, rng = PromptLookup(), random.Random(4)
    request = request_of([rng.randrange(3) for _ in range(40)])
    seen = set()
    for _ in range(2000):
        may = drafter.may_propose(request)
        request.tokens.append(rng.randrange(3))
        draft = drafter.draft(request)
        assert may or not draft
        seen.add((may, bool(draft)))
        if draft:
            drafter.learn(request.id, len(draft), rng.choice((0, 0, len(draft))))
    assert seen == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("fields", [{"end_tokens": frozenset({106})}, {"sampling": SamplingParams(banned=(106,))}])
def test_a_draft_ends_before_a_token_that_ends_the_answer_or_never_comes(fields):
    drafter, request = PromptLookup(), request_of([*TEXT, *TEXT[:4]], **fields)
    drafter.draft(request)
    drafter.learn(1, 1, 1)
    assert drafter.draft(request) == (104, 105)


def test_a_request_that_is_forgotten_leaves_nothing_behind():
    drafter = PromptLookup()
    drafter.draft(request_of([*TEXT, *TEXT[:4]]))
    drafter.forget(1)
    assert drafter._rows == {}
    drafter.forget(1)


@pytest.mark.parametrize(
    ("draft", "draws", "num_counted"),
    [
        ((), (), 0),
        ((), (5,), 1),
        ((5, 6), (5, 6, 7), 3),
        ((5, 6), (5, 7, 6), 2),
        ((5, 6), (6, 6, 6), 1),
        ((5, 6), (), 0),
    ],
)
def test_draws_count_up_to_the_first_that_differs_from_the_draft(draft, draws, num_counted):
    drawn = tuple(Draw(token) for token in draws)
    assert right(draft, drawn) == drawn[:num_counted]


class Fixed:
    """Proposes what it is told."""

    def __init__(self, *draft: int) -> None:
        self.tokens = draft
        self.learnt: list[tuple[int, int, int]] = []

    def draft(self, request: Request) -> tuple[int, ...]:
        return self.tokens

    def may_propose(self, request: Request) -> bool:
        return True

    def learn(self, request_id: int, num_proposed: int, num_right: int) -> None:
        self.learnt.append((request_id, num_proposed, num_right))

    def forget(self, request_id: int) -> None:
        pass


class Bench:
    """A scheduler whose rows decode and propose, and an engine that draws what a test says, then tokens nobody else
    has."""

    def __init__(self, *draft: int, num_blocks: int = 16, block_size: int = 4, **config) -> None:
        pool = BlockPool(num_blocks)
        self.tables = BlockTables(pool, PrefixCache(pool, block_size, True, 1), block_size)
        self.drafter = Fixed(*draft)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.tables, self.drafter)
        self.num_added = 0

    def decoding(self, num_prompt: int, **fields) -> Request:
        """A request that has drawn token 70 as its first."""
        prompt = [500 + 50 * self.num_added + i for i in range(num_prompt)]
        request = Request(self.num_added, prompt, num_prompt, **{"max_tokens": 20} | fields)
        self.num_added += 1
        self.scheduler.add(request)
        self.tick(70)
        return request

    def tick(self, *tokens: int) -> tuple[Plan, list[Event]]:
        plan = self.scheduler.plan(1.0)
        drawn = [*map(Draw, tokens), *(Draw(9000 + i) for i in range(20))]
        draws = {row.request_id: tuple(drawn[: len(row.each_draw())]) for row in plan.rows if row.draws}
        events = self.scheduler.apply(plan, Result(draws), 2.0)
        self.scheduler.check()
        return plan, events

    def drafts(self) -> list[tuple[int, ...]]:
        return [row.draft for row in self.scheduler.plan(1.0).rows]


def test_a_draft_is_a_row_of_several_tokens_beside_the_others():
    bench = Bench(71, 72, 73)
    request = bench.decoding(5)
    bench.scheduler.add(Request(9, [1, 2, 3], 3, 4))
    plan, events = bench.tick(71, 72, 5)
    row, chunk = plan.rows
    assert (row.request_id, row.start, row.num_new, row.draws, row.draft) == (0, 5, 4, True, (71, 72, 73))
    assert (chunk.request_id, chunk.num_new, chunk.draft) == (9, 3, ())
    assert (plan.kind, plan.num_tokens) == ("mixed", 7)
    assert [event for event in events if event.request_id == 0] == [Token(0, Draw(t), 2.0) for t in (71, 72, 5)]
    assert request.tokens[5:] == [70, 71, 72, 5]
    assert request.num_computed == 8
    assert bench.drafter.learnt == [(0, 3, 2)]
    counters = bench.scheduler.snapshot().counters
    assert (counters.spec_proposed_tokens, counters.spec_accepted_tokens) == (3, 2)
    assert counters.decode_tokens == 3


def test_a_tick_of_drafts_alone_is_a_decode_tick():
    bench = Bench(71)
    bench.decoding(5)
    assert bench.scheduler.plan(1.0).kind == "decode"


def test_the_draws_of_a_row_stand_behind_ever_more_of_its_draft():
    bench = Bench(71, 72)
    request = bench.decoding(5)
    (row,) = bench.scheduler.plan(1.0).rows
    each = row.each_draw()
    assert [one.start + one.num_new for one in each] == [6, 7, 8]
    assert all(one.tokens == [*request.tokens, 71, 72] and not one.draft and one.draws for one in each)


@pytest.mark.parametrize("place", range(4))
def test_an_end_token_in_an_accepted_run_ends_the_answer_there(place):
    bench = Bench(71, 72, 73)
    request = bench.decoding(5, end_tokens=frozenset({(71, 72, 73, 9)[place]}))
    _, events = bench.tick(71, 72, 73, 9)
    assert [event.draw.token for event in events if isinstance(event, Token)] == [71, 72, 73, 9][: place + 1]
    assert events[-1] == Finished(0, FinishReason.STOP, place + 2, 2.0)
    assert request.num_computed == len(request.tokens) - 1
    assert bench.tables.prefix_cache.match([*request.tokens, 1], "").num_tokens == len(request.tokens) - 1


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5])
def test_no_draft_goes_beyond_the_last_token_of_an_answer(max_tokens):
    bench = Bench(71, 72, 73)
    bench.decoding(5, max_tokens=max_tokens)
    plan, events = bench.tick(71, 72, 73, 9)
    assert len(plan.rows[0].draft) == min(max_tokens - 2, 3)
    end = events[-1]
    assert isinstance(end, Finished) == (max_tokens < 6)
    assert end == Finished(0, FinishReason.LENGTH, max_tokens, 2.0)


def test_nobody_proposes_while_more_rows_decode_than_may():
    bench = Bench(71, prompt_lookup_max_batch=2)
    bench.decoding(5, max_tokens=50)
    bench.decoding(5, max_tokens=50)
    assert bench.drafts() == [(71,), (71,)]
    last = bench.decoding(5, max_tokens=50)
    assert bench.drafts() == [(), (), ()]
    bench.scheduler.cancel(last.id, 1.0)
    assert bench.drafts() == [(71,), (71,)]


def test_a_draft_is_cut_to_the_blocks_that_are_left():
    bench = Bench(71, 72, 73, 74, 75, 76, num_blocks=4)
    bench.decoding(5, max_tokens=8)
    bench.decoding(4, max_tokens=8)  # the row before draws beside it, and its draft is wrong
    assert bench.drafts() == [(71,), (71, 72, 73)], "each has its two blocks, and no other is free"
    assert bench.scheduler.snapshot().counters.preemptions == {}


def test_no_prefix_goes_for_a_draft():
    bench = Bench(*range(71, 80), num_blocks=4)
    early = bench.decoding(4, max_tokens=5)
    bench.scheduler.cancel(early.id, 1.0)
    bench.decoding(5, max_tokens=11)
    assert (bench.tables.pool.num_blank, bench.tables.pool.num_cached) == (1, 1)
    assert [len(draft) for draft in bench.drafts()] == [6], "to the end of the blank block"
    assert bench.tables.prefix_cache.match([*early.tokens, 1], "").num_tokens == 4


def test_blocks_of_a_draft_that_was_wrong_go_back_at_once():
    bench = Bench(*range(71, 80))
    request = bench.decoding(5)
    bench.tick(1)
    assert len(bench.tables.blocks(request.id)) == bench.tables.blocks_for(len(request.tokens) - 1) == 2
    bench.drafter.tokens = ()
    bench.tick(1)
    assert request.num_computed == 7


def test_nothing_that_was_rejected_can_be_adopted():
    bench = Bench(71, 72, 73, 74, 75, 76)
    request = bench.decoding(6)
    bench.tick(71, 5)
    assert request.tokens[6:] == [70, 71, 5]
    bench.scheduler.cancel(request.id, 3.0)
    cache = bench.tables.prefix_cache
    assert cache.match([*request.tokens[:8], 72, 73, 74, 75, 76, 1], "").num_tokens == 8
    assert cache.match([*request.tokens, 1], "").num_tokens == 8, "its last token was never computed"


def test_a_requeued_row_goes_on_with_what_was_right():
    bench = Bench(71, 72, 73)
    request = bench.decoding(5)
    bench.tick(71, 72, 4)
    plan = bench.scheduler.plan(3.0)
    bench.scheduler.lose_pool(plan, 3.0)
    assert request.state is State.QUEUED
    plan, _ = bench.tick(6)
    assert (plan.rows[0].start, plan.rows[0].num_new, plan.rows[0].draft) == (0, 9, ())
    assert request.tokens[5:] == [70, 71, 72, 4, 6]


def test_whether_anybody_may_propose_next():
    bench = Bench(71, prompt_lookup_max_batch=2)
    rows = [bench.decoding(5) for _ in range(3)]
    speculation = bench.scheduler._speculation
    assert speculation.may_propose(rows[:2])
    assert not speculation.may_propose(rows)
    assert not Speculation(None, 2, bench.tables).may_propose(rows[:2])


def test_without_a_drafter_nobody_proposes():
    pool = BlockPool(8)
    scheduler = Scheduler(SchedulerConfig(), BlockTables(pool, PrefixCache(pool, 4), 4))
    scheduler.add(Request(1, [1] * 6, 6, 10))
    for _ in range(4):
        plan = scheduler.plan(1.0)
        assert not any(row.draft for row in plan.rows)
        scheduler.apply(plan, Result({1: (Draw(1),)}), 1.0)


def test_a_constrained_request_never_proposes_and_keeps_nobody_from_it():
    class Anything:
        is_at_limit = False

        def mask(self, tokens):
            raise AssertionError("only the engine asks")

    bench = Bench(71)
    bench.decoding(5, constraint=Anything())
    speculation = bench.scheduler._speculation
    assert not speculation.may_propose(list(bench.scheduler._seats.decoding))
    bench.decoding(5)
    assert bench.drafts() == [(), (71,)]
    assert speculation.may_propose(list(bench.scheduler._seats.decoding))

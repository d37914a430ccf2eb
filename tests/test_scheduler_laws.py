"""Laws that hold whatever happens, tried by a state machine with an engine that keeps tokens instead of K and V."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.layout import GONE, ONE_GROUP, Layout
from app.kv.prefix_cache import PrefixCache
from app.request import FinishReason, Request, State
from app.scheduler.plan import Admitted, Draw, Event, Finished, Plan, Result, Row, Token
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler
from app.scheduler.speculation import PromptLookup

VOCABULARY = 3  # few tokens, so that prompts and answers keep meeting in the prefix cache


class PoisoningPool(BlockPool):
    """Spoils the content of a block in the moment it is taken."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self.content: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.taken: list[int] = []

    def take(self) -> int:
        block = super().take()
        self.taken.append(block)
        return block


@dataclass
class FakeEngine:
    """Holds the token itself where an engine holds its K and V, and draws if it finds there what it has to.

    What steps ahead compute is in ``tails``, by request: its row, and tokens by position. ``astray`` are the requests
    whose tails are wrong.
    """

    pool: PoisoningPool
    block_size: int
    layout: Layout = ONE_GROUP
    tails: dict[int, tuple[Row, dict[int, int]]] = field(default_factory=dict)
    astray: set[int] = field(default_factory=set)

    def run(self, plan: Plan, failing: int | None, breaks: bool) -> Result:
        """Read all copy sources, spoil what was taken since the last tick, then copy, check and write row by row.

        ``breaks``: the whole forward fails and nothing is written at all, copies included.
        """
        content = self.pool.content
        self.settle()
        sources = [list(content[source]) for source, _ in plan.copies]
        self.spoil()
        if breaks:
            return Result(failures={row.request_id: "broken" for row in plan.rows})
        for (_, target), copied in zip(plan.copies, sources, strict=True):
            content[target] = copied
        result = Result()
        for index, row in enumerate(plan.rows):
            if index == failing:
                result.failures[row.request_id] = "failed"
                continue
            tokens = [*row.tokens, *row.draft]
            for position in range(row.start, row.start + row.num_new):
                self._write(row, position, tokens[position])
        for index, row in enumerate(plan.rows):
            if index != failing:
                tokens = [*row.tokens, *row.draft][: row.start + row.num_new]
                self._look(row, tokens, {})
                if row.draws:
                    ends = [draw.start + draw.num_new for draw in row.each_draw()]
                    result.draws[row.request_id] = tuple(Draw(answer(tokens[:end])) for end in ends)
        return result

    def run_ahead(self, plan: Plan, before: Result, failing: int | None, breaks: bool, astray: int | None) -> Result:
        """As ``run``, while the step that gives ``before`` counts as in flight: a row's token comes from there. Row
        ``astray`` starts from another one. The pool is only read, and no further than the row had blocks before."""
        if breaks:
            return Result(failures={row.request_id: "broken" for row in plan.rows})
        result = Result()
        for index, row in enumerate(plan.rows):
            drawn = before.draws.get(row.request_id)
            if drawn is None or index == astray:
                self.astray.add(row.request_id)
            token = 0 if drawn is None else drawn[-1].token
            tokens = [*row.tokens, token]
            assert len(tokens) == row.start + 1
            _, tail = self.tails.get(row.request_id, (row, {}))
            tail[row.start] = token if row.request_id not in self.astray else -1
            self.tails[row.request_id] = row, tail
            if row.request_id in self.astray:
                continue
            if index == failing:
                result.failures[row.request_id] = "failed"
                continue
            self._look(row, tokens, tail)
            result.draws[row.request_id] = (Draw(answer(tokens)),)
        return result

    def settle(self) -> None:
        """Put into the pool what was computed ahead."""
        for row, tail in self.tails.values():
            for position, token in tail.items():
                if position // self.block_size * self.layout.num_groups < len(row.blocks):
                    self._write(row, position, token)
        self.tails.clear()
        self.astray.clear()

    def spoil(self) -> None:
        for block in self.pool.taken:
            self.pool.content[block] = [None] * self.block_size
        self.pool.taken.clear()

    def _write(self, row: Row, position: int, token: int) -> None:
        for group in range(self.layout.num_groups):
            block = row.blocks[position // self.block_size * self.layout.num_groups + group]
            assert block != GONE, "nobody writes behind a window"
            self.pool.content[block][position % self.block_size] = token

    def _look(self, row: Row, tokens: list[int], tail: dict[int, int]) -> None:
        """Each group of layers finds the row's ``tokens`` as far back as its first sees; those in ``tail`` there."""
        for group, window in enumerate(self.layout.windows):
            blocks = row.blocks[group :: self.layout.num_groups]
            for i in range(0 if window is None else max(row.start - window + 1, 0), len(tokens)):
                block, place = divmod(i, self.block_size)
                assert i in tail or blocks[block] != GONE, f"{row} does not see token {i} in group {group}"
                seen = tail[i] if i in tail else self.pool.content[blocks[block]][place]
                assert seen == tokens[i], f"{row} sees {seen} in the place of token {i} in group {group}"

    def lose_pool(self) -> None:
        self.tails.clear()
        self.astray.clear()
        self.pool.content[:] = [[None] * self.block_size for _ in self.pool.content]


def answer(tokens: Sequence[int]) -> int:
    """The next token: a function of all before it, as under greedy decoding."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 10007
    return value % VOCABULARY


class WildDrafter:
    """Proposes all the time: so many tokens that are right, and some that are not."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.right: dict[int, int] = {}
        self.told: list[tuple[int, int]] = []

    def draft(self, request: Request) -> tuple[int, ...]:
        tokens = list(request.tokens)
        self.right[request.id] = self.random.randint(0, 6)
        for _ in range(self.right[request.id]):
            tokens.append(answer(tokens))
        tokens += [(answer(tokens) + 1) % VOCABULARY] * self.random.randint(0, 2)
        return tuple(tokens[len(request.tokens) :])

    def may_propose(self, request: Request) -> bool:
        return True

    def learn(self, request_id: int, num_proposed: int, num_right: int) -> None:
        assert num_right == min(num_proposed, self.right[request_id]), "right as far as it was, and no further"
        self.told.append((num_proposed, num_right))

    def forget(self, request_id: int) -> None:
        self.right.pop(request_id, None)


SIZES = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 8),
        "num_blocks": st.integers(2, 10),
        "cached": st.sampled_from((True, True, True, False)),
        "min_tokens": st.sampled_from((0, 0, 3)),
        "ttl_s": st.sampled_from((None, 3.0, 20.0)),
        "windows": st.sampled_from(((None,), (None,), (None, 3), (None, 1, 1), (5,), (None, None, 12, 6))),
    }
)
CONFIG = st.fixed_dictionaries(
    {
        "num_slots": st.sampled_from((1, 2, 3, 4, 4, 4)),
        "max_batch_size": st.sampled_from((2, 4, 5)),
        "prefill_chunk": st.one_of(st.none(), st.integers(0, 64), st.integers(1, 4)),
        "max_batch_prefill": st.integers(1, 3),
        "max_batch_prefill_tokens": st.one_of(st.none(), st.integers(0, 12)),
        "watermark": st.sampled_from((0.0, 0.01, 0.5)),
        "enable_preemption": st.booleans(),
        "preemption_policy": st.sampled_from(("longest-first", "lowest-priority")),
        "itl_budget_s": st.sampled_from((None, None, 0.5, 5.0)),
        "grant_interval": st.integers(1, 4),
        "grows": st.sampled_from((False, False, True)),
        "prompt_lookup_max_batch": st.sampled_from((1, 2, 5)),
        "lookahead": st.booleans(),
    }
)
ARRIVAL = st.fixed_dictionaries(
    {
        "base": st.integers(0, 1000),  # whose text the prompt begins with, answer included
        "num_kept": st.integers(0, 40),
        "fresh": st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
        "max_tokens": st.integers(1, 24),
        "ends": st.sampled_from((False, False, False, True)),
        "priority": st.sampled_from((0, 0, 1, 2)),
        "cached": st.sampled_from((True, True, True, False)),
        "salt": st.sampled_from(("", "", "", "other")),
    }
)


class SchedulerLaws(RuleBasedStateMachine):
    """Arrivals, cancels, stops and failures in any order, on a pool so small that reclaim and eviction are common."""

    @initialize(sizes=SIZES, config=CONFIG, drafts=st.sampled_from((None, "lookup", "wild")), seed=st.integers(0, 99))
    def start(self, sizes, config, drafts, seed):
        layout, block_size = Layout(sizes["windows"]), sizes["block_size"]
        self.capacity = sizes["num_blocks"] * block_size
        pool = PoisoningPool(sizes["num_blocks"] * layout.num_groups, block_size)
        rest = sizes["cached"], sizes["min_tokens"], sizes["ttl_s"]
        self.cache = PrefixCache(pool, block_size, *rest, layout=layout)
        self.tables = BlockTables(pool, self.cache, block_size)
        self.engine = FakeEngine(pool, block_size, layout)
        self.config = SchedulerConfig(**config)
        self.drafter = {None: None, "lookup": PromptLookup(), "wild": WildDrafter(seed)}[drafts]
        self.scheduler = Scheduler(self.config, self.tables, self.drafter)
        self.now = 0.0
        self.all: dict[int, Request] = {}
        self.texts: list[list[int]] = [[]]
        self.events: dict[int, list[Event]] = {}
        self.stopped: dict[int, int] = {}
        self.seen: set[int] = set()
        self.in_flight: tuple[Plan, Result] | None = None

    @rule(arrivals=st.lists(ARRIVAL, min_size=1, max_size=5))
    def arrive(self, arrivals):
        for arrival in arrivals:
            text = self.texts[arrival["base"] % len(self.texts)]
            prompt = (text[: arrival["num_kept"]] + arrival["fresh"])[: self.capacity]
            request = Request(
                id=len(self.all),
                tokens=prompt,
                num_prompt=len(prompt),
                max_tokens=min(arrival["max_tokens"], self.capacity - len(prompt) + 1),
                end_tokens=frozenset({0}) if arrival["ends"] else frozenset(),
                priority=arrival["priority"],
                arrival_s=self.now,
                use_prefix_cache=arrival["cached"],
                cache_salt=arrival["salt"],
            )
            self.all[request.id] = request
            self.events[request.id] = []
            self.texts.append(request.tokens)
            self.scheduler.add(request)

    @precondition(lambda self: not self.scheduler.is_idle)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which):
        request = self.pick(which)
        self.record(self.scheduler.cancel(request.id, self.now))
        assert request.finish_reason is FinishReason.CANCELLED
        assert self.scheduler.cancel(request.id, self.now) == []

    @precondition(lambda self: not self.scheduler.is_idle)
    @rule(which=st.integers(0, 1000), back=st.integers(0, 3))
    def find_stop(self, which, back):
        request = self.pick(which)
        if request.num_output:
            num_output = max(1, request.num_output - back)
            self.stopped[request.id] = num_output
            self.record(self.scheduler.finish(request.id, FinishReason.STOP, num_output, self.now))

    @rule(sure=st.sampled_from((False,) * 9 + (True,)))
    def reset(self, sure):
        if sure:
            self.scheduler.reset_prefix_cache()
            assert self.cache.num_entries == 0

    @rule(
        failing=st.integers(0, 12),
        breaks=st.sampled_from((False,) * 9 + (True,)),
        astray=st.one_of(st.none(), st.integers(0, 12)),
    )
    def tick(self, failing, breaks, astray):
        self.run_tick(failing, breaks, astray=astray)

    @rule(sure=st.sampled_from((False,) * 9 + (True,)))
    def lose_pool(self, sure):
        if sure:
            self.run_tick(loses_pool=True)

    @rule(num=st.integers(1, 12))
    def quiet_ticks(self, num):
        for _ in range(num):
            self.run_tick()

    def run_tick(
        self,
        failing: int | None = None,
        breaks: bool = False,
        loses_pool: bool = False,
        astray: int | None = None,
    ) -> None:
        """One tick, in which the row at index ``failing`` fails, or all rows, or all that was ever computed is lost.
        What goes wrong does so in the step that is submitted: with one in flight, in the one ahead of it."""
        self.now += 1.0
        before = {request.id: len(request.tokens) for request in self.all.values()}
        was_idle = self.scheduler.is_idle
        if self.in_flight is None:
            plan = self.scheduler.plan(self.now)
            if plan.num_blocks:
                self.grow(plan, may_grow=failing is None)
                return
            self.look_at(plan, was_idle)
            result = self.engine.run(plan, failing, breaks)
        else:
            plan, result = self.in_flight
        wanted = [row.request_id for row in plan.rows if self.all[row.request_id].num_computed == row.start]
        following = self.scheduler.ahead(plan)
        if following is not None:
            self.look_ahead(plan, following)
            self.in_flight = following, self.engine.run_ahead(following, result, failing, breaks, astray)
        else:
            self.in_flight = None
        if loses_pool:
            self.engine.lose_pool()
            self.in_flight = None
            self.record(self.scheduler.lose_pool(plan, self.now))
            return
        took_s = 0.1 * len(plan.rows) + 0.2 * plan.num_tokens
        running = [request_id for request_id in wanted if self.all[request_id].slot is not None]
        self.record(self.scheduler.apply(plan, result, self.now + took_s))
        if plan.num_ahead:
            self.engine.spoil()
        drafts = {row.request_id: row.draft for row in plan.rows}
        for request_id in result.draws:
            num_more = len(self.all[request_id].tokens) - before[request_id]
            assert (1 <= num_more <= 1 + len(drafts[request_id])) if request_id in running else num_more == 0

    def look_ahead(self, plan: Plan, following: Plan) -> None:
        """What no step ahead may do: take a block, begin or go beyond an answer, or be submitted beside other work."""
        assert self.config.lookahead
        assert following.num_ahead == plan.num_ahead + 1 <= self.tables.block_size
        assert self.engine.pool.taken == []
        running = {request.id for request in self.live() if request.slot is not None}
        assert [row.request_id for row in following.rows] == [row.request_id for row in plan.rows]
        assert running == {row.request_id for row in following.rows}
        for row in following.rows:
            request = self.all[row.request_id]
            assert not row.draft
            assert row.start == request.num_computed + 1 == len(request.tokens)
            assert request.num_output + 1 < request.max_tokens

    def grow(self, plan: Plan, may_grow: bool) -> None:
        """A pool without bound is short: memory for it is there, or not."""
        assert self.config.grows
        assert not plan.rows
        assert plan.num_blocks > self.tables.num_blocks
        if may_grow:
            added = plan.num_blocks - self.tables.num_blocks
            self.engine.pool.content += [[None] * self.tables.block_size for _ in range(added)]
        num_blocks = plan.num_blocks if may_grow else self.tables.num_blocks
        for event in self.scheduler.resized(num_blocks, self.now):
            assert isinstance(event, Finished)
            assert event.reason is FinishReason.NO_MEMORY
            assert not any(request.slot is not None for request in self.live()), "only if nobody can make room"
            self.seen.add(event.request_id)
            self.record([event])
        assert self.tables.num_blocks == num_blocks

    def look_at(self, plan: Plan, was_idle: bool) -> None:
        assert bool(plan.rows) != was_idle, "a tick with work computes something"
        ids = [row.request_id for row in plan.rows]
        assert len(ids) == len(set(ids))
        assert len(plan.rows) <= min(self.config.num_slots, self.config.max_batch_size)
        newcomers = set(ids) - self.seen
        for priority in {self.all[request_id].priority for request_id in newcomers}:
            alike = [r.id for r in self.live() if r.id not in self.seen and r.priority == priority]
            taken = newcomers & set(alike)
            assert taken == set(alike[: len(taken)]), "nobody overtakes within a priority"
        self.seen |= newcomers
        lengths = [row.num_new for row in plan.rows]
        assert lengths == [1] * lengths.count(1) + [n for n in lengths if n > 1]
        assert min(lengths, default=1) >= 1
        for row in plan.rows:
            request = self.all[row.request_id]
            assert request.state in (State.PREFILLING, State.DECODING)
            assert row.start == request.num_computed
            num_own = row.num_new - len(row.draft)
            assert 0 < row.start + num_own <= len(request.tokens)
            assert row.draws == (row.start + num_own == len(request.tokens))
            if row.draft:
                assert (request.state, num_own) == (State.DECODING, 1)
                assert request.num_output + len(row.draft) < request.max_tokens, "the answer has room for all of it"
        num_decoding = sum(self.all[request_id].state is State.DECODING for request_id in ids)
        if num_decoding > self.config.prompt_lookup_max_batch or self.drafter is None:
            assert not any(row.draft for row in plan.rows)
        chunks = [row for row in plan.rows if self.all[row.request_id].state is State.PREFILLING]
        assert len(chunks) <= self.config.max_batch_prefill
        if len(chunks) < len(plan.rows) and self.config.prefill_chunk != 0:
            assert sum(row.num_new for row in chunks) <= (self.config.prefill_chunk or 512)

    def record(self, events: list[Event]) -> None:
        for event in events:
            history = self.events[event.request_id]
            assert not any(isinstance(earlier, Finished) for earlier in history), "nothing follows the end"
            if isinstance(event, Admitted):
                assert not history, "admission comes first, and once"
                assert event.num_cached < self.all[event.request_id].num_prompt
            elif isinstance(event, Token):
                assert history, "a token without an admission"
            history.append(event)

    def live(self) -> list[Request]:
        return [request for request in self.all.values() if request.state is not State.FINISHED]

    def pick(self, which: int) -> Request:
        live = self.live()
        return live[which % len(live)]

    @invariant()
    def books_add_up(self):
        self.scheduler.check()
        snapshot = self.scheduler.snapshot()
        live = self.live()
        assert snapshot.num_active + snapshot.num_queued == len(live), "no request is lost"
        assert snapshot.total_completed == len(self.all) - len(live)
        seats = {view.id: view.request_id for view in snapshot.slots if view.is_busy}
        assert seats == {r.slot: r.id for r in live if r.slot is not None}
        for request in live:
            if request.state is State.DECODING:
                blocks, layout = self.tables.blocks(request.id), self.tables.layout
                assert len(blocks) == self.tables.blocks_for(len(request.tokens) - 1), "no block is held for a draft"
                size = self.tables.block_size
                num_spare = layout.num_spare(request.num_computed // size * size, size)
                for group, window in enumerate(layout.windows):
                    gone = [block == GONE for block in blocks[group :: layout.num_groups]]
                    assert all(gone[:num_spare]) if window is not None else not any(gone), "given back in time"
        if isinstance(self.drafter, WildDrafter):
            told = [sum(numbers) for numbers in zip(*self.drafter.told, strict=True)] or [0, 0]
            counters = snapshot.counters
            assert [counters.spec_proposed_tokens, counters.spec_accepted_tokens] == told
        if not live:
            assert self.scheduler.is_idle
            assert snapshot.pool.live == 0
            assert snapshot.pool.free == snapshot.pool.num_blocks

    @invariant()
    def outputs_are_as_if_alone(self):
        for request in self.all.values():
            history = self.events[request.id]
            tokens = [event.draw.token for event in history if isinstance(event, Token)]
            assert tokens == request.tokens[request.num_prompt :], "every token is sent, once and in order"
            assert len(tokens) <= request.max_tokens
            if isinstance(history[-1] if history else None, Finished):
                assert history[-1].reason is request.finish_reason
                assert history[-1].num_output == self.stopped.get(request.id, request.num_output)

    def teardown(self):
        """Whatever happened, quiet ticks end every request within a bounded number of them."""
        if not hasattr(self, "scheduler"):
            return
        bound = 20 + sum(4 * (len(r.tokens) + r.max_tokens) * (1 + len(r.tokens)) for r in self.live())
        while self.in_flight is not None or not self.scheduler.is_idle:
            self.run_tick()
            bound -= 1
            assert bound > 0, "no progress"
        self.books_add_up()
        self.outputs_are_as_if_alone()
        for request in self.all.values():
            assert isinstance(self.events[request.id][-1], Finished), "every request ends"
            for position in range(request.num_prompt, len(request.tokens)):
                assert request.tokens[position] == answer(request.tokens[:position])


TestSchedulerLaws = SchedulerLaws.TestCase
TestSchedulerLaws.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

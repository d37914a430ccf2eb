"""One step further than the one in flight: what it computes is known before the tokens that it starts from are read.

Nothing is taken or counted for such a step in advance. What it turns out not to be wanted for is dropped when it is
applied, so it changes nothing that could be seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.kv.block_table import BlockTables
from app.scheduler.plan import Plan, Result, Row
from app.scheduler.seats import Seats


def ahead(plan: Plan, seats: Seats, tables: BlockTables) -> Plan | None:
    """The step after ``plan``, which is in flight: the same rows, each one token further. None where another step may
    be due, or where a row of it is known to be in vain.

    A row's new block is only promised: ``Scheduler.apply`` takes it once the row is known to go on. Nobody else takes
    blocks until then. After as many steps as a block has tokens an ordinary one is due: so each row's positions since
    the last ordinary step lie in two blocks.
    """
    if len(plan.rows) != len(seats.running) or plan.num_ahead >= tables.block_size:
        return None
    num_promised = 0
    for row in plan.rows:
        if not _goes_on(row, seats) or not row.draws or row.num_new > 1:
            return None
        if row.sampling.has_penalty or row.constraint is not None:  # its draw depends on the token that is in flight
            return None
        request = seats[row.request_id]
        # The step in flight draws one token, which must not be the last one; and this step computes that token.
        if request.num_output + 1 >= request.max_tokens:
            return None
        num_promised += tables.num_missing(row.request_id, row.start + 2)
    if not plan.rows or num_promised > tables.num_free:
        return None
    return Plan(tuple(row._replace(start=row.start + 1) for row in plan.rows), num_ahead=plan.num_ahead + 1)


def wanted(plan: Plan, result: Result, seats: Seats) -> Sequence[Row]:
    """The rows of a computed step that count: all, unless it was ahead. Then a row whose request has ended or begins
    anew is dropped, and one that the engine gives nothing for: it had started from another token than was drawn."""
    if not plan.num_ahead:
        return plan.rows
    told = result.draws.keys() | result.failures.keys()
    return [row for row in plan.rows if row.request_id in told and _goes_on(row, seats)]


def _goes_on(row: Row, seats: Seats) -> bool:
    """Whether a row begins where its request stands."""
    return row.request_id in seats and seats[row.request_id].num_computed == row.start

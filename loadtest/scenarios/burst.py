"""Many more users at once than slots and queue hold, between two quiet spells."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="burst",
    proves="whoever finds the queue full gets 503 with the documented body and Retry-After, nobody gets any other "
    "failure, and soon after the burst first tokens come as before it",
    kinds=(Kind("asker", num_prompt=20, num_new=16),),
    shape=(Stage("before", 30, 2), Stage("burst", 60, 60), Stage("after", 45, 2)),
    small=(Stage("before", 6, 2), Stage("burst", 6, 40), Stage("after", 12, 2)),
    server={"N_PARALLEL": "4", "MAX_QUEUE_DEPTH": "8"},
    refuses=True,
)

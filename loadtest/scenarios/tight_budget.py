"""More requests than the block pool can hold to their ends."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="tight_budget",
    proves="with too few blocks requests wait or go back to the queue, and every one ends with its whole answer",
    kinds=(Kind("asker", num_prompt=(60, 200), num_new=100),),
    shape=(Stage("tight", 180, 8),),
    server={"N_PARALLEL": "8", "KV_CACHE_BUDGET": "48M"},
)

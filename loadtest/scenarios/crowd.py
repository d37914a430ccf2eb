"""512 connections at once, and a queue that has room for all of them."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="crowd",
    proves="a long queue is worked off in turn, with every connection open from the first moment to its answer",
    kinds=(Kind("one", num_prompt=8, num_new=4, once=True),),
    shape=(Stage("crowd", 30, 512),),
    server={"N_PARALLEL": "16", "MAX_QUEUE_DEPTH": "512"},
)

"""512 connections at once, and a queue that has room for all of them. They come within two seconds, before the first
has its answer: at one moment there would be no order to keep."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="crowd",
    proves="a long queue is worked off in turn, with every connection open from the first moment to its answer",
    kinds=(Kind("one", num_prompt=8, num_new=16, once=True, within_s=2.0),),
    shape=(Stage("crowd", 60, 512),),
    server={"N_PARALLEL": "16", "MAX_QUEUE_DEPTH": "512"},
)

"""512 connections at once, and a queue of ordinary length."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="crowd_refused",
    proves="slots and queue are filled, and everybody beyond them is refused at once with 503",
    kinds=(Kind("one", num_prompt=8, num_new=32, once=True),),
    shape=(Stage("crowd", 30, 512),),
    server={"N_PARALLEL": "4"},
    refuses=True,
)

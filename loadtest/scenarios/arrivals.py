"""Requests that arrive at a set rate, whether or not the ones before have been answered."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="arrivals",
    proves="at a rate the machine can carry the queue does not grow, and waits stay short",
    kinds=(Kind("caller", num_prompt=(20, 120), num_new=24, rate_per_s=0.75),),
    shape=(Stage("open", 180, 1),),
    server={"N_PARALLEL": "8"},
)

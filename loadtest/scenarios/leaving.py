"""Users who hang up: while they wait, before the first token, in the middle of the answer."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="leaving",
    proves="who leaves frees the slot and the blocks at once, and those who stay get their whole answers",
    kinds=(
        Kind("leaver", num_prompt=20, num_new=400, does="leave", rate_per_s=3.6, stays_s=(0.05, 2.0)),
        Kind("stayer", num_prompt=20, num_new=24),
    ),
    shape=(Stage("leave", 300, 2),),
    small=(Stage("leave", 14, 2),),
    server={"N_PARALLEL": "4"},
)

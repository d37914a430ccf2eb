"""Eight users who never stop asking: the everyday load, for rates and waits and their drift against a baseline."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="steady",
    proves="a load that fits the slots is served without waiting for a slot, without an error, at an even pace",
    kinds=(Kind("asker", num_prompt=(20, 200), num_new=48),),
    shape=(Stage("steady", 120, 8),),
    server={"N_PARALLEL": "8"},
)

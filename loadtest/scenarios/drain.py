"""The server is told to end while requests run and wait."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="drain",
    proves="what runs is brought to its end, what waits or comes is refused with 503, and the process exits with 0",
    kinds=(Kind("asker", num_prompt=20, num_new=32),),
    shape=(Stage("until the end", 24, 8),),
    small=(Stage("until the end", 16, 8),),
    server={"N_PARALLEL": "4", "DRAIN_TIMEOUT": "300"},
    refuses=True,
    drain_after_s=10,
)

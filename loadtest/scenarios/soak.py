"""Half an hour of everything an honest day has: nothing may grow."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="soak",
    proves="memory stays where it is, and no slot or block is lost",
    kinds=(
        Kind("asker", num_prompt=(20, 400), num_new=48, weight=4),
        Kind("talker", num_prompt=40, num_new=32, does="chat", num_turns=3, think_s=1.0, weight=2),
        Kind("shared", num_prompt=240, num_new=16, num_shared=200, think_s=1.0),
        Kind("leaver", num_prompt=40, num_new=200, does="leave", stays_s=(0.05, 4.0), think_s=1.0),
    ),
    shape=(Stage("soak", 1800, 8),),
    server={"N_PARALLEL": "6"},
)

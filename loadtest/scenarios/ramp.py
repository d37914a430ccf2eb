"""From a load that fits to four times of what slots and queue hold: the tokens that come out must not become fewer."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="ramp",
    proves="beyond saturation the server refuses, and goes on making as many tokens as at its best",
    kinds=(Kind("asker", num_prompt=20, num_new=32),),
    shape=(
        Stage("c2", 40, 2),
        Stage("c4", 40, 4),
        Stage("c8", 60, 8),
        Stage("c16", 60, 16),
        Stage("c64", 90, 64),
    ),
    server={"N_PARALLEL": "8", "MAX_QUEUE_DEPTH": "8"},
    ratios={"goodput_c64_to_c8": ("tokens_out_per_s.c64", "tokens_out_per_s.c8")},
    refuses=True,
)

"""Short answers with 1 to 32 users: how the wait for the first token grows with company."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="first_token",
    proves="TTFT grows no faster than the number of prompts that are read at once, and is the same for all users",
    kinds=(Kind("asker", num_prompt=80, num_new=24),),
    shape=(
        Stage("c1", 40, 1),
        Stage("c2", 40, 2),
        Stage("c4", 40, 4),
        Stage("c8", 60, 8),
        Stage("c16", 60, 16),
        Stage("c32", 90, 32),
    ),
    server={"N_PARALLEL": "32"},
    ratios={f"ttft_growth_{stage}": (f"ttft_p50_s.{stage}", "ttft_p50_s.c1") for stage in ("c8", "c32")},
)

"""The same requests with 1, 2, 4, 8 and 16 users: what sharing a forward brings."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="batching",
    proves="tokens/s grow with the number of requests that share a forward, and every user gets first tokens alike",
    kinds=(Kind("asker", num_prompt=20, num_new=32),),
    shape=(Stage("c1", 45, 1), Stage("c2", 45, 2), Stage("c4", 45, 4), Stage("c8", 60, 8), Stage("c16", 60, 16)),
    small=(Stage("c1", 12, 1), Stage("c4", 13, 4), Stage("c8", 16, 8)),
    server={"N_PARALLEL": "16"},
    ratios={
        f"gain_{stage}": (f"tokens_out_per_s.{stage}", "tokens_out_per_s.c1") for stage in ("c2", "c4", "c8", "c16")
    },
)

"""Prompts that begin alike, as with a system prompt, beside prompts that do not."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="shared_prefix",
    proves="the common beginning is computed once: most prompt tokens come from the cache and first tokens sooner",
    kinds=(
        Kind("shared", num_prompt=440, num_new=8, num_shared=400, weight=3),
        Kind("cold", num_prompt=440, num_new=8),
    ),
    shape=(Stage("mixed", 120, 4),),
    server={"N_PARALLEL": "4"},
    ratios={"ttft_shared_to_cold": ("ttft_p50_s.shared", "ttft_p50_s.cold")},
)

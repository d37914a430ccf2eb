"""Long prompts that arrive while others are in the middle of their answers."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="long_prompt",
    proves="streams go on while a long prompt is read beside them: gaps between tokens are bounded by the chunk",
    kinds=(
        Kind("live", num_prompt=20, num_new=200, weight=4),
        Kind("long", num_prompt=1500, num_new=8, think_s=10.0),
    ),
    shape=(Stage("mixed", 180, 5),),
    server={"N_PARALLEL": "8", "PREFILL_CHUNK": "128"},
    ratios={"itl_beside_to_apart": ("itl_p95_s.beside", "itl_p50_s.apart")},
    intruder="long",
)

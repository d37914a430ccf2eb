"""Urgent requests among ordinary ones that have taken every slot."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="priority",
    proves="an urgent request does not stand in line behind ordinary ones, and those still get their whole answers",
    kinds=(
        Kind("ordinary", num_prompt=40, num_new=64, weight=8),
        Kind("urgent", num_prompt=40, num_new=16, priority=10, think_s=2.0),
    ),
    shape=(Stage("mixed", 180, 9),),
    server={"N_PARALLEL": "4", "ENABLE_PREEMPTION": "true"},
    ratios={"ttft_urgent_to_ordinary": ("ttft_p50_s.urgent", "ttft_p50_s.ordinary")},
)

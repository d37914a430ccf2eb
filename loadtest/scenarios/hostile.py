"""Slow readers, broken and huge bodies, wrong keys, beside users who mean well."""

from loadtest.scenario import API_KEY, Kind, Scenario, Stage

SCENARIO = Scenario(
    name="hostile",
    proves="each kind of nonsense gets the status it deserves, and the others do not notice",
    kinds=(
        Kind("asker", num_prompt=20, num_new=24, weight=3),
        Kind("slow", num_prompt=20, num_new=24, does="read_slowly"),
        Kind("broken", num_prompt=20, num_new=8, does="send_broken", think_s=0.5),
        Kind("huge", num_prompt=20, num_new=8, does="send_huge", think_s=0.5),
        Kind("stranger", num_prompt=20, num_new=8, does="send_wrong_key", think_s=0.5),
    ),
    shape=(Stage("mixed", 120, 7),),
    server={"N_PARALLEL": "4", "API_KEYS": API_KEY, "MAX_BODY_BYTES": "64K"},
)

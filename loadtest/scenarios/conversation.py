"""Chats of several turns, each of which sends the whole conversation again."""

from loadtest.scenario import Kind, Scenario, Stage

SCENARIO = Scenario(
    name="conversation",
    proves="a later turn pays for what is new in it, since the conversation so far is found in the prefix cache",
    kinds=(Kind("talker", num_prompt=60, num_new=40, does="chat", num_turns=4, think_s=1.0),),
    shape=(Stage("talk", 180, 6),),
    server={"N_PARALLEL": "6"},
)

"""MiniMind's rules, with the values of `calculate_rewards` in train_grpo.py and train_agent.py (August 2026)."""

import json

import pytest
from transformers.utils import get_json_schema

from examples.agent_tools import TOOLS as FUNCTIONS
from hf_pretrain.stages.rewards import REWARDS, agent_reward, arithmetic_reward, format_reward
from tests.rollouts import call, says


TOOLS = [get_json_schema(function) for function in FUNCTIONS]
THOUGHT = "The question is about the sky, so colours."
WEATHER, MATH = call("get_current_weather", location="Paris"), call("calculate_math", expression="6*7")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("Blue.", -0.5),
        ("The sky is blue because of the air.", 0.5),
        (f"{THOUGHT}\n</think>\n\nThe sky is blue.", 1.75),
        ("Hm.</think>The sky is blue. The sky is blue. The sky is blue!", -0.25),
        (f"{THOUGHT}</think>Blue.</think>", 1.25),
        ("<think>\n" + "long " * 80 + "</think>\n\n天空是蓝色的，天空是蓝色的，因为空气。", 0.25),
        ("na " * 300, -1.0),
    ],
)
def test_the_rules_for_answers_equal_minimind(text, reward):
    # TRL's message may lack the closing mark, so the text decides.
    parsed = [[{"role": "assistant", "content": "", "reasoning_content": text, "text": text}]]
    for completions in (text,), parsed:
        given = [
            REWARDS[name](completions)[0] for name in ("length", "thought_length", "closed_thought", "repetition")
        ]
        assert sum(given) == pytest.approx(reward, abs=1e-6)


@pytest.mark.parametrize(
    ("turns", "targets", "reward"),
    [
        ([WEATHER, "It is 10°C in Paris, and cloudy."], ["10", "Cloudy"], 2.0),
        ([MATH + WEATHER, "42, and 10°C."], ["42"], 2.0),
        ([WEATHER], ["10"], -0.0357143),
        ([call("get_current_weather"), "I see 110."], ["10", "7"], -0.25),
        ([WEATHER + "</tool_call>", WEATHER + "<tool_call>", "so so so so so so so"], ["10"], -2.0),
        (["Hello!"], [], 0.5),
        ([f"{THOUGHT}</think>Hi <tool_call>"], ["3"], 1.25),
        ([call("set_alarm") * 9, "?"], [], -3.0),
        ([MATH, "The result is 42.0, not 1,042."], ["42", "1042", "42"], -0.1666667),
    ],
)
def test_the_reward_of_agents_equals_minimind(turns, targets, reward):
    rollout = [message for turn in turns for message in ({"role": "assistant", "text": turn}, {"role": "tool"})]
    given = agent_reward([rollout[:-1]], tools=[json.dumps([TOOLS[0], TOOLS[2]])], solution=[targets])
    assert given == [pytest.approx(reward, abs=1e-6)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "answer",
    [
        *(f"<tool_call>{words}</tool_call>" for words in ('{"name": {}, "arguments": {}}', "[" * 100_000, "3")),
        f'<tool_call>{{"name": "set_timer", "arguments": {"[" * 100_000}}}</tool_call>',
        f'<tool_call>{{"name": "set_timer", "arguments": {{"minutes": {"9" * 5000}}}}}</tool_call>',
        '<tool_call>{"name": NaN, "arguments": -Infinity}</tool_call>',
        # Linear time takes a tenth of a second, quadratic time takes minutes.
        *("<tool_call>" * 40_000, "<think>" + " a" * 60_000),
    ],
    ids=lambda answer: answer[:40],
)
def test_any_text_gets_a_reward_in_little_time(answer):
    columns = {"tools": [json.dumps(TOOLS)], "solution": [["5"]]}
    assert agent_reward(says(answer), **columns)[0] <= 0.5 and REWARDS["repetition"](says(answer))[0] <= 0
    assert format_reward(says(answer), answer_format=["sentence"])[0] < 0.2
    assert arithmetic_reward(says(answer), solution=[["12"]])[0] in (0.0, 0.2)

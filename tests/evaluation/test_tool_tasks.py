"""The questions that `examples/tool_tasks.py` makes for the tools of `examples/tools.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples import tools
from examples.right_result import right_result
from hf_pretrain.data.reward_tasks import read_task
from hf_pretrain.evaluation.tool_call_task import evaluate_tool_calls
from hf_pretrain.inference.tool_process import load_functions
from hf_pretrain.stages.minimind_rewards import agent
from tests.evaluation.test_tool_call_task import ScriptedModel, right_answers


EXAMPLES = Path(tools.__file__).parent


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tasks")
    subprocess.run([sys.executable, EXAMPLES / "tool_tasks.py", directory], check=True)
    return directory


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def turns(name: str, arguments: dict, answer: str) -> list[str]:
    return [f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>", answer]


def test_no_question_stands_in_two_files(made):
    cases = json.loads((made / "held_out.json").read_text(encoding="utf-8"))["cases"]
    conversations, tasks = (read(made / f"{name}.jsonl") for name in ("conversations", "tasks"))
    texts = [case["question"] for case in cases]
    texts += [each["messages"][0]["content"] for each in conversations] + [
        each["prompt"][-1]["content"] for each in tasks
    ]
    assert len(texts) == len(set(texts)) == 240 + 80 + 1000
    # As in a chat with the file of tools.
    names = [function.__name__ for function in load_functions(str(EXAMPLES / "tools.py"))]
    assert all(case["tools"] == names for case in cases)


def test_the_calls_of_a_conversation_give_its_results_and_the_answer_states_them(made):
    for each in read(made / "conversations.jsonl"):
        (call,) = each["messages"][1]["tool_calls"]
        result = getattr(tools, call["name"])(**call["arguments"])
        assert each["messages"][2]["content"] == result
        # The calendar returns a weekday and a date, of which the question asks for one.
        assert any(part in each["messages"][3]["content"] for part in result.split(", "))
        assert call["name"] in [tool["function"]["name"] for tool in each["tools"]]


def test_a_conversation_of_several_rounds_shows_the_tools_of_all_once(made, tmp_path):
    subprocess.run([sys.executable, EXAMPLES / "tool_tasks.py", tmp_path, "20", "4"], check=True)
    rounds = read(tmp_path / "conversations.jsonl")
    assert len(rounds) == 20
    # The same questions in the same order as in conversations of one round.
    shown = [each["messages"] for each in read(made / "conversations.jsonl")]
    assert [each["messages"] for each in rounds] == [sum(shown[at : at + 4], []) for at in range(0, 80, 4)]
    for each in rounds:
        assert len(each["tools"]) == 4


@pytest.mark.parametrize(
    ("results", "answer", "expected"),
    [
        ([], "It is 12.", 0.0),
        (["{'error': 'There is no way from g to m.'}"], "It is 12.", 0.0),
        (["120"], "It is 12.", 0.2),
        (["112.5", "12.5"], "It is 12.", 0.2),
        (["-12", "2026-03-12", "12,000"], "It is 12.", 0.2),
        (["12"], "It is 120.", 0.6),
        (["12"], "It is -12.", 0.6),
        (["12"], "It is 12.\n```\nYou can use", 0.0),
        (["12"], "It is 12." + " It is 12." * 9, 0.0),
        (["{'error': 'no'}", "12"], "It is 12.", 1.0),
    ],
)
def test_the_reward_counts_the_steps_to_a_right_answer(results, answer, expected):
    messages = [{"role": "tool", "content": result} for result in results]
    rollout = [{"role": "assistant", "content": ""}, *messages, {"role": "assistant", "content": answer}]
    assert right_result([rollout], [["12"]], tools=[None]) == [pytest.approx(expected)]
    called = {"role": "assistant", "content": "\n\n53 + 31 = 89\n\nYou have", "tool_calls": [{}]}
    assert right_result([[called, *rollout[1:]]], [["12"]]) == [0.0]
    assert right_result([[called | {"content": ""}, *rollout[1:]]], [["12"]]) == [pytest.approx(expected)]
    if len(answer) < 12:
        # Without an answer of the model, the tool alone states the result.
        assert right_result([rollout[:-1]], [["12"]], tools=[None]) == [pytest.approx(min(expected, 0.6))]


def test_right_answers_to_the_held_out_questions_score(made, tokenizer):
    path = made / "held_out.json"
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    model = ScriptedModel(tokenizer, sum(map(right_answers, cases), []))
    result = evaluate_tool_calls(model, tokenizer, tool_cases=str(path))
    assert result["failures"] == [] and result["num_examples"] == 240
    for case in cases:
        (call,) = case["calls"]
        arguments = {name: value for name, (value,) in call["arguments"].items()}
        assert getattr(tools, call["name"])(**arguments) == call["result"] and case["states"][0] in call["result"]


def test_the_answers_that_the_model_is_shown_earn_the_whole_reward(made):
    for record in read(made / "conversations.jsonl"):
        _, *rollout = record["messages"]
        answer = rollout[-1]["content"]
        # The calendar returns a weekday and a date, of which one is asked.
        [value] = [part for part in rollout[1]["content"].split(", ") if part in answer]
        assert right_result([rollout], [[value]]) == [1.0], answer


def test_the_reward_of_a_task_is_highest_for_its_call_with_its_result(made):
    for record in read(made / "tasks.jsonl")[:100]:
        task = read_task(record)
        offered = json.loads(task["tools"])
        name = offered[0]["function"]["name"]
        required = offered[0]["function"]["parameters"]["required"]
        call, wrong = dict.fromkeys(required, "1"), dict.fromkeys(required[1:], "1")
        (target,) = task["solution"]
        assert agent(turns(name, call, f"It is {target}."), offered, [target]) == 3.0
        assert agent(turns(name, call, "It is unknown."), offered, [target]) == 0.5
        assert agent(turns(name, wrong, f"It is {target}."), offered, [target]) < 3.0


@pytest.mark.parametrize("preset", ["smollm2", "minimind3"])
def test_the_recipe_of_make_agent_names_tools_and_rewards_of_the_checkout(preset):
    values = yaml.safe_load((EXAMPLES.parent / f"recipes/{preset}/agent-grpo.yaml").read_text(encoding="utf-8"))
    assert (EXAMPLES.parent / values["tools"]).samefile(EXAMPLES / "tools.py")
    assert values["rewards"] == f"{right_result.__module__}:{right_result.__name__}"

"""Tools that a chat runs itself, and the task `tool_call`, with a model that answers what the test says."""

import copy
import json
import runpy
import shutil

import pytest
import torch

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.evaluation import tool_call_task
from hf_pretrain.evaluation.tool_call_task import _CASES, evaluate_tool_calls, format_failures
from hf_pretrain.inference.terminal_chat import Chat
from hf_pretrain.inference.tools import call_tool, offer_tools
from tests.talking import CALL, TOOL, WEATHER


CASES = json.loads(_CASES.read_text(encoding="utf-8"))["cases"]


def test_the_tools_of_a_module_have_schemas_and_run():
    schemas, functions = offer_tools("examples.agent_tools:TOOLS")
    assert [schema["function"]["name"] for schema in schemas] == list(functions) and len(functions) == 6
    call = {"function": {"name": "unit_converter", "arguments": '{"value": 3, "from_unit": "km", "to_unit": "miles"}'}}
    assert json.loads(call_tool(functions, call)) == {"result": 1.8641}
    for function, words in (
        ({"name": "other", "arguments": {}}, "There is no tool 'other'"),
        ({"name": "unit_converter", "arguments": "{3"}, "property name"),
        ({"name": "calculate_math", "arguments": {"expression": "1/0"}}, "division by zero"),
    ):
        assert words in json.loads(call_tool(functions, {"function": function}))["error"]


def test_a_model_that_only_calls_tools_comes_to_an_end(tokenizer):
    chat = Chat(
        ScriptedModel(tokenizer, [[CALL["function"]]] * 40), tokenizer, {"temperature": 0, "max_new_tokens": 9}
    )
    chat.functions = {"get_weather": lambda city: "rain"}
    chat.say("hello")
    chat.respond(list)
    assert len(chat.history) == 1 + 2 * 16 + 1


class ScriptedModel:
    """Stands for a model that answers with texts, or lists of calls, in turn."""

    def __init__(self, tokenizer, answers):
        self.tokenizer, self.answers = tokenizer, iter(answers)
        self.config, self.device = MiniMindForCausalLM.config_class(), torch.device("cpu")

    def generate(self, input_ids, *, streamer, **options):
        answer = next(self.answers)
        calls = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in answer if isinstance(call, dict)]
        streamer.put(input_ids[0])
        text = ("\n".join(calls) or answer) + self.tokenizer.eos_token
        streamer.put(torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"]))
        streamer.end()


def right_answers(case: dict) -> list:
    """Return the calls of a case, one at a time and by the last spelling that it accepts, and the final answer."""
    picked = [{name: values[-1] for name, values in call["arguments"].items()} for call in case["calls"]]
    names = [call["name"] for call in case["calls"]]
    calls = [[{"name": name, "arguments": arguments}] for name, arguments in zip(names, picked, strict=True)]
    return [*calls, "It is " + " and ".join(case["states"]).upper()]


def change(answers: list, **fields) -> list:
    changed = copy.deepcopy(answers)
    changed[0][0] |= fields
    return changed


def test_right_calls_and_answers_score(tokenizer):
    result = evaluate_tool_calls(ScriptedModel(tokenizer, sum(map(right_answers, CASES), [])), tokenizer)
    assert result["failures"] == [] and result["num_examples"] == len(CASES) == 16
    assert {name: entry["value"] for name, entry in result["metrics"].items()} == {"score": 1.0, "right calls": 1.0}


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (["14628"], "does not call calculate_math"),
        ([*right_answers(CASES[0])[:1], "a lot"], "does not state 14628"),
        ([*right_answers(CASES[0])[:1], "146280"], "does not state 14628"),
        (change(right_answers(CASES[0]), arguments={"expression": "318+46"}), 'calls calculate_math {"expression":'),
        (change(right_answers(CASES[0]), name="get_exchange_rate"), "calls a tool that was not offered"),
        (change(right_answers(CASES[0]), arguments="318*46"), "calls a tool that was not offered, or without a JSON"),
        ([right_answers(CASES[0])[0] * 2, "14628"], "calls calculate_math"),
        (change(right_answers(CASES[0]), arguments={"expression": "46 × 318"}), None),
    ],
)
def test_each_kind_of_failure_is_named(tokenizer, answers, problem):
    result = evaluate_tool_calls(ScriptedModel(tokenizer, answers), tokenizer, limit=1)
    assert result["num_examples"] == 1 and result["metrics"]["score"]["value"] == (problem is None)
    assert all(problem in failure["problem"] for failure in result["failures"])
    assert result["metrics"]["right calls"]["value"] == (problem in (None, "does not state 14628"))
    # `--against` compares the questions one by one.
    [example] = result["examples"]
    assert {name: total for name, (total, _) in example["figures"].items()} == {
        name: entry["value"] for name, entry in result["metrics"].items()
    }
    assert (example["text"], problem is None or problem in example["answer"]) == (CASES[0]["question"], True)


def test_a_limit_below_one_is_a_share(tokenizer):
    result = evaluate_tool_calls(ScriptedModel(tokenizer, ["no"] * len(CASES)), tokenizer, limit=2.5 / len(CASES))
    assert result["num_examples"] == 3


def test_the_recipe_prints_the_score_and_the_failures(talker, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool_call_task, "_CASES", tmp_path / "cases.json")
    call = {"name": "get_weather", "arguments": {"city": ["Oslo"]}, "result": "rain"}
    case = {"question": WEATHER[0]["content"], "tools": ["get_weather"], "calls": [call], "states": ["rains in Oslo"]}
    cases = [case, case | {"states": ["snow"]}]
    (tmp_path / "cases.json").write_text(json.dumps({"tools": [TOOL], "cases": cases}))
    # A penalty of its own would keep the model from repeating the question.
    model = shutil.copytree(talker, tmp_path / "talker")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 9.0}))
    arguments = ["--model_name_or_path", str(model), "--results_dir", str(tmp_path / "results"), "--use_cpu"]
    arguments += ["--tasks", "tool_call", "--validation_fraction", "0"]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *arguments])
    runpy.run_path("recipes/evaluate.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert "tool_call  score        0.5000" in printed
    assert "tool_call  right calls  1.0000" in printed
    failure = "weather in Oslo?\n    does not state snow\n    answer: It rains in Oslo.\n"
    assert f"1 of 2 questions of tool_call failed:\n{failure}" in printed
    saved = json.loads((tmp_path / "results/evaluation.json").read_text(encoding="utf-8"))["tasks"]["tool_call"]
    assert format_failures(saved) in printed

"""The task `tool_call` asks a model behind a real server, and finds what it finds in the same model without one."""

import json
import runpy

import httpx
import pytest

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.evaluation import tool_call_task
from hf_pretrain.evaluation.tool_call_task import evaluate_tool_calls
from hf_pretrain.inference.served_model import ServedModel, to_request
from hf_pretrain.tokenizer.control_tokens import encode_prompt
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from tests.serving import served
from tests.talking import CALL, SUM, TOOL, WEATHER


@pytest.fixture(scope="module")
def server(talker):
    with served(str(talker), engine="transformers") as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def local(talker):
    return MiniMindForCausalLM.from_pretrained(talker).eval(), load_tokenizer(talker)


def test_a_served_model_has_the_score_of_the_local_one(server, local, tmp_path, monkeypatch, capsys):
    # The toy has few positions. Some of these conversations have more tokens.
    whole = [evaluate_tool_calls(*each) for each in ((ServedModel(server, "m", "k"), None), local)]
    calls = {"name": "get_weather", "arguments": {"city": ["Oslo"]}, "result": "rain"}
    case = {"question": WEATHER[0]["content"], "tools": ["get_weather"], "calls": [calls], "states": ["rains in Oslo"]}
    cases = [case, case | {"states": ["snow"]}, case | {"question": SUM[0]["content"]}]
    monkeypatch.setattr(tool_call_task, "_CASES", tmp_path / "cases.json")
    (tmp_path / "cases.json").write_text(json.dumps({"tools": [TOOL], "cases": cases}))
    few = [evaluate_tool_calls(*each) for each in ((ServedModel(server, "m", "k"), None), local)]
    # A server is not told to leave out the penalty of its model, which this one does not have.
    assert few[1]["sampling"].pop("repetition_penalty") == 1.0
    assert few[0] == few[1] and few[0]["metrics"]["score"]["value"] == pytest.approx(2 / 3)
    for ours, theirs in zip(*(each["examples"] for each in whole), strict=True):
        assert ours["figures"] == theirs["figures"], (ours, theirs)
    words = ["--api_base_url", server, "--use_cpu", "--results_dir", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *words])
    runpy.run_path("recipes/evaluate.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert f"default at {server}" in printed and "tool_call  score        0.6667" in printed
    assert "1 of 3 questions of tool_call failed" in printed
    saved = json.loads((tmp_path / "results/evaluation.json").read_text(encoding="utf-8"))["tasks"]["tool_call"]
    assert saved["metrics"] == json.loads(json.dumps(few[1]["metrics"]))


def test_thoughts_and_texts_beside_calls_reach_the_prompt(server, local):
    call = CALL | {"id": "a", "function": CALL["function"] | {"arguments": '{"city": "Oslo"}'}}
    history = [WEATHER[0], WEATHER[1] | {"reasoning_content": "Ask first.", "content": "Wait."}, WEATHER[2]]
    history[1]["tool_calls"] = [call]
    body = {"messages": to_request(history, with_reasoning=True), "tools": [TOOL], "max_tokens": 1}
    usage = httpx.post(f"{server}chat/completions", json=body, timeout=500).json()["usage"]
    assert usage["prompt_tokens"] == len(encode_prompt(local[1], history, [TOOL]))

"""The tasks of reinforcement learning: embedded, in TRL's format and in MiniMind's."""

import json

import pytest
from transformers.utils import get_json_schema

from examples.agent_tools import TOOLS as FUNCTIONS
from hf_pretrain.data.reward_tasks import load_tasks, read_task
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import write_jsonl


TOOLS = [get_json_schema(function) for function in FUNCTIONS]


def test_embedded_tasks_are_the_same_for_the_same_seed():
    (train, held_out), (again, _), (other, _) = (
        load_tasks(["embedded:arithmetic"], Reading(kind="task", validation_fraction=0.1, seed=seed))
        for seed in (1, 1, 2)
    )
    assert train[:] == again[:] != other[:]
    prompts = {json.dumps(prompt) for prompt in train["prompt"]}
    assert len(held_out) and not prompts & {json.dumps(prompt) for prompt in held_out["prompt"]}


def test_minimind_agent_records_become_tasks():
    record = {
        "conversations": [
            {"role": "system", "content": "Help.", "tools": json.dumps(TOOLS)},
            {"role": "user", "content": "Five minutes, please."},
            {"role": "assistant", "content": ""},
        ],
        "gt": [5, "timer"],
    }
    task = read_task(record)
    assert [message["role"] for message in task["prompt"]] == ["system", "user"]
    assert task["prompt"][0]["content"] == "Help." and task["prompt"][0]["tools"] == task["tools"]
    assert task["solution"] == ["5", "timer"] and json.loads(task["tools"]) == TOOLS
    plain = read_task({"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]})
    assert plain["prompt"] == [{"role": "user", "content": "Hi"}] and plain["solution"] == []


def test_earlier_calls_and_thoughts_stay_in_the_prompt(tmp_path):
    turns = []
    for name, arguments in (("set_timer", {"minutes": 5}), ("get_weather", {"city": "Rome"})):
        calls = [{"function": {"name": name, "arguments": arguments}}]
        turns += [
            {"role": "user", "content": "Please."},
            {"role": "assistant", "content": "", "reasoning_content": "A tool.", "tool_calls": calls},
            {"role": "tool", "content": "done"},
        ]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": turns}) + "\n")
    train, _ = load_tasks([str(tmp_path / "tasks.jsonl")], Reading(kind="task", validation_fraction=0.0))
    tokenizer = train_tokenizer(["text"], vocab_size=300)
    ours, theirs = (tokenizer.apply_chat_template(m, tokenize=False) for m in (train[0]["prompt"], turns))
    assert ours == theirs and '"arguments": {"city": "Rome"}' in ours
    assert ours.count("A tool.") == 2


def test_bad_lines_count_over_all_names(tmp_path):
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "1+1?"}, {}])
    good = write_jsonl(tmp_path / "good.jsonl", [{"prompt": f"{number}?"} for number in range(8)])
    for names in ([good, bad], [bad, good]):
        assert len(load_tasks(names, Reading(kind="task", validation_fraction=0.0, max_rejected_ratio=0.1))[0]) == 9
        with pytest.raises(UserError):
            load_tasks(names, Reading(kind="task", validation_fraction=0.0, max_rejected_ratio=0.09))

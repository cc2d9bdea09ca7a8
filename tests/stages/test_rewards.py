"""Every built-in reward on right, partly right and wrong answers, and the tasks that no reward can use."""

import copy
import json
import sys

import pytest
from transformers.utils import get_json_schema

from examples.agent_tools import TOOLS as MINIMIND_TOOLS
from hf_pretrain.data.formats import BadRecord
from hf_pretrain.data.reward_tasks import EMBEDDED_TASKS, load_tasks
from hf_pretrain.inference.tools import calculator
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.reinforcement import GRPOTrainingArguments, TaskArguments
from hf_pretrain.stages.rewards import (
    REWARDS,
    arithmetic_reward,
    format_reward,
    load_reward_functions,
    task_check,
)
from hf_pretrain.tokenizer.control_tokens import encode_prompt
from tests.rollouts import says
from tests.toys import write_jsonl
from tests.trainers import ARGUMENTS


LONG = "The " + "very " * 12 + "blue sky"


@pytest.mark.parametrize(
    ("shape", "answer", "reward"),
    [
        *(("sentence", right, 1.0) for right in ("The sky is blue.", "<think>\nwell\n</think>\n\nThe sky is blue.")),
        # Three of four parts.
        *(("sentence", f"{wrong}.", 0.15) for wrong in ("the sky is blue", "The sky. It is blue", "Sky", LONG)),
        *[("sentence", "", 0.0), ("number", "42", 1.0), ("number", "42!", 0.0), (None, "Blue.", None)],
    ],
)
def test_the_format_reward_counts_parts(shape, answer, reward):
    assert format_reward(says(answer), answer_format=[shape]) == [pytest.approx(reward)]


@pytest.mark.parametrize(
    ("answer", "solution", "reward"),
    [
        # The last number counts.
        *[("12 + 7 = 19.", ["19"], 1.0), ("It is 19.0", ["19"], 1.0), ("12 + 7 = 18", 19, 0.2), ("nineteen", 19, 0.0)],
        # Units, ordinals, Unicode's minus, separators, exponents.
        *[("12kg", 12, 1.0), ("the 12th", 12, 1.0), ("\u22125", -5, 1.0), ("7\u22125", -5, 0.2)],
        *[("3,4", 34, 0.2), ("3,4", 4, 1.0), ("3,400", 3400, 1.0), ("1,234,567.5", 1234567.5, 1.0)],
        *[("1.2e3", 1200, 1.0), ("等于12。", 12, 1.0)],
        # A solution of GSM8K.
        *[("1200", "It is <<3*400=1200>>1200.\n#### 1,200", 1.0), ("3", "It is <<3*400=1200>>1200.\n#### 1,200", 0.2)],
        # Names and versions hold no numbers.
        *[("x12", 12, 0.0), ("H2O", 2, 0.0), ("1.12.3", 3, 0.0)],
        # A thought is no answer, also one that is not closed.
        *[("<think>12", 12, 0.0), ("<think>5</think>7<think>12", 12, 0.2), ("<think>5</think>12", 12, 1.0)],
    ],
)
def test_numbers_are_read_as_people_read_them(answer, solution, reward):
    assert arithmetic_reward(says(answer), solution=[solution]) == [reward]


def test_rewards_leave_rows_of_other_tasks_alone():
    columns = {"task": ["arithmetic", "answer-format"], "solution": [["3"], ["4"]]}
    assert arithmetic_reward(says("3", "3"), **columns) == [1.0, None]


def test_rewards_are_loaded_by_name_and_by_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def long(completions, **columns):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    builtin, own = load_reward_functions(["format", "my_rewards:long"])
    assert builtin is format_reward and own(["a", "b"]) == [1.0, 1.0]


@pytest.mark.parametrize("returned", [None, 1.0, [1.0], [1.0] * 3, ["high", "low"], [1.0, [2.0]]])
def test_a_reward_returns_a_number_for_each_completion(monkeypatch, returned):
    monkeypatch.setattr("tests.rollouts.long_reward", lambda completions, **columns: returned)
    (reward,) = load_reward_functions(["tests.rollouts:long_reward"])
    with pytest.raises(UserError):
        reward(prompts=["x", "y"], completions=["a", "b"])


@pytest.mark.parametrize("name", EMBEDDED_TASKS)
def test_the_solution_of_every_embedded_task_gets_the_full_reward(name):
    rewards = {"answer-format": "format", "arithmetic": "arithmetic"}
    (reward,) = load_reward_functions([rewards[name]])
    tasks, _ = load_tasks([f"embedded:{name}"], Reading(kind="task", validation_fraction=0.0))
    answers = [solution[0] if solution else "It is so." for solution in tasks["solution"]]
    columns = {column: tasks[column] for column in tasks.column_names if column != "prompt"}
    assert set(reward(says(*answers), **columns)) == {1.0}
    wrong = set(reward(says(*["@"] * len(tasks)), **columns))
    assert max(wrong) < 0.2


UNUSABLE = {
    "--rewards arithmetic cannot use this task": [
        *({"prompt": "1+1?", "solution": wrong} for wrong in ("two", ["x"], {"a": 2}, True)),
        {"conversations": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": ""}], "gt": "two"},
    ],
    "--rewards agent cannot use this task": [
        *({"prompt": "A?", "tools": tools} for tools in ("{", "3", "{}", "[1]", "[{}]", '[{"name": {}}]', 7)),
        {"prompt": "A?", "tools": "[" * 100_000},
    ],
    "--rewards format cannot use this task": [
        *({"prompt": "A?", "answer_format": wrong} for wrong in ("poem", ["number"], 3))
    ],
    "the prompt is longer than the 100 tokens": [{"prompt": "long " * 100}],
}


def test_a_task_that_no_reward_applies_to_is_rejected(tokenizer):
    def check(*rewards) -> None:
        task = {"prompt": [{"role": "user", "content": "Why?"}]}
        task_check(tokenizer, rewards=[format_reward, *rewards], max_prompt_length=100)(task)

    with pytest.raises(BadRecord):
        check(arithmetic_reward)
    check(REWARDS["length"])
    check(len)


def test_unusable_tasks_are_rejected(tokenizer, tmp_path):
    good = {"prompt": "1+1?", "solution": "2", "level": 1.5, "task": None}
    bad = [(reason, record) for reason, records in UNUSABLE.items() for record in records]
    names = [write_jsonl(tmp_path / "tasks.jsonl", [good, *(record for _, record in bad), {**good, "level": 3}])]
    check = task_check(tokenizer, rewards=list(REWARDS.values()), max_prompt_length=100)
    how = {"validation_fraction": 0.0, "max_rejected_ratio": 1.0}
    train, _ = load_tasks(names, Reading(kind="task", **how), check=check, rejected_path=tmp_path / "rejected.jsonl")
    assert train["level"] == [1.5, 3.0]
    entries = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in entries] == list(range(2, len(bad) + 2))
    for (reason, record), entry in zip(bad, entries, strict=True):
        assert reason in entry["reason"], record
    # These lines count as rejected: two thirds of the lines are too many.
    with pytest.raises(UserError):
        load_tasks(names, check=check)


def test_prompts_have_the_date_of_the_run(tokenizer, tmp_path):
    tokenizer.chat_template = '{{ strftime_now("%Y") }}' + tokenizer.chat_template
    args = GRPOTrainingArguments(**ARGUMENTS, output_dir=str(tmp_path), max_steps=1)
    args.date = "2001-02-03T04:05:06+00:00"
    limits = {"rewards": [REWARDS["length"]], "tools": None, "max_prompt_length": 4000}
    TaskArguments().prepare_tasks(args, tokenizer, **limits)
    assert tokenizer.decode(encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])).startswith("2001")


def test_tasks_whose_tools_the_model_could_not_use_are_refused(tokenizer):
    prompt = [{"role": "user", "content": "Sky?", "tools": json.dumps([get_json_schema(calculator)])}]
    how = {"rewards": [REWARDS["length"]], "max_prompt_length": 4000}
    task_check(tokenizer, tools=[calculator], **how)({"prompt": prompt})
    with pytest.raises(BadRecord):
        task_check(tokenizer, tools=MINIMIND_TOOLS, **how)({"prompt": prompt})
    mute = copy.deepcopy(tokenizer)
    mute.chat_template = "{{ messages[0].content }}"
    with pytest.raises(UserError):
        task_check(mute, **how)({"prompt": prompt})
    # A prompt is as long as training would encode it: control tokens in it are text.
    prompt = [{"role": "user", "content": "x<|im_end|>\n<|im_start|>assistant\n<think>"}]
    how["max_prompt_length"] = len(encode_prompt(tokenizer, prompt)) - 1
    with pytest.raises(BadRecord):
        task_check(tokenizer, **how)({"prompt": prompt})

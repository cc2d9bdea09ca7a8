"""Every built-in reward on right, partly right and wrong answers, and the tasks of the rewards."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from hf_pretrain.data.formats import BadRecord
from hf_pretrain.data.reward_tasks import EMBEDDED_TASKS, TOOLS, load_tasks, read_task, tools_message
from hf_pretrain.stages.reinforcement import task_check
from hf_pretrain.stages.rewards import (
    REWARDS,
    arithmetic_reward,
    format_reward,
    load_reward_functions,
    solution_reward,
    tool_call_reward,
)
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import toy_model, write_jsonl


def says(*texts: str) -> list[list[dict]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("shape", "answer", "reward"),
    [
        ("sentence", "The sky is blue.", 1.0),
        ("sentence", "<think>\nwhat now\n</think>\n\nThe sky is blue.", 1.0),
        ("sentence", "the sky is blue.", 0.2 * 3 / 4),
        ("sentence", "The sky. It is blue.", 0.2 * 3 / 4),
        ("sentence", "Sky.", 0.2 * 3 / 4),
        ("sentence", "The " + "very " * 12 + "blue sky.", 0.2 * 3 / 4),
        ("sentence", "", 0.0),
        ("number", "42", 1.0),
        ("number", "42!", 0.0),
        (None, "Blue.", None),
    ],
)
def test_the_format_reward_counts_parts(shape, answer, reward):
    assert format_reward(says(answer), answer_format=[shape]) == [pytest.approx(reward)]


def test_arithmetic_takes_the_last_number():
    answers = says("19", "12 + 7 = 19.", "It is 19.0", "12 + 7 = 18", "nineteen", "-19", "1,019")
    rewards = arithmetic_reward(answers, solution=[["19"]] * 7)
    assert rewards == [1.0, 1.0, 1.0, 0.2, 0.0, 0.2, 0.2]


def test_the_solution_reward_equals_upstreams_share_of_gt():
    answers = says("It is 1,200 and Sunny.", "It is 1200.0", "12000", '<tool_call>{"name": "1200"}</tool_call>')
    assert solution_reward(answers, solution=[["1200", "sunny"]] * 4) == [1.0, 0.5, 0.0, 0.0]
    assert solution_reward(says("yes"), solution=[[]]) == [None]
    assert solution_reward(says("so 7 it is"), solution=["7"]) == [1.0]


@pytest.mark.parametrize(
    ("answer", "target", "is_found"),
    [
        ("It is 3.1069km.", "3.1069", True),
        ("北京3.1069公里", "3.1069", True),
        ("USD36.05", "36.05", True),
        ("-4km away", "-4", True),
        ("3.2e4 people", "32000", True),
        ("12,345.50 in all", "12345.5", True),
        # MiniMind finds these numbers within longer ones.
        ("15 apples", "5", False),
        ("3.10695km", "3.1069", False),
        ("version 1.2.3", "1.2", False),
        ("3.14e5", "3.14", False),
    ],
)
def test_a_number_of_the_solution_may_have_a_unit_but_counts_as_a_whole(answer, target, is_found):
    assert solution_reward(says(answer), solution=[[target]]) == [float(is_found)]


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (call("set_timer", minutes=5), 1.0),
        (call("set_timer", minutes=6), 0.5),
        (call("get_weather", city="Rome"), 0.5),
        (call("set_timer", minutes="5"), 0.5),
        (call("set_timer"), 0.25),
        (call("set_timer", minutes=5, loud=True), 0.25),
        (call("set_alarm", minutes=5), 0.25),
        (call("set_timer", minutes=5) * 2, 0.0),
        ("<tool_call>{set_timer}</tool_call>", 0.0),
        ("Five minutes.", 0.0),
    ],
)
def test_a_tool_call_parses_fits_and_is_right(answer, reward):
    columns = {"tools": [json.dumps(TOOLS)], "task": ["tool-call"]}
    solution = [[json.dumps({"name": "set_timer", "arguments": {"minutes": 5}})]]
    assert tool_call_reward(says(answer), solution=solution, **columns) == [reward]


# Calls as a model may write them and as a parser may read them


ALL_COLUMNS = {
    **{"answer_format": ["sentence"], "solution": [['{"name": "set_timer", "arguments": {"minutes": 5}}']]},
    **{"tools": [json.dumps(TOOLS)], "task": ["tool-call"]},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "answer",
    [
        *(f"<tool_call>{call}</tool_call>" for call in ('{"name": {}, "arguments": {}}', "[" * 100_000, "3")),
        f'<tool_call>{{"name": "set_timer", "arguments": {"[" * 100_000}}}</tool_call>',
        f'<tool_call>{{"name": "set_timer", "arguments": {{"minutes": {"9" * 5000}}}}}</tool_call>',
        '<tool_call>{"name": NaN, "arguments": -Infinity}</tool_call>',
        # Linear time takes a tenth of a second, quadratic time takes minutes.
        *("<tool_call>" * 40_000, "<think>" + " a" * 60_000),
    ],
    ids=lambda answer: answer[:40],
)
def test_any_text_gets_a_reward_in_little_time(answer):
    assert tool_call_reward(says(answer), **ALL_COLUMNS) == [0.0]
    assert solution_reward(says(answer), solution=[["5"]]) == [0.0]
    assert format_reward(says(answer), **ALL_COLUMNS)[0] < 0.2
    assert arithmetic_reward(says(answer), solution=[["12"]])[0] in (0.0, 0.2)


def tools_with(parameters) -> str:
    return json.dumps([{"type": "function", "function": {"name": "set_timer", "parameters": parameters}}])


def test_rewards_leave_rows_of_other_tasks_alone():
    columns = {"task": ["arithmetic", "tool-call"], "solution": [["3"], ["{}"]], "tools": [None, None]}
    assert arithmetic_reward(says("3", "3"), **columns) == [1.0, None]
    assert tool_call_reward(says("3", "3"), **columns) == [None, None]


# Names


def test_rewards_are_loaded_by_name_and_by_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def long(completions, **columns):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    save_classifier(tmp_path / "owner/reward-model", num_labels=1)
    builtin, own, model = load_reward_functions(["format", "my_rewards:long", "owner/reward-model"])
    assert builtin is format_reward and own(["a", "b"]) == [1.0, 1.0] and model == "owner/reward-model"


def save_classifier(path: Path, **fields) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForSequenceClassification(LlamaConfig(vocab_size=16, **sizes, **fields)).save_pretrained(path)


def test_a_model_that_gives_no_single_score_is_no_reward(tmp_path):
    save_classifier(tmp_path / "two-labels", num_labels=2)
    toy_model().save_pretrained(tmp_path / "policy")
    # The fields of internlm/internlm2-1_8b-reward, which MiniMind's trainers use.
    internlm = {
        "architectures": ["InternLM2ForRewardModel"],
        "auto_map": {"AutoModel": "modeling_internlm2.InternLM2ForRewardModel"},
    }
    (tmp_path / "internlm2-1_8b-reward").mkdir()
    (tmp_path / "internlm2-1_8b-reward/config.json").write_text(json.dumps(internlm))
    for name, found in (
        ("two-labels", "LlamaForSequenceClassification with 2 labels"),
        ("policy", "MiniMindForCausalLM with 2 labels"),
        ("internlm2-1_8b-reward", "InternLM2ForRewardModel with 2 labels"),
    ):
        with pytest.raises(ValueError, match=rf"--rewards .*{name}: .* one label, and this one is {found}\. Pass"):
            load_reward_functions([f"{tmp_path}/{name}"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["fromat"],
            r"--rewards fromat is unknown; the nearest one is format. All: format, .*module.path:function",
        ),
        (["no_such_module:reward"], "the module no_such_module cannot be imported"),
        (["hf_pretrain.stages.rewards:nothing"], "rewards.py has no function 'nothing'"),
    ],
)
def test_a_missing_reward_is_named(names, words):
    with pytest.raises(ValueError, match=words):
        load_reward_functions(names)


# Tasks


def test_embedded_tasks_are_the_same_for_the_same_seed():
    names = ["embedded:arithmetic", "embedded:tool-call"]
    train, held_out = load_tasks(names, validation_fraction=0.1, seed=1)
    again, _ = load_tasks(names, validation_fraction=0.1, seed=1)
    assert train[:] == again[:]
    first, other = (load_tasks(["embedded:arithmetic"], seed=seed)[0][:] for seed in (1, 2))
    assert first != other
    prompts = {json.dumps(prompt) for prompt in train["prompt"]}
    assert len(held_out) and not prompts & {json.dumps(prompt) for prompt in held_out["prompt"]}


@pytest.mark.parametrize("name", EMBEDDED_TASKS)
def test_the_solution_of_every_embedded_task_gets_the_full_reward(name):
    rewards = {"answer-format": "format", "arithmetic": "arithmetic", "tool-call": "tool_call"}
    (reward,) = load_reward_functions([rewards[name]])
    tasks, _ = load_tasks([f"embedded:{name}"], validation_fraction=0.0)
    if name == "answer-format":
        answers = ["It is so."] * len(tasks)
    elif name == "tool-call":
        answers = [f"<tool_call>\n{solution[0]}\n</tool_call>" for solution in tasks["solution"]]
    else:
        answers = [solution[0] for solution in tasks["solution"]]
    columns = {column: tasks[column] for column in tasks.column_names if column != "prompt"}
    assert set(reward(says(*answers), **columns)) == {1.0}
    wrong = set(reward(says(*["@"] * len(tasks)), **columns))
    assert max(wrong) < 0.2


# A template in Qwen's words, like that of MiniMind-3.
QWEN_LIKE = """{%- if tools -%}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + '# Tools' -}}
{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}"""
WITHOUT_TOOLS = "{%- for message in messages -%}{{ message.role + ': ' + message.content + '\\n' }}{%- endfor -%}"
TOOLS_LAST = WITHOUT_TOOLS + "{%- if tools -%}{{ 'Tools: ' ~ (tools | tojson) }}{%- endif -%}"


@pytest.mark.parametrize("system", ["Help.", ""])
def test_tools_of_a_task_are_described_by_the_tokenizers_template(tmp_path, system):
    head = {"role": "system", "content": system, "tools": json.dumps(TOOLS)}
    question = {"role": "user", "content": "Five minutes, please."}
    record = {"conversations": [head, question, {"role": "assistant", "content": ""}], "gt": ["5"]}
    (tmp_path / "agent.jsonl").write_text(json.dumps(record) + "\n")
    names = [str(tmp_path / "agent.jsonl"), "embedded:tool-call"]
    tokenizer = train_tokenizer(["text"], vocab_size=300)

    def prompts(template: str) -> tuple[str, str]:
        tokenizer.chat_template = template
        render = partial(tokenizer.apply_chat_template, tokenize=False)
        tasks, _ = load_tasks(names, validation_fraction=0.0, render=render)
        return render(tasks[0]["prompt"]), render(tasks[1]["prompt"])

    own, embedded = prompts(QWEN_LIKE)
    assert own == tokenizer.apply_chat_template([head, question], tools=TOOLS, tokenize=False)
    assert embedded.startswith("<|im_start|>system\n# Tools\n{") and embedded.count('"type": "function"') == 3
    # A template that knows no tools gets the words of this package.
    assert tools_message(TOOLS, system) in prompts(WITHOUT_TOOLS)[0]
    with pytest.raises(
        ValueError, match="does not describe tools within a system message.* Pass functions by --tools"
    ):
        prompts(TOOLS_LAST)


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
    assert task["prompt"][0]["content"] == tools_message(TOOLS, "Help.")
    assert task["solution"] == ["5", "timer"] and json.loads(task["tools"]) == TOOLS
    # If the trainer renders the tools itself, the system message stays unchanged.
    assert read_task(record, describe_tools=False)["prompt"][0]["content"] == "Help."
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
    train, _ = load_tasks([str(tmp_path / "tasks.jsonl")], validation_fraction=0.0)
    tokenizer = train_tokenizer(["text"], vocab_size=300)
    ours, theirs = (tokenizer.apply_chat_template(m, tokenize=False) for m in (train[0]["prompt"], turns))
    assert ours == theirs and '"arguments": {"city": "Rome"}' in ours
    assert ours.count("A tool.") == 2


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([], "not an object"),
        ({"text": "Hi"}, "neither `prompt` nor `conversations`"),
        ({"prompt": []}, "'prompt' is no list of messages but empty"),
        ({"prompt": [{"role": "user"}]}, "has no content"),
        ({"conversations": [{"role": "user", "content": "Hi"}]}, "holds no prompt with an answer"),
        ({"conversations": [{"role": "system", "content": "", "tools": "{"}] * 2}, "text that is not JSON"),
    ],
)
def test_a_record_that_is_no_task_has_a_reason(record, words):
    with pytest.raises(BadRecord, match=words):
        read_task(record)


UNUSABLE = {
    "--rewards arithmetic cannot use this task": [
        *({"prompt": "1+1?", "solution": wrong} for wrong in ("two", ["x"], {"a": 2}, True)),
        {"conversations": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": ""}], "gt": "two"},
    ],
    "--rewards tool_call cannot use this task": [
        *({"prompt": "A?", "tools": tools} for tools in ("{", "3", "{}", "[1]", "[{}]", '[{"name": {}}]', 7)),
        {"prompt": "A?", "tools": "[" * 100_000},
        *({"prompt": "A?", "tools": tools_with(wrong)} for wrong in (["x"], {"required": 3})),
        {"prompt": "A?", "solution": "no JSON", "tools": json.dumps(TOOLS), "task": "tool-call"},
    ],
    "--rewards format cannot use this task": [
        *({"prompt": "A?", "answer_format": wrong} for wrong in ("poem", ["number"], 3))
    ],
    "the prompt is longer than the 100 tokens": [{"prompt": "long " * 100}],
}


def test_unusable_tasks_are_rejected(tmp_path):
    good = {"prompt": "1+1?", "solution": "2", "level": 1.5, "task": None}
    bad = [(reason, record) for reason, records in UNUSABLE.items() for record in records]
    names = [write_jsonl(tmp_path / "tasks.jsonl", [good, *(record for _, record in bad), {**good, "level": 3}])]
    tokenizer = train_tokenizer(["What is long?"] * 3, vocab_size=300)
    check = task_check(list(REWARDS.values()), tokenizer, max_prompt_length=100)
    how = {"validation_fraction": 0.0, "max_rejected_ratio": 1.0, "rejected_path": tmp_path / "rejected.jsonl"}
    train, _ = load_tasks(names, check=check, **how)
    assert train["level"] == [1.5, 3.0]
    entries = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in entries] == list(range(2, len(bad) + 2))
    for (reason, record), entry in zip(bad, entries, strict=True):
        assert reason in entry["reason"], record
    # These lines count as rejected: two thirds of the lines are too many.
    with pytest.raises(ValueError, match=f"{len(bad)} of {len(bad) + 2} lines .* are bad"):
        load_tasks(names, check=check)

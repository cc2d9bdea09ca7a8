"""Every built-in reward on right, partly right and wrong answers, and the tasks of the rewards."""

import json
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.utils import get_json_schema

from examples.agent_tools import TOOLS as FUNCTIONS
from hf_pretrain.data.formats import BadRecord
from hf_pretrain.data.reward_tasks import EMBEDDED_TASKS, load_tasks, read_task
from hf_pretrain.stages.reinforcement import GRPOTrainingArguments, MiniMindGRPOTrainer, task_check
from hf_pretrain.stages.rewards import (
    REWARDS,
    agent_reward,
    arithmetic_reward,
    check_task,
    format_reward,
    load_reward_functions,
)
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import toy_model, write_jsonl


TOOLS = [get_json_schema(function) for function in FUNCTIONS]


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


# MiniMind's rules, with the values of its `calculate_rewards` in train_grpo.py and train_agent.py (August 2026)

THOUGHT = "The question is about the sky, so colours."


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


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


WEATHER, MATH = call("get_current_weather", location="Paris"), call("calculate_math", expression="6*7")


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
    columns = {"tools": [json.dumps(TOOLS)], "solution": [["5"]]}
    assert agent_reward(says(answer), **columns)[0] <= 0.5 and REWARDS["repetition"](says(answer))[0] <= 0
    assert format_reward(says(answer), answer_format=["sentence"])[0] < 0.2
    assert arithmetic_reward(says(answer), solution=[["12"]])[0] in (0.0, 0.2)


def test_rewards_leave_rows_of_other_tasks_alone():
    columns = {"task": ["arithmetic", "answer-format"], "solution": [["3"], ["4"]]}
    assert arithmetic_reward(says("3", "3"), **columns) == [1.0, None]


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
    LlamaForSequenceClassification(LlamaConfig(**{"vocab_size": 16} | sizes | fields)).save_pretrained(path)


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
        ("two-labels", "one label.*, and this one is LlamaForSequenceClassification with 2 labels. Pass"),
        ("policy", "one label.*, and this one is MiniMindForCausalLM with 2 labels. Pass"),
        ("internlm2-1_8b-reward", "or --trust_remote_code true if its own code has get_score"),
    ):
        with pytest.raises(ValueError, match=rf"--rewards .*{name}.* {found}"):
            load_reward_functions([f"{tmp_path}/{name}"])


SCORER = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class ScorerConfig(PreTrainedConfig):
    model_type = "scorer"


class ScorerForRewardModel(PreTrainedModel):
    config_class = ScorerConfig
    _tied_weights_keys = ["v_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.v_head = nn.Linear(1, 1, bias=False)
        self.register_buffer("table", torch.arange(9.0), persistent=False)
        self.post_init()

    def get_score(self, tokenizer, chat):
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        assert torch.is_inference_mode_enabled() or not torch.is_grad_enabled()
        return self.v_head(self.table[-1:] * len(text)).item()
"""


def save_scorer(path: Path, tokenizer) -> None:
    """Save a reward model like internlm2-1_8b-reward: its code scores, and its constructor computes a table."""
    path.mkdir()
    (path / "modeling_scorer.py").write_text(SCORER)
    names = {"AutoConfig": "modeling_scorer.ScorerConfig", "AutoModel": "modeling_scorer.ScorerForRewardModel"}
    config = {"model_type": "scorer", "architectures": ["ScorerForRewardModel"], "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    save_file({"v_head.weight": torch.tensor([[0.002]])}, path / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(path)


def test_reward_models_score_by_their_own_code_or_as_classifiers(tmp_path):
    tokenizer = train_tokenizer(["text"], vocab_size=300)
    save_scorer(tmp_path / "scorer", tokenizer)
    save_classifier(tmp_path / "classifier", num_labels=1, vocab_size=300, pad_token_id=0)
    tokenizer.save_pretrained(tmp_path / "classifier")
    names = [f"{tmp_path}/scorer", f"{tmp_path}/classifier"]
    with pytest.raises(ValueError, match="or --trust_remote_code true"):
        load_reward_functions(names)
    rewards = load_reward_functions(names, trust_remote_code=True)
    prompt = [{"role": "user", "content": " Sky? ", "tools": None}]
    chat = [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]
    score = 8 * 0.002 * len(tokenizer.apply_chat_template(chat, tokenize=False))
    completions = ["Hm.</think> Blue. ", "long " * 200, call("set_timer")]
    assert rewards[0]([prompt] * 3, completions) == [pytest.approx(score), 3.0, None]
    trainer = MiniMindGRPOTrainer(
        toy_model(vocab_size=300),
        args=GRPOTrainingArguments(
            output_dir=str(tmp_path / "run"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            max_steps=1,
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=4,
            logging_steps=1,
            save_strategy="no",
            eval_strategy="no",
        ),  # fmt: skip
        reward_funcs=rewards,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 2),
        processing_class=tokenizer,
    )
    trainer.train()
    assert {"rewards/scorer/mean", "rewards/classifier/mean"} <= trainer.state.log_history[0].keys()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["fromat"],
            r"--rewards fromat is unknown; the nearest one is format. All: format, .*module.path:function",
        ),
        (["no_such_module:reward"], "the module no_such_module cannot be imported"),
        (["hf_pretrain.stages.rewards:nothing"], "hf_pretrain.stages.rewards has no function 'nothing'"),
        # A module without a file.
        (["sys:nothing"], "sys has no function 'nothing'"),
    ],
)
def test_a_missing_reward_is_named(names, words):
    with pytest.raises(ValueError, match=words):
        load_reward_functions(names)


# Tasks


def test_embedded_tasks_are_the_same_for_the_same_seed():
    names = ["embedded:arithmetic"]
    train, held_out = load_tasks(names, validation_fraction=0.1, seed=1)
    again, _ = load_tasks(names, validation_fraction=0.1, seed=1)
    assert train[:] == again[:]
    first, other = (load_tasks(["embedded:arithmetic"], seed=seed)[0][:] for seed in (1, 2))
    assert first != other
    prompts = {json.dumps(prompt) for prompt in train["prompt"]}
    assert len(held_out) and not prompts & {json.dumps(prompt) for prompt in held_out["prompt"]}


@pytest.mark.parametrize("name", EMBEDDED_TASKS)
def test_the_solution_of_every_embedded_task_gets_the_full_reward(name):
    rewards = {"answer-format": "format", "arithmetic": "arithmetic"}
    (reward,) = load_reward_functions([rewards[name]])
    tasks, _ = load_tasks([f"embedded:{name}"], validation_fraction=0.0)
    if name == "answer-format":
        answers = ["It is so."] * len(tasks)
    else:
        answers = [solution[0] for solution in tasks["solution"]]
    columns = {column: tasks[column] for column in tasks.column_names if column != "prompt"}
    assert set(reward(says(*answers), **columns)) == {1.0}
    wrong = set(reward(says(*["@"] * len(tasks)), **columns))
    assert max(wrong) < 0.2


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
    "--rewards agent cannot use this task": [
        *({"prompt": "A?", "tools": tools} for tools in ("{", "3", "{}", "[1]", "[{}]", '[{"name": {}}]', 7)),
        {"prompt": "A?", "tools": "[" * 100_000},
    ],
    "--rewards format cannot use this task": [
        *({"prompt": "A?", "answer_format": wrong} for wrong in ("poem", ["number"], 3))
    ],
    "the prompt is longer than the 100 tokens": [{"prompt": "long " * 100}],
}


def test_a_task_that_no_reward_applies_to_is_rejected():
    task = {"prompt": [{"role": "user", "content": "Why?"}]}
    with pytest.raises(BadRecord, match="--rewards format arithmetic gives no score"):
        check_task([REWARDS["format"], REWARDS["arithmetic"]], task)
    check_task([REWARDS["format"], REWARDS["length"]], task)
    check_task([REWARDS["format"], len], task)


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


def test_bad_lines_count_over_all_names(tmp_path):
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "1+1?"}, {}])
    good = write_jsonl(tmp_path / "good.jsonl", [{"prompt": f"{number}?"} for number in range(8)])
    for names in ([good, bad], [bad, good]):
        assert len(load_tasks(names, validation_fraction=0.0, max_rejected_ratio=0.1)[0]) == 9
        with pytest.raises(ValueError, match="1 of 10 lines"):
            load_tasks(names, validation_fraction=0.0, max_rejected_ratio=0.09)

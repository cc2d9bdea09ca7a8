"""Tasks of lm-eval with data from a Hub: data of a loopback Hub, no Hub at all, and what a chat model is asked."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from lm_eval.tasks import TaskManager
from trl.chat_template_utils import smolvlm_chat_template

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.evaluation.evaluation import GROUPS
from hf_pretrain.evaluation.lm_eval_tasks import evaluate_tasks
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from tests.evaluation.conftest import EXAMPLES
from tests.evaluation.test_evaluation import evaluate
from tests.hub_server import HubServer, Repo
from tests.invariants.launching import ROOT, cpu_environment
from tests.toys import write_jsonl


# Records in the form of the real datasets.
ARC = [
    {"question": "weather in", "choices": {"text": ["Oslo", "four"], "label": ["A", "B"]}, "answerKey": "A"},
    {"question": "two and", "choices": {"text": ["Oslo", "two"], "label": ["1", "2"]}, "answerKey": "2"},
    {"question": "hello", "choices": {"text": ["YOU", "capitals"], "label": ["A", "B"]}, "answerKey": "B"},
]
PIQA = [
    {"goal": "two and two?", "sol1": "It is four.", "sol2": "It rains in Oslo, and it is four again.", "label": 1},
    {"goal": "weather in Oslo?", "sol1": "HELLO AGAIN", "sol2": "It rains in Oslo.", "label": 1},
]
ARC_CARD = "---\nconfigs:\n- config_name: ARC-Easy\n  data_files:\n"


def parquet(records: list[dict]) -> bytes:
    buffer = io.BytesIO()
    Dataset.from_list(records).to_parquet(buffer)
    return buffer.getvalue()


@pytest.fixture
def hub(tmp_path):
    """A Hub with two of the datasets, laid out as on the real Hub."""
    with HubServer() as server:
        splits = ("train", "validation", "test")
        names = {split: f"ARC-Easy/{split}-00000-of-00001.parquet" for split in splits}
        card = ARC_CARD + "".join(f"  - split: {split}\n    path: ARC-Easy/{split}-*\n" for split in splits) + "---\n"
        for repo_id, files in {
            "allenai/ai2_arc": {"README.md": card.encode(), **{name: parquet(ARC) for name in names.values()}},
            "baber/piqa": {f"data/{split}-00000-of-00001.parquet": parquet(PIQA) for split in splits[:2]},
        }.items():
            server.repos[repo_id] = Repo(private=False)
            server.repos[repo_id].commit("all", files)
        yield server


@pytest.mark.slow
def test_examples_of_tasks_are_removed_from_training_data(hub, tmp_path):
    question = "Which of these towns has a harbour, an opera and many days of rain in autumn?"
    test = {"ARC-Easy/test-00000-of-00001.parquet": parquet([ARC[0] | {"question": question}])}
    hub.repos["allenai/ai2_arc"].commit("a longer question", dict(hub.repos["allenai/ai2_arc"].files) | test)
    kept = "A sentence about something else, which no task asks about, and which is long enough."
    data = write_jsonl(tmp_path / "raw.jsonl", [kept, f"An exam. {question} Answer: Oslo.", PIQA[0]["sol2"]])
    words = [sys.executable, str(ROOT / "recipes/data.py"), "clean", data, "--output", str(tmp_path / "clean.jsonl")]
    environment = cpu_environment(**hub.client_environment() | {"HF_HOME": str(tmp_path / "home")})
    result = subprocess.run(
        [*words, "--held_out_tasks", "arc_easy,piqa"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    # The short solution of PIQA equals a record.
    assert "3 records read, 1 kept, 2 dropped" in result.stdout and re.search(
        " 2 +in the held-out data", result.stdout
    )
    assert [json.loads(line)["text"] for line in (tmp_path / "clean.jsonl").read_text().splitlines()] == [kept]


@pytest.mark.slow
def test_every_task_of_the_groups_exists():
    known = TaskManager().all_tasks
    assert {task for group in GROUPS.values() for task in group} <= set(known)


@pytest.mark.parametrize(("is_chat", "in_parts"), [(True, False), (True, True), (False, False)])
def test_only_a_chat_model_is_asked_in_its_template(is_chat, in_parts, talker, tasks):
    model, tokenizer = MiniMindForCausalLM.from_pretrained(talker).eval(), load_tokenizer(talker)
    if in_parts:
        tokenizer.chat_template = smolvlm_chat_template
    seen: list[list[int]] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.extend(args[0].tolist()), with_kwargs=True)
    evaluate_tasks(model, tokenizer, ["toy_choice"], include_path=[str(tasks)], batch_size=1, is_chat=is_chat)
    for example in EXAMPLES:
        question = example["question"]
        message = {"role": "user", "content": [{"type": "text", "text": question}] if in_parts else question}
        chat = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)["input_ids"]
        plain = [tokenizer.bos_token_id, *tokenizer(question, add_special_tokens=False).input_ids]
        for choice in example["choices"]:
            # The model does not read the last token, which it has to predict.
            rest = tokenizer(choice if is_chat else f" {choice}", add_special_tokens=False).input_ids[:-1]
            assert [*(chat if is_chat else plain), *rest] in seen, tokenizer.decode(seen[0])


@pytest.mark.slow
def test_a_model_that_was_trained_on_conversations_is_a_chat_model(talker, tasks, tmp_path):
    model = MiniMindForCausalLM.from_pretrained(talker)
    # Training on conversations turns sampling on.
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "chat")
    load_tokenizer(talker).save_pretrained(tmp_path / "chat")
    arguments = ["--model_name_or_path", str(tmp_path / "chat"), "--validation_fraction", "0", "--tasks", "toy_choice"]
    result = evaluate("python", *arguments, "--include_path", str(tasks))
    assert result.returncode == 0, result.stdout[-3000:]
    assert json.loads(Path(tmp_path, "chat/evaluation.json").read_text())["apply_chat_template"] is True

"""No name of a directory of this machine leaves it, in any file of any push."""

import sys
from pathlib import Path

import pytest

from tests.invariants.launching import ROOT, start
from tests.toys import write_jsonl


SECRET = "secret-customer"


@pytest.mark.slow
def test_no_directory_leaves_the_machine(toys, hub, tmp_path):
    """With an adapter, a teacher, a tokenizer, a reward model, weighted and own validation data, and checkpoints."""
    home = tmp_path / SECRET
    home.mkdir()
    for name in ("toy", "MyTeacher-v2"):
        (home / name).symlink_to(toys / "dense")
    chats = [{"prompt": f"{n}?", "completion": "It is " + "so " * (n % 5)} for n in range(60)]
    names = [write_jsonl(home / f"{name}.jsonl", chats[first::3]) for first, name in enumerate(["a", "b", "own"])]
    common = "--bf16 false --max_steps 2 --save_steps 1 --logging_steps 1 --max_length 64 --report_to none".split()
    common += "--push_to_hub --hub_strategy checkpoint --load_best_model_at_end true".split()
    common += ["--eval_strategy", "steps", "--eval_steps", "1", "--dataset_weights", "3", "1"]
    common += ["--dataset_name", *names[:2], "--eval_dataset_name", names[2]]
    common += ["--model_name_or_path", str(home / "toy"), "--tokenizer_name_or_path", str(home / "toy")]
    runs = {"sft": ["--use_peft"], "distill": ["--teacher_name_or_path", str(home / "MyTeacher-v2")]}
    environment = hub.client_environment()
    for recipe, words in runs.items():
        words += ["--hub_model_id", recipe, "--output_dir", str(home / f"run-{recipe}")]
        result = start([sys.executable, str(ROOT / f"recipes/{recipe}.py"), *common, *words], **environment)
        assert result.returncode == 0, result.stdout[-4000:]
    convert = ["--from", str(home / "run-sft"), "--to", str(home / "merged"), "--push", "--hub_model_id", "merged"]
    result = start([sys.executable, str(ROOT / "recipes/convert.py"), *convert], **environment)
    assert result.returncode == 0, result.stdout[-4000:]
    card = hub.repos["user/sft"].files["README.md"].decode()
    leaks = {
        f"{name}/{path}"
        for name, repo in hub.repos.items()
        for path, content in repo.files.items()
        if any(word.encode() in content for word in (SECRET, str(Path.home())))
    }
    assert not leaks and SECRET.encode() not in hub.bytes_received()
    taught = hub.repos["user/distill"].files["README.md"].decode()
    assert "a pass reads a.jsonl" in card and "from the weights of `toy`" in card
    assert "Distillation from MyTeacher-v2, from" in taught

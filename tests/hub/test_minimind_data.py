"""The commands of docs/minimind-data.md, rehearsed on small files of the same form over HTTP."""

import json
import shlex

import pytest

import hf_pretrain_cli
from tests.hub_server import Repo
from tests.invariants.launching import start
from tests.test_readme import code_blocks


ANIMALS = ("cat", "dog", "horse", "crow", "fish", "goat")
TOY = dict.fromkeys(("sft", "dpo"), "--max_length 64")
TOY |= {"pretrain": "--config_overrides num_hidden_layers=1 --vocab_size 320 --gradient_accumulation_steps 1"}
SHARED = (
    "--validation_fraction 0.1 --max_steps 2 --per_device_train_batch_size 2 --use_cpu --bf16 false --report_to none"
)


def files() -> dict[str, bytes]:
    """Return files with the names and the fields of MiniMind's, as different as those."""
    texts = [f"the {animal} walks under the bridge number {number}" for animal in ANIMALS for number in range(10)]

    def chat(question: str, answer: str) -> list[dict]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    records = {
        "pretrain_t2t_mini.jsonl": [{"text": text} for text in texts],
        "sft_t2t_mini.jsonl": [{"conversations": chat(f"who walks? {text}", text)} for text in texts],
        "dpo.jsonl": [{"chosen": chat("who?", text), "rejected": chat("who?", text.split()[1])} for text in texts],
    }
    files = {name: "".join(json.dumps(line) + "\n" for line in lines).encode() for name, lines in records.items()}
    return files | {"README.md": b"# data"}


@pytest.mark.documents
@pytest.mark.slow
def test_the_stages_of_the_page_follow_each_other(hub, tmp_path, monkeypatch):
    # Paths in a command are relative to the working directory.
    monkeypatch.chdir(tmp_path)
    (block, *_) = code_blocks("docs/minimind-data.md", "bash")
    commands = [shlex.split(line)[1:] for line in block.splitlines()]
    stages = [words for words in commands if words[0] in TOY]
    assert [words[0] for words in stages] == ["pretrain", "sft", "dpo"]
    hub.repos["jingyaogong/minimind_dataset"] = Repo(private=False)
    hub.repos["jingyaogong/minimind_dataset"].commit("all", files())
    for words in stages:
        _, command = hf_pretrain_cli.make_command(words[0], [*words[1:], *f"{TOY[words[0]]} {SHARED}".split()])
        result = start(command, cwd=tmp_path, **hub.client_environment())
        assert result.returncode == 0, result.stdout[-3000:]
    for stage in ("pretrain", "sft", "dpo"):
        (launch,) = json.loads((tmp_path / f"out/{stage}-minimind3/run.json").read_text())
        assert launch["steps"] == 2 and "jingyaogong/minimind_dataset:" in launch["data"]["names"][0]
        assert (tmp_path / f"out/{stage}-minimind3/report.html").is_file()

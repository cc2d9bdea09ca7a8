"""The example that trains with trainers of TRL which no recipe here has."""

import sys

import pytest
import torch

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from tests.invariants.launching import start
from tests.talking import SUM
from tests.toys import write_jsonl


def margin(directory, pairs: list[dict]) -> float:
    """Return how much more likely the chosen answers are than the rejected ones, in nats per pair."""
    model, tokenizer, total = MiniMindForCausalLM.from_pretrained(directory), load_tokenizer(str(directory)), 0.0
    for pair in pairs:
        for sign, name in ((1, "chosen"), (-1, "rejected")):
            text = tokenizer.apply_chat_template([*pair["prompt"], *pair[name]], tokenize=False)
            ids = tokenizer(text, return_tensors="pt").input_ids
            with torch.no_grad():
                total -= sign * model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    return total / len(pairs)


@pytest.mark.parametrize("method", ["kto", "orpo"])
def test_a_checkpoint_learns_to_prefer(talker, tmp_path, method):
    answers = ["It is four.", "It is a river.", "I do not know it.", "We are two."]
    pairs = [
        {
            "prompt": SUM[:1],
            # The model's own answers are rejected: this needs no luck, whatever else it has learned.
            "chosen": [{"role": "assistant", "content": answer[::-1]}],
            "rejected": [{"role": "assistant", "content": answer}],
        }
        for answer in answers
    ]
    path = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    words = ["--model", str(talker), "--data", path, "--output_dir", str(tmp_path / "out"), "--max_steps", "8"]
    words += ["--learning_rate", "1e-3", "--report_to", "none", "--save_strategy", "no"]
    result = start([sys.executable, "-m", "examples.kto_orpo", method, *words])
    assert result.returncode == 0, result.stdout[-3000:]
    before, after = margin(talker, pairs), margin(tmp_path / "out", pairs)
    assert after > before + 1

"""Reward models: TRL's loss written out, the texts that GRPO scores, and a run whose result GRPO takes."""

import json
import sys

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_pretrain.data.conversations import read_preference
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.reward_training import MiniMindRewardTrainer, RewardTrainingArguments, make_reward_model
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT, start
from tests.toys import toy_model, write_jsonl


RECORDS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in [("two", "four", "five five"), ("one", "is one", "no"), ("three", "six", "a b c")]
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four five six and no is"] * 4, vocab_size=320)


def test_the_loss_is_that_of_the_formula_and_the_texts_are_those_of_grpo(tokenizer, tmp_path):
    set_template(tokenizer)
    documents = Dataset.from_dict({"text": [read_preference(record) for record in RECORDS]})
    pairs, report = prepare_pairs(documents, tokenizer, max_length=64, are_whole=True)
    for record, pair in zip(RECORDS, pairs, strict=True):
        for name in ("chosen", "rejected"):
            messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record[name]}]
            assert pair[f"{name}_ids"] == tokenizer.apply_chat_template(messages)["input_ids"]
    model = make_reward_model(toy_model(vocab_size=320, pad_token_id=tokenizer.pad_token_id))
    options = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1, "learning_rate": 0.01}
    args = RewardTrainingArguments(
        str(tmp_path), eval_strategy="no", save_strategy="no", warmup_steps=0, per_device_train_batch_size=3, **options
    )
    trainer = MiniMindRewardTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer)
    margins = []
    for pair in pairs:
        # The head reads the state of the last token.
        states = (model.model(torch.tensor([pair[f"{name}_ids"]]))[0][0, -1] for name in ("chosen", "rejected"))
        chosen, rejected = (model.score(state) for state in states)
        margins.append(chosen - rejected)
    expected = -torch.nn.functional.logsigmoid(torch.cat(margins)).mean()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer.train()
    losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    assert losses == pytest.approx([expected.item()], abs=1e-6)
    assert all((weight != before[name]).any() for name, weight in model.named_parameters())
    # A longer pair is left out.
    lengths = [max(len(pair["chosen_ids"]), len(pair["rejected_ids"])) for pair in pairs]
    kept, _ = prepare_pairs(documents, tokenizer, max_length=sorted(lengths)[1], are_whole=True)
    assert len(kept) == sum(length <= sorted(lengths)[1] for length in lengths) < 3


@pytest.mark.parametrize("name", ["fsdp_size", "tp_size"])
def test_a_sharded_reward_model_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=f"--{name}.* shard no reward models"):
        RewardTrainingArguments(str(tmp_path), use_cpu=True, **{name: 2})


@pytest.mark.slow
def test_grpo_takes_a_trained_reward_model(tokenizer, tmp_path):
    toy_model(vocab_size=320, max_position_embeddings=256).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    pairs = write_jsonl(
        tmp_path / "pairs.jsonl", [{**record, "prompt": f"{n}"} for n in range(20) for record in RECORDS]
    )
    tasks = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": f"one {n}"} for n in range(8)])
    common = ["--use_cpu", "--bf16", "false", "--model_name_or_path", str(tmp_path / "toy"), "--report_to", "none"]
    common += ["--validation_fraction", "0.2", "--max_steps"]
    judge = ["20", "--dataset_name", pairs, "--learning_rate", "1e-2", "--output_dir", str(tmp_path / "judge")]
    result = start([sys.executable, str(ROOT / "recipes/reward.py"), *common, *judge])
    assert result.returncode == 0, result.stdout[-3000:]
    assert f"hf-pretrain grpo --rewards {tmp_path}/judge --model_name_or_path {tmp_path}/toy" in result.stdout
    policy = ["1", "--dataset_name", tasks, "--rewards", str(tmp_path / "judge"), "--num_generations", "2"]
    policy += ["--per_device_train_batch_size", "4", "--max_completion_length", "4", "--logging_steps", "1"]
    policy += ["--log_completions", "true", "--output_dir", str(tmp_path / "grpo")]
    result = start([sys.executable, str(ROOT / "recipes/grpo.py"), *common, *policy])
    assert result.returncode == 0, result.stdout[-3000:]
    history = json.loads((tmp_path / "grpo/trainer_state.json").read_text())["log_history"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "judge")
    texts = [[{"role": "user", "content": "9"}, {"role": "assistant", "content": text}] for text in ("six", "a b c")]
    scores = [
        model(**loaded.apply_chat_template(text, return_dict=True, return_tensors="pt")).logits for text in texts
    ]
    assert scores[0] > scores[1] and any("reward" in entry for entry in history)

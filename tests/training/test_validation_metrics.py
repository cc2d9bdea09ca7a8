"""Validation metrics and their timing, compared with values computed here, through the real Trainer."""

import json
import math
from itertools import count

import datasets
import pytest
import torch
from transformers import TrainerCallback

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.recipe import train_and_evaluate
from hf_pretrain.training.training_arguments import LMTrainingArguments
from recipes import grpo, pretrain
from tests.toys import toy_model, write_jsonl
from tests.training import test_masked_loss_trainer as masked_loss


TEXTS = [f"a river under {number} green stones walks by night" for number in range(24)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=310)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("toy")
    toy_model(vocab_size=310).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def make_rows(tokenizer) -> list[dict]:
    """Return rows of one document each, with weights of 0, 0.5, 1 and 2 in turn."""
    weights = (0.5 * 2**number if number else 0.0 for number in map(lambda n: n % 4, count()))
    rows = []
    for text in TEXTS:
        ids = [tokenizer.bos_token_id, *tokenizer(text).input_ids, tokenizer.eos_token_id]
        rows.append({"input_ids": ids, "seq_lengths": [len(ids)], "loss_mask": [next(weights) for _ in ids]})
    return rows


def make_trainer(tmp_path, tokenizer, rows, **arguments) -> MaskedLossTrainer:
    options = {"model": toy_model(vocab_size=310), "processing_class": tokenizer}
    arguments = {"eval_strategy": "steps", "learning_rate": 1e-2} | arguments
    return masked_loss.make_trainer(tmp_path, rows, arguments=arguments, **options)


def test_bits_per_byte_by_hand(tmp_path, tokenizer):
    rows = make_rows(tokenizer)
    trainer = make_trainer(tmp_path, tokenizer, rows, eval_strategy="no")
    bits = num_bytes = 0.0
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        with torch.no_grad():
            log2_probabilities = toy_model(vocab_size=310)(ids[None]).logits[0].double().log_softmax(-1) / math.log(2)
        for place in range(1, len(ids)):
            weight = row["loss_mask"][place]
            bits -= weight * log2_probabilities[place - 1, ids[place]].item()
            num_bytes += weight * len(tokenizer.decode([ids[place]], skip_special_tokens=True).encode())
    assert trainer.evaluate()["eval_bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-5)


def test_a_stream_has_another_order_in_each_epoch(tmp_path, tokenizer):
    numbered = [{"input_ids": [1, 40 + number, 2], "seq_lengths": [3]} for number in range(24)]
    seen: list[int] = []

    def collate(features):
        seen.extend(feature["input_ids"][1] - 40 for feature in features)
        return DataCollatorForPackedRows(0)(features)

    def stream():
        rows = datasets.Dataset.from_list(numbered).to_iterable_dataset()
        return rows.shuffle(seed=7, buffer_size=24)

    trainer = make_trainer(tmp_path, tokenizer, stream(), eval_strategy="no")
    trainer.data_collator = collate
    trainer.train()
    expected = []
    for epoch in range(2):
        rows = stream()
        rows.set_epoch(epoch)
        expected.append([row["input_ids"][1] - 40 for row in rows])
    assert expected[0] != expected[1]
    assert [seen[:24], seen[24:48]] == expected


class Spoiler(TrainerCallback):
    """Make the last step the worst."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == state.max_steps:
            model.model.norm.weight.data.mul_(-3)


@pytest.mark.parametrize("metric", ["bits_per_byte", "eval_perplexity", "loss"])
def test_the_lowest_is_the_best(tmp_path, tokenizer, metric):
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": metric, "save_total_limit": 2}
    trainer = make_trainer(tmp_path, tokenizer, make_rows(tokenizer), max_steps=4, **often, **best)
    trainer.add_callback(Spoiler())
    metrics = train_and_evaluate(trainer, checkpoint=None)[0]
    name = f"eval_{metric.removeprefix('eval_')}"
    measured = {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
    assert trainer.state.best_global_step == min(measured, key=measured.get) == 3
    assert metrics[name] == pytest.approx(min(measured.values()), rel=1e-6)


def test_metric_for_best_model_may_be_chosen(tmp_path):
    def is_greater(metric, **given):
        return LMTrainingArguments(output_dir=str(tmp_path), metric_for_best_model=metric, **given).greater_is_better

    assert not is_greater("eval_kl") and not is_greater("kl") and not is_greater("eval_loss")
    assert is_greater("accuracy") and is_greater("kl", greater_is_better=True)


class Counter(TrainerCallback):
    def __init__(self):
        self.steps: list[int] = []

    def on_evaluate(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_steps": 20}, [20]),
        ({"max_steps": 60}, [50, 60]),
        ({"max_steps": 4, "eval_steps": 2}, [2, 4]),
        ({"max_steps": 4, "eval_steps": 0.5}, [2, 4]),
        ({"max_steps": 3, "eval_strategy": "no"}, [3]),
    ],
)
def test_evaluations_are_spaced_and_the_last_one_counts(tmp_path, tokenizer, arguments, steps):
    trainer = make_trainer(tmp_path, tokenizer, make_rows(tokenizer)[:8], **arguments)
    counter = Counter()
    trainer.add_callback(counter)
    metrics = train_and_evaluate(trainer, checkpoint=None)[0]
    assert counter.steps == steps
    assert metrics["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
    assert metrics.keys() >= {"eval_perplexity", "eval_bits_per_byte"} and "step" not in metrics


@pytest.mark.parametrize("recipe", [pretrain, grpo])
def test_without_validation_data_nothing_is_evaluated(tmp_path, checkpoint, monkeypatch, recipe):
    words = [
        *("--model_name_or_path", checkpoint, "--output_dir", str(tmp_path / "run"), "--validation_fraction", "0"),
        *("--eval_on_start", "true", "--load_best_model_at_end", "true", "--max_steps", "2", "--save_steps", "1"),
        *("--eval_steps", "1", "--use_cpu", "--bf16", "false", "--disable_tqdm", "true", "--report_to", "none"),
    ]
    monkeypatch.setattr("sys.argv", ["recipes/some.py", *words])
    if recipe is pretrain:
        words += ["--dataset_name", write_jsonl(tmp_path / "train.jsonl", TEXTS), "--max_length", "32"]
        words += ["--per_device_train_batch_size", "4"]
    else:
        words += ["--dataset_name", "embedded:arithmetic", "--rewards", "arithmetic", "--num_generations", "2"]
        words += ["--per_device_train_batch_size", "2", "--max_completion_length", "3"]
    recipe.main(*parse_args(*recipe.ARGUMENTS, argv=words))
    history = json.loads((tmp_path / "run/trainer_state.json").read_text())["log_history"]
    assert history and not any(key.startswith("eval_") for entry in history for key in entry)

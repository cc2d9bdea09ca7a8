"""Validation metrics and their timing, compared with values computed here, through the real Trainer."""

import math
from itertools import cycle

import pytest
import torch
from transformers import TrainerCallback

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.run import train_and_evaluate
from tests import trainers as masked_loss
from tests.toys import toy_model


TEXTS = [f"a river under {number} green stones walks by night" for number in range(24)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=310)


def make_rows(tokenizer) -> list[dict]:
    """Return rows of one document each, with weights of 0, 1, 2 and 4 in turn."""
    weights = cycle((0.0, 1.0, 2.0, 4.0))
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


class Spoiler(TrainerCallback):
    """Make the last step the worst."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == state.max_steps:
            model.model.norm.weight.data.mul_(-3)


def test_the_lowest_is_the_best(tmp_path, tokenizer):
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "bits_per_byte", "save_total_limit": 2}
    trainer = make_trainer(tmp_path, tokenizer, make_rows(tokenizer), max_steps=4, **often, **best)
    trainer.add_callback(Spoiler())
    metrics = train_and_evaluate(trainer, checkpoint=None)[0]
    name = "eval_bits_per_byte"
    measured = {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
    assert trainer.state.best_global_step == min(measured, key=measured.get) == 3
    assert metrics[name] == pytest.approx(min(measured.values()), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        *(({"max_steps": 20}, [20]), ({"max_steps": 60}, [50, 60]), ({"max_steps": 3, "eval_strategy": "no"}, [3])),
        *(({"max_steps": 4, "eval_steps": interval}, [2, 4]) for interval in (2, 0.5)),
    ],
)
def test_evaluations_are_spaced_and_the_last_one_counts(tmp_path, tokenizer, arguments, steps):
    trainer = make_trainer(tmp_path, tokenizer, make_rows(tokenizer)[:8], **arguments)
    metrics = train_and_evaluate(trainer, checkpoint=None)[0]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == steps
    assert metrics["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
    assert metrics.keys() >= {"eval_perplexity", "eval_bits_per_byte"} and "step" not in metrics

"""The head for log-probabilities on a CPU, compared with TRL's."""

import copy

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from trl.trainer.utils import add_fused_lm_head

from hf_pretrain.model import loss as loss_module
from hf_pretrain.stages import log_probs
from hf_pretrain.stages.dpo import DPOTrainingArguments, MiniMindDPOTrainer
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.models import assert_near, gradients
from tests.rollouts import toy_trainer
from tests.toys import toy_model
from tests.trainers import ARGUMENTS


FIGURES = tuple(log_probs.FIGURES)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_has_the_figures_and_gradients_of_trl(temperature, monkeypatch):
    monkeypatch.setattr(log_probs, "MIN_CHUNK", 4)
    monkeypatch.setattr(log_probs, "MAX_LOGITS", loss_module.MAX_LOGITS[:1] + (0,))
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (3, 12))
    # Prompts of 5 tokens, padding, and a row without a label.
    labels = ids.clone()
    labels[:, :5], labels[0, 9:], labels[2] = -100, -100, -100
    weights = torch.rand(2, *ids[:, 1:].shape)
    twin = toy_model(vocab_size=64)
    model = copy.deepcopy(twin)
    for each in (model, twin):
        add_fused_lm_head(each, temperature=temperature, outputs=FIGURES)
    log_probs.replace_head(model, accelerator=Accelerator(), temperature=temperature, figures=FIGURES)
    found = []
    for each in (model, twin):
        outputs = each(ids, labels=labels, fused_lm_head=True)
        (outputs.log_probs * weights[0] + outputs.entropy * weights[1]).sum().backward()
        found.append((outputs, gradients(each)))
    for name in FIGURES:
        ours, theirs = (outputs[name] for outputs, _ in found)
        assert ours.requires_grad == theirs.requires_grad == (name in ("log_probs", "entropy"))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (found[0][0].log_probs != 0).sum() == (labels[:, 1:] != -100).sum() == 11
    assert_near(*(gradient for _, gradient in found), 1e-5)
    # Without the flag, the model has its own forward pass, which generation uses.
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=0, atol=0)


def test_a_batch_without_labels_has_zero_gradients():
    model, ids = toy_model(vocab_size=64), torch.randint(3, 64, (2, 6))
    log_probs.replace_head(model, accelerator=Accelerator(), temperature=1.0, figures=("log_probs",))
    outputs = model(ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    outputs.log_probs.sum().backward()
    assert outputs.log_probs.shape == (2, 5) and not gradients(model).any()


@pytest.fixture
def calls(monkeypatch) -> list[tuple[float, tuple[str, ...]]]:
    """Return a list that gets the temperature and the figures of each call of the head."""
    calls, score_labels = [], log_probs.score_labels

    def counted(*args, temperature, figures):
        calls.append((temperature, tuple(figures)))
        return score_labels(*args, temperature=temperature, figures=figures)

    monkeypatch.setattr(log_probs, "score_labels", counted)
    return calls


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_reinforcement_learning_asks_this_head_at_its_temperature(tokenizer, tmp_path, calls, algorithm):
    toy_trainer(tokenizer, tmp_path, algorithm=algorithm, beta=0.1, temperature=0.7, max_steps=1).train()
    assert {*calls} >= {(0.7, ("log_probs",)), (0.7, ("log_probs", "entropy"))}
    assert {temperature for temperature, _ in calls} == {0.7}


def test_preference_training_asks_this_head_for_both_models(tmp_path, calls):
    tokenizer = train_tokenizer(["one two three"] * 4, vocab_size=320)
    rows = {"prompt_ids": [[5, 6]] * 8, "chosen_ids": [[7, 8]] * 8, "rejected_ids": [[9]] * 8}
    args = DPOTrainingArguments(output_dir=str(tmp_path), max_steps=1, **ARGUMENTS)
    model = toy_model(vocab_size=320)
    data = {"train_dataset": Dataset.from_dict(rows), "ref_model": copy.deepcopy(model)}
    trainer = MiniMindDPOTrainer(model, args=args, processing_class=tokenizer, **data)
    trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    assert calls == [(1.0, ("log_probs", "entropy", "mean_logits", "is_top1")), (1.0, ("log_probs",))]

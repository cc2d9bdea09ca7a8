"""Reward models: TRL's loss written out, the texts that GRPO scores, and a run whose result GRPO takes."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_pretrain.data.conversations import read_preference
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.stages.reward_training import MiniMindRewardTrainer, RewardTrainingArguments, make_reward_model
from hf_pretrain.tokenizer.rendering import set_template
from tests.toys import toy_model
from tests.trainers import ARGUMENTS


TEXTS = [("two", "four", "five five"), ("one", "is one", "no"), ("three", "six", "a b c")]
RECORDS = [dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)) for texts in TEXTS]


def test_the_loss_is_that_of_the_formula_and_the_texts_are_those_of_grpo(tokenizer, tmp_path):
    set_template(tokenizer)
    documents = Dataset.from_dict({"text": [read_preference(record) for record in RECORDS]})
    pairs, report = prepare_pairs(documents, tokenizer, max_length=64, are_whole=True)
    for record, pair in zip(RECORDS, pairs, strict=True):
        for name in ("chosen", "rejected"):
            messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record[name]}]
            assert pair[f"{name}_ids"] == tokenizer.apply_chat_template(messages)["input_ids"]
    model = make_reward_model(toy_model(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id))
    options = {"max_steps": 1, "learning_rate": 0.01, "warmup_steps": 0, "per_device_train_batch_size": 3}
    args = RewardTrainingArguments(str(tmp_path), save_strategy="no", **ARGUMENTS, **options)
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


def test_a_trained_reward_model_prefers_the_chosen_answers(trained):
    judge = trained("judge")
    model = AutoModelForSequenceClassification.from_pretrained(judge.directory)
    loaded = AutoTokenizer.from_pretrained(judge.directory)
    texts = [[{"role": "user", "content": "9?"}, {"role": "assistant", "content": text}] for text in ("yes", "no")]
    scores = [
        model(**loaded.apply_chat_template(text, return_dict=True, return_tensors="pt")).logits for text in texts
    ]
    assert scores[0] > scores[1] and judge.series("eval_loss")[-1] < judge.series("eval_loss")[0]
    assert "hf-pretrain grpo --rewards judge --model_name_or_path dense" in judge.output

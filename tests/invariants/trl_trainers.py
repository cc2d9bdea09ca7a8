"""Toy trainers with TRL's losses, and their data."""

import copy
import random

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from hf_pretrain.data.conversations import read_preference
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.stages.dpo import DPOTrainingArguments, MiniMindDPOTrainer
from hf_pretrain.stages.reinforcement import ALGORITHMS, GRPOTrainingArguments
from hf_pretrain.stages.reward_training import MiniMindRewardTrainer, RewardTrainingArguments, make_reward_model
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.base_trainer import RunTrainer
from tests.toys import toy_model
from tests.trainers import ARGUMENTS


def make_records(num_records: int) -> tuple[PreTrainedTokenizerFast, list[dict[str, str]]]:
    """Return a tokenizer and preferences of uneven length. A task is the prompt of one."""
    generator = random.Random(0)

    def words() -> str:
        return " ".join(generator.choices("river stone green light walks".split(), k=generator.randint(1, 12)))

    tokenizer = train_tokenizer([words() for _ in range(60)], vocab_size=320)
    return tokenizer, [{name: words() for name in ("prompt", "chosen", "rejected")} for _ in range(num_records)]


def length_reward(completions, **columns):
    return [float(len(completion[-1]["content"])) for completion in completions]


def make_trl_trainer(recipe: str, tokenizer, records, *, rewards=length_reward, **flags) -> RunTrainer:
    """Return a trainer of "dpo", "reward", "grpo" or "rloo" whose rows train and evaluate."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "max_position_embeddings": 256, "pad_token_id": tokenizer.pad_token_id}
    model, flags = toy_model(**sizes, initializer_range=0.3), ARGUMENTS | flags
    if recipe in ALGORITHMS:
        with torch.no_grad():
            # Some completions shall end early.
            model.lm_head.weight[tokenizer.eos_token_id] *= 2
        rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": record["prompt"]}] for record in records]})
        args = GRPOTrainingArguments(**{"num_generations": 2, "max_completion_length": 6, "algorithm": recipe} | flags)
        data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer}
        return ALGORITHMS[recipe](model, args=args, reward_funcs=rewards, **data)
    texts = Dataset.from_dict({"text": [read_preference(record) for record in records]})
    rows, _ = prepare_pairs(texts, tokenizer, max_length=64, are_whole=recipe == "reward")
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer}
    if recipe == "dpo":
        args = DPOTrainingArguments(**flags)
        return MiniMindDPOTrainer(model=model, ref_model=copy.deepcopy(model), args=args, **data)
    return MiniMindRewardTrainer(make_reward_model(model), args=RewardTrainingArguments(**flags), **data)

"""Toy trainers of reinforcement learning, and completions."""

import json

from datasets import Dataset

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.stages.reinforcement import ALGORITHMS, GRPOTrainingArguments
from tests.toys import toy_model
from tests.trainers import ARGUMENTS


def make_model(**fields) -> MiniMindForCausalLM:
    return toy_model(**{"vocab_size": 360, "max_position_embeddings": 512} | fields)


def toy_tasks(num_tasks: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Sky {n}?"}] for n in range(num_tasks)]})


def long_reward(completions, **columns):
    return [float(len(completion[0]["content"])) for completion in completions]


def toy_trainer(tokenizer, tmp_path, *, model=None, algorithm="grpo", trainer=None, **kwargs):
    defaults = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4, "num_generations": 4}
    defaults |= {"max_completion_length": 6, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
    arguments = GRPOTrainingArguments(**ARGUMENTS | defaults | {"save_strategy": "no"} | kwargs, algorithm=algorithm)
    data = {"reward_funcs": long_reward, "train_dataset": toy_tasks()} | (trainer or {})
    return ALGORITHMS[algorithm](model or make_model(), args=arguments, processing_class=tokenizer, **data)


def says(*texts: str) -> list[list[dict]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

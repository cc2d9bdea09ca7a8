"""Toy trainers, their arguments and documents, and the loss of a step written out."""

from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
import yaml
from transformers import TrainerCallback

from hf_pretrain import MaskedLossTrainer, MiniMindForCausalLM
from hf_pretrain.checkpoints.manifest import write_manifest
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.collators import DataCollatorForPackedRows
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.base_trainer import RunTrainer
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.resume_check import check_resume
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import EXPERTS, toy_model


LENGTHS = [7, 19, 4, 12, 16, 5, 9, 11, 3, 14, 20, 6, 8]
ARGUMENTS = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "eval_strategy": "no"}


def make_model(num_experts: int = 0) -> MiniMindForCausalLM:
    experts = EXPERTS | {"num_experts": num_experts} if num_experts else {}
    return toy_model(vocab_size=64, num_key_value_heads=2, intermediate_size=64, **experts)


def make_documents(*, weighted: bool = False) -> list[dict]:
    """Return thirteen documents of uneven length; with weights, some tokens and one whole document have weight 0."""
    generator = torch.Generator().manual_seed(1)
    documents = []
    for number, length in enumerate(LENGTHS):
        document = {
            "input_ids": torch.randint(3, 64, (length,), generator=generator).tolist(),
            "seq_lengths": [length],
        }
        if weighted:
            weights = 2 * torch.rand(length, generator=generator) * (torch.rand(length, generator=generator) > 0.3)
            document["loss_mask"] = (weights * (number != 4)).tolist()
        documents.append(document)
    return documents


def pack(documents: list[dict], sizes: list[int]) -> list[dict]:
    rows, start = [], 0
    for size in sizes:
        group = documents[start : start + size]
        rows.append({key: sum((document[key] for document in group), []) for key in group[0]})
        start += size
    assert start == len(documents)
    return rows


def make_trainer(
    tmp_path, rows, *, model=None, batch=8, accumulation=1, eval_batch=4, trainer_class=MaskedLossTrainer, **kwargs
) -> MaskedLossTrainer:
    """Return a trainer of six steps of SGD that trains and evaluates on `rows`."""
    arguments = {
        **ARGUMENTS,
        **{"max_steps": 6, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "warmup_steps": 0},
        **{"max_grad_norm": 0, "weight_decay": 0, "save_strategy": "no", "logging_steps": 1},
        **{"output_dir": str(tmp_path), "per_device_eval_batch_size": eval_batch},
        **{"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation},
        **kwargs.pop("arguments", {}),
    }
    options = {"data_collator": DataCollatorForPackedRows(0), "train_dataset": rows, "eval_dataset": rows} | kwargs
    return trainer_class(model or make_model(), LMTrainingArguments(**arguments), **options)


def train(trainer: MaskedLossTrainer) -> list[dict]:
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def written_out_loss(model: MiniMindForCausalLM, documents: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross-entropy and router loss by their formulas, with one forward pass per document."""
    ce = weight_sum = aux = num_documents = torch.zeros(())
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        weights = torch.tensor(document.get("loss_mask", [1.0] * ids.shape[1]))[1:]
        if not weights.any():
            continue
        output = model(ids, output_router_logits=bool(model.config.num_experts))
        ce = ce + (F.cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="none") * weights).sum()
        weight_sum, num_documents = weight_sum + weights.sum(), num_documents + 1
        for logits in output.router_logits or ():
            probabilities = logits.softmax(-1)
            chosen = F.one_hot(probabilities.topk(2).indices, 4).sum(1).float()
            aux = aux + 4 * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
    return ce / weight_sum, aux / num_documents


def make_run_trainer(output_dir, **arguments) -> RunTrainer:
    """Return a trainer without the masked loss, as in the TRL stages."""
    arguments = ARGUMENTS | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2} | arguments
    return RunTrainer(
        model=toy_model(vocab_size=64),
        args=LMTrainingArguments(output_dir=str(output_dir), **arguments),
        data_collator=DataCollatorForPackedRows(0),
        train_dataset=make_documents(),
        eval_dataset=make_documents(),
    )


@cache
def small_tokenizer():
    return train_tokenizer(["some words to learn from"] * 50, vocab_size=320)


def parse(directory, *words: str, config: dict | None = None) -> tuple:
    """Return the arguments of the model, the data and the training of a command line, and of a YAML file."""
    argv = ["--output_dir", str(directory / "run"), *words]
    if config is not None:
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
        argv = ["--config", str(directory / "config.yaml"), *argv]
    return parse_args(ModelArguments, DataArguments, LMTrainingArguments, argv=argv)


def resume(directory, then: dict, now: dict, args) -> None:
    """Check whether the run `now` may resume from a checkpoint of the run `then`, both as `describe_run` says."""
    (directory / "checkpoint-3").mkdir(exist_ok=True)
    write_manifest(directory / "checkpoint-3", then)
    check_resume(str(directory / "checkpoint-3"), now, args)


class AtStep(TrainerCallback):
    """Call a function once, after a step."""

    def __init__(self, step: int, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


@contextmanager
def frozen(monkeypatch, args):
    """Raise an error for each assignment to an argument of `args` within the block."""

    def refuse(self, name, value):
        raise AssertionError(f"{name} is assigned after the run was settled: {vars(self).get(name)} -> {value}")

    before = dict(vars(args))
    with monkeypatch.context() as patch:
        patch.setattr(type(args), "__setattr__", refuse)
        yield
    assert vars(args) == before

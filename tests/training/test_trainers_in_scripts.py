"""A trainer in a script of the user's own, without a recipe: its arguments, checkpoints, models and collators."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import DataCollatorWithFlattening, DefaultDataCollator, LlamaConfig, LlamaForCausalLM
from transformers import TrainingArguments as PlainArguments

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import toy_model
from tests.trainers import ARGUMENTS, make_documents, make_model


ROWS = [{"input_ids": document["input_ids"]} for document in make_documents()]


def trainer_of(tmp_path, cls=PlainArguments, *, model=None, collator=None, **given) -> MaskedLossTrainer:
    arguments = ARGUMENTS | {"output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 4}
    arguments |= {"save_steps": 2, "learning_rate": 1e-2} | given
    return MaskedLossTrainer(model or make_model(), cls(**arguments), collator, train_dataset=ROWS)


def test_a_damaged_checkpoint_is_refused_by_its_path(tmp_path, caplog):
    trainer_of(tmp_path).train()
    expected = (tmp_path / "checkpoint-4/model.safetensors").read_bytes()
    path = tmp_path / "checkpoint-2/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2048] + bytes(2048))
    with pytest.raises(UserError, match="checkpoint-2"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(path.parent))
    path.write_bytes(whole)
    trainer_of(tmp_path).train(resume_from_checkpoint=path.parent)
    assert (tmp_path / "checkpoint-4/model.safetensors").read_bytes() == expected
    # The flag that a stopped run names.
    trainer_of(tmp_path, max_steps=4).train(resume_from_checkpoint="auto")
    assert not [name for name in tmp_path.iterdir() if name.name.startswith("damaged")]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("perplexity", False), ("eval_perplexity", False), ("bits_per_byte", False), ("loss", False), ("accuracy", True)],
)
def test_the_best_model_is_the_best_with_plain_arguments(tmp_path, metric, expected):
    given = {
        "metric_for_best_model": metric,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    plain = PlainArguments(**ARGUMENTS | {"output_dir": str(tmp_path), "save_steps": 2} | given)
    assert LMTrainingArguments.of(plain).greater_is_better is expected


def test_arguments_of_a_class_of_the_user_are_taken(tmp_path):
    @dataclass
    class Arguments(PlainArguments):
        my_flag: int = 3

    trainer = trainer_of(tmp_path, Arguments, my_flag=5, max_grad_norm=0.25)
    assert (trainer.args.my_flag, trainer.args.max_grad_norm) == (5, 0.25)


@pytest.mark.parametrize("name", ["dry_run", "profile", "early_stopping_patience", "preview"])
def test_an_argument_that_only_recipes_know_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=f"Only recipes know `{name}`"):
        trainer_of(tmp_path, LMTrainingArguments, **{name: 1}).train()


def test_the_users_arguments_are_settled_for_one_trainer_alone(tmp_path):
    args = LMTrainingArguments(**ARGUMENTS | {"output_dir": str(tmp_path), "eval_strategy": "steps"})
    rates = [
        MaskedLossTrainer(toy_model(vocab_size=64, hidden_size=size), args, train_dataset=ROWS).args.learning_rate
        for size in (64, 32)
    ]
    assert rates[1] == 2 * rates[0]
    assert (args.learning_rate, args.eval_strategy) == (None, "steps")


def test_an_optimizer_class_of_the_user_takes_the_place_of_muon(tmp_path):
    args = LMTrainingArguments(**ARGUMENTS | {"output_dir": str(tmp_path)})
    chosen = (torch.optim.SGD, {"lr": 0.1})
    trainer = MaskedLossTrainer(make_model(), args, train_dataset=ROWS, optimizer_cls_and_kwargs=chosen)
    assert type(trainer.create_optimizer()) is torch.optim.SGD


def test_an_optimizer_of_the_user_is_compared(tmp_path):
    def trainer(cls, rate, **given):
        model = make_model()
        own = cls(model.parameters(), lr=rate)
        arguments = PlainArguments(
            **ARGUMENTS | {"output_dir": str(tmp_path), "max_steps": 4, "save_steps": 2} | given
        )
        return MaskedLossTrainer(model, arguments, train_dataset=ROWS, optimizers=(own, None))

    trainer(torch.optim.AdamW, 1e-2).train()
    expected = (tmp_path / "checkpoint-4/model.safetensors").read_bytes()
    path = str(tmp_path / "checkpoint-2")
    with pytest.raises(UserError, match="its settings of the optimizer differed .*'lr': 0.1"):
        trainer(torch.optim.AdamW, 0.1).train(path)
    with pytest.raises(UserError, match="its optimizer was AdamW and is now Adagrad"):
        trainer(torch.optim.Adagrad, 1e-2).train(path)
    trainer(torch.optim.AdamW, 1e-2).train(path)
    assert (tmp_path / "checkpoint-4/model.safetensors").read_bytes() == expected


def test_a_model_of_another_class_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(UserError, match="not llama. `load_upstream` reads"):
        trainer_of(tmp_path, model=LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)))
    with pytest.raises(UserError, match="not NoneType. .* no `model_init`"):
        MaskedLossTrainer(None, model_init=make_model)


def test_collators_without_labels_or_rows_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"makes 1 row\(s\) of labels from 4 rows"):
        trainer_of(tmp_path, collator=DataCollatorWithFlattening()).train()
    rows = [{"input_ids": [5, 6, 7]}] * 8
    arguments = PlainArguments(**ARGUMENTS | {"output_dir": str(tmp_path / "other"), "max_steps": 1})
    with pytest.raises(UserError, match="makes no labels"):
        MaskedLossTrainer(make_model(), arguments, DefaultDataCollator(), train_dataset=rows).train()


def test_an_optimizer_whose_package_is_missing_is_named_at_once(tmp_path):
    with pytest.raises(UserError, match="--optim stable_adamw: .*optimi"):
        LMTrainingArguments(**ARGUMENTS | {"output_dir": str(Path(tmp_path)), "optim": "stable_adamw"})

"""A trainer in a script of the user's own, without a recipe: its arguments, checkpoints and optimizers."""

from dataclasses import dataclass

import pytest
import torch
from transformers import TrainingArguments as PlainArguments

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import toy_model
from tests.trainers import ARGUMENTS, make_documents, make_model


ROWS = [{"input_ids": document["input_ids"]} for document in make_documents()]


def trainer_of(tmp_path, cls=PlainArguments, **given) -> MaskedLossTrainer:
    arguments = ARGUMENTS | {"output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 4}
    arguments |= {"save_steps": 2, "learning_rate": 1e-2} | given
    return MaskedLossTrainer(make_model(), cls(**arguments), train_dataset=ROWS)


def test_a_damaged_checkpoint_is_refused_by_its_path(tmp_path, caplog):
    trainer_of(tmp_path).train()
    expected = (tmp_path / "checkpoint-4/model.safetensors").read_bytes()
    path = tmp_path / "checkpoint-2/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2048] + bytes(2048))
    with pytest.raises(UserError):
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
def test_the_best_model_is_the_best_with_plain_arguments_and_with_ours(tmp_path, metric, expected):
    given = {"output_dir": str(tmp_path), "metric_for_best_model": metric, "load_best_model_at_end": True}
    given |= ARGUMENTS | {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    for args in (LMTrainingArguments.of(PlainArguments(**given)), LMTrainingArguments(**given)):
        assert args.greater_is_better is expected


def test_arguments_of_a_class_of_the_user_are_taken(tmp_path):
    @dataclass
    class Arguments(PlainArguments):
        my_flag: int = 3

    trainer = trainer_of(tmp_path, Arguments, my_flag=5, max_grad_norm=0.25)
    assert (trainer.args.my_flag, trainer.args.max_grad_norm) == (5, 0.25)


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
    def trainer(cls, rate):
        model = make_model()
        own = cls(model.parameters(), lr=rate)
        arguments = PlainArguments(str(tmp_path), max_steps=4, save_steps=2, **ARGUMENTS)
        return MaskedLossTrainer(model, arguments, train_dataset=ROWS, optimizers=(own, None))

    trainer(torch.optim.AdamW, 1e-2).train()
    expected = (tmp_path / "checkpoint-4/model.safetensors").read_bytes()
    path = str(tmp_path / "checkpoint-2")
    for cls, rate in ((torch.optim.AdamW, 0.1), (torch.optim.Adagrad, 1e-2)):
        with pytest.raises(UserError):
            trainer(cls, rate).train(path)
    trainer(torch.optim.AdamW, 1e-2).train(path)
    assert (tmp_path / "checkpoint-4/model.safetensors").read_bytes() == expected

"""GPUs without bfloat16 units train in float16. Shown on the CPU, with autocast and the loss scaler of a GPU."""

import math

import pytest
import torch

from hf_pretrain.training import training_arguments
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import EXPERTS, toy_model
from tests.trainers import make_documents, make_trainer, train


def make_float16_trainer(*args, scale: float, **kwargs):
    """Return a trainer of float16 whose loss scaler begins with `scale`. accelerate refuses float16 on CPUs."""
    trainer = make_trainer(*args, **kwargs)
    trainer.args.fp16 = True
    accelerator = trainer.accelerator
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return trainer


@pytest.mark.parametrize("optim_preset", ["muon", "adamw"])
@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
def test_losses_and_norms_are_those_of_float32(tmp_path, sizes, optim_preset):
    arguments = {"optim": None, "optim_preset": optim_preset, "learning_rate": 1e-3, "max_grad_norm": 1.0}
    options = {"accumulation": 2, "batch": 2, "arguments": arguments}
    expected, steps = (
        train(make(tmp_path, make_documents(weighted=True), model=toy_model(vocab_size=64, **sizes), **more | options))
        for make, more in ((make_trainer, {}), (make_float16_trainer, {"scale": 1024.0}))
    )
    assert len(steps) == len(expected) == 6
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3)
    assert any(ours["loss"] != theirs["loss"] for ours, theirs in zip(steps, expected, strict=True))


def test_steps_that_overflow_are_skipped(tmp_path):
    trainer = make_float16_trainer(tmp_path, make_documents(), model=toy_model(vocab_size=64), scale=2.0**22)
    steps = train(trainer)
    are_finite = [math.isfinite(entry["grad_norm"]) for entry in steps]
    assert set(are_finite) == {True, False}
    assert all(math.isfinite(entry["loss"]) for entry in steps)
    assert trainer.accelerator.scaler.get_scale() == 2.0 ** (22 - are_finite.count(False))


def test_float16_is_the_default_without_bfloat16_units(tmp_path, monkeypatch):
    monkeypatch.setattr(training_arguments, "check_device", lambda args: None)
    monkeypatch.setattr(training_arguments, "has_bfloat16_units", lambda device_type: False)
    monkeypatch.setattr(training_arguments, "default_device_type", lambda *, use_cpu: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = [LMTrainingArguments(output_dir=str(tmp_path), **given) for given in ({}, {"bf16": False})]
    assert [(args.bf16, args.fp16) for args in made] == [(False, True), (False, False)]

"""Training in float8: what computes in it, what stays equal, and what is refused. `make test-float8` has torchao."""

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.training.float8 import check_float8, convert_to_float8
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import EXPERTS, toy_model
from tests.trainers import make_documents, make_model, make_trainer


needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is missing: make test-float8"
)
EMULATED = {"fp8": True, "fp8_emulate": True, "bf16": True}


def losses_and_gradients(model: nn.Module, rows: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the sum of the losses of all rows, one micro-batch per row of `rows`, and the accumulated gradients."""
    model.zero_grad()
    losses = [model(part, labels=part, use_cache=False).loss * len(part) for part in rows]
    sum(losses).backward()
    return sum(losses).item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@needs_torchao
def test_the_linear_layers_of_the_decoder_compute_in_float8():
    model = toy_model(vocab_size=160, qk_norm=True, intermediate_size=64, **EXPERTS)
    before, types = dict(model.named_parameters()), {name: type(part) for name, part in model.named_modules()}
    convert_to_float8(model.model.layers, emulates=True)
    after = dict(model.named_parameters())
    # Optimizers and checkpoints see no difference.
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    changed = {name.split(".")[-1] for name, part in model.named_modules() if type(part) is not types[name]}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@needs_torchao
def test_losses_and_gradients_are_rounded_and_independent_of_the_micro_batch(input_ids):
    model, exact = (toy_model(vocab_size=160, intermediate_size=64, initializer_range=0.1) for _ in range(2))
    convert_to_float8(model.model.layers, emulates=True)
    whole, gradients = losses_and_gradients(model, input_ids[None])
    single, of_single = losses_and_gradients(model, input_ids[:, None])
    reference, of_reference = losses_and_gradients(exact, input_ids[None])
    assert single == pytest.approx(whole, rel=1e-6)
    assert whole == pytest.approx(reference, rel=5e-2) and abs(whole - reference) > 1e-4 * reference
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_single[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
        assert (gradient - of_reference[name]).norm() < 0.3 * of_reference[name].norm(), name


@needs_torchao
@pytest.mark.parametrize("optim_preset", ["muon", "adamw"])
def test_a_run_resumes_exactly_and_saves_plain_weights(tmp_path, optim_preset):
    arguments = EMULATED | {"optim": None, "optim_preset": optim_preset, "learning_rate": 1e-2}
    arguments |= {"save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(tmp_path, make_documents(), model=make_model(4), arguments=arguments)
    trainer.train()
    trainer.save_model()
    again = make_trainer(tmp_path, make_documents(), model=make_model(4), arguments=arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    plain, weights = make_model(4), load_file(tmp_path / "model.safetensors")
    for (name, weight), resumed in zip(trainer.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, resumed), name
        assert weights.get(name, weight).dtype == torch.float32
    assert not plain.load_state_dict(weights, strict=False).unexpected_keys
    arguments |= {"fp8": False, "fp8_emulate": False}
    in_bf16 = make_trainer(tmp_path / "bf16", make_documents(), model=make_model(4), arguments=arguments)
    in_bf16.train()
    pairs = zip(trainer.state.log_history, in_bf16.state.log_history, strict=True)
    losses = [(entry["loss"], other["loss"]) for entry, other in pairs if "loss" in entry]
    assert len(losses) == 6 and all(loss == pytest.approx(other, rel=1e-2) for loss, other in losses)
    assert any(loss != other for loss, other in losses)


def make_arguments(tmp_path, **values) -> LMTrainingArguments:
    return LMTrainingArguments(output_dir=str(tmp_path), report_to="none", **{"use_cpu": True} | values)


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)])
def test_the_units_are_those_of_ada_and_later(tmp_path, monkeypatch, capability, fits):
    args = make_arguments(tmp_path, **EMULATED)
    args.fp8_emulate = False
    monkeypatch.setattr(LMTrainingArguments, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with nullcontext() if fits else pytest.raises(UserError):
        check_float8(args)


def test_sharded_weights_are_refused(tmp_path, monkeypatch):
    args = make_arguments(tmp_path, **EMULATED)
    for fsdp_size, stage, fits in ((2, 0, False), (1, 0, True), (1, 2, True), (1, 3, False)):
        with monkeypatch.context() as patch:
            patch.setattr(args, "fsdp_size", fsdp_size)
            patch.setattr(args, "deepspeed_plugin", SimpleNamespace(zero_stage=stage))
            with nullcontext() if fits else pytest.raises(UserError):
                check_float8(args)


def test_accelerate_launch_asks_for_float8(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    args = make_arguments(tmp_path, fp8_emulate=True)
    # accelerate itself must not convert the model.
    assert args.fp8 and args.bf16 and args.mixed_precision == "bf16"
    with pytest.raises(UserError):
        make_arguments(tmp_path)

"""Runs with TRL's trainers resume bit for bit between two generations, and with a reference model that moves."""

import pytest
import torch
from safetensors.torch import load_file

from hf_pretrain.runtime.errors import UserError
from tests.invariants.trl_trainers import make_records, make_trl_trainer
from tests.matrix import COMMON, TASKS, call


SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
ENTROPY = {"use_adaptive_entropy": True, "entropy_target": 100.0, "entropy_coef_delta": 0.2}
CASES = {
    "grpo": {"num_iterations": 2, "beta": 0.5, **SYNCED, **ENTROPY},
    "rloo": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "dpo": SYNCED,
}


def build_trainer(recipe: str, flags: dict, output_dir):
    steps = {"save_steps": 1, "max_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0, "save_total_limit": 9}
    flags = {"output_dir": str(output_dir), "per_device_train_batch_size": 4} | steps | flags
    return make_trl_trainer(recipe, *make_records(16), **flags)


@pytest.mark.parametrize("recipe", CASES)
def test_a_resume_is_bit_for_bit(tmp_path, recipe):
    whole, resumed = (build_trainer(recipe, CASES[recipe], tmp_path / name) for name in ("whole", "resumed"))
    whole.train()
    torch.manual_seed(1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-1"))
    others = dict(resumed.model.named_parameters())
    assert all(torch.equal(weight, others[name]) for name, weight in whole.model.named_parameters())


def test_completions_of_other_ranks_are_refused(tmp_path):
    build_trainer("grpo", {"num_iterations": 2}, tmp_path).train()
    # After the last step of a generation, no completions are saved.
    assert not (tmp_path / "checkpoint-2/generation.pt").exists()
    flags = {"num_iterations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    build_trainer("grpo", flags, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trainer = build_trainer("grpo", flags, tmp_path)
    with pytest.raises(UserError):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.distributed
def test_two_ranks_resume_bit_for_bit(toys, tmp_path):
    words = f"{TASKS} {COMMON} --model_name_or_path moe --num_generations 4 --save_total_limit 9 --max_steps 2 "
    words += "--per_device_train_batch_size 2 --save_steps 1 --eval_strategy no "
    words += "--num_iterations 2 --learning_rate 1e-2 --beta 0.5 --sync_ref_model --ref_model_sync_steps 1"
    checkpoint = f"--resume_from_checkpoint {tmp_path}/whole/checkpoint-1"
    for name, flags in {"whole": "", "resumed": checkpoint}.items():
        call(toys, "torchrun", "grpo", f"{words} --output_dir {tmp_path / name} {flags}")
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())

"""No setting of the training pass is saved with the model: every stage uses the KV cache where it generates only."""

import json
import runpy
import sys

import pytest

from hf_pretrain import MiniMindForCausalLM, MiniMindModel
from tests.invariants.launching import ROOT


ONLINE = "--rewards tests.rollouts:long_reward --max_completion_length 4 --num_generations 2".split()
DATA = {"pretrain": "train", "sft": "chats", "distill": "chats", "dpo": "pairs", "grpo": "tasks"}
STAGES = {
    "pretrain": ["pretrain", "--activation_checkpointing"],
    "sft": ["sft", "--use_peft"],
    "distill": ["distill", "--teacher_name_or_path", "dense"],
    "dpo": ["dpo", "--activation_checkpointing"],
    "grpo": ["grpo", "--activation_checkpointing", "--beta", "0.1", *ONLINE],
    "rloo": ["grpo", "--algorithm", "rloo", *ONLINE],
}


@pytest.fixture
def uses(monkeypatch) -> list[tuple[bool, bool]]:
    """Return a list that gets a pair for each forward pass: whether it generates, and whether it has a cache."""
    found, depth = [], []
    forward, generate = MiniMindModel.forward, MiniMindForCausalLM.generate

    def watched_forward(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        found.append((bool(depth), outputs.past_key_values is not None))
        return outputs

    def watched_generate(self, *args, **kwargs):
        depth.append(True)
        try:
            return generate(self, *args, **kwargs)
        finally:
            depth.pop()

    monkeypatch.setattr(MiniMindModel, "forward", watched_forward)
    monkeypatch.setattr(MiniMindForCausalLM, "generate", watched_generate)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_saves_the_config_that_it_was_given(stage, toys, uses, monkeypatch, tmp_path):
    recipe, *flags = STAGES[stage]
    monkeypatch.chdir(toys)
    arguments = f"--model_name_or_path moe --dataset_name {DATA[recipe]}.jsonl --output_dir {tmp_path} --max_steps 1 "
    arguments += "--per_device_train_batch_size 2 --bf16 false --use_cpu --validation_fraction 0.3 --report_to none "
    arguments += "--save_strategy no" + (" --max_length 64" if recipe != "grpo" else "")
    monkeypatch.setattr(sys, "argv", [str(ROOT / f"recipes/{recipe}.py"), *arguments.split(), *flags])
    runpy.run_path(sys.argv[0], run_name="__main__")

    # Trainings and evaluations use no cache, samples and rollouts do. The prompts of groups fill it first.
    shared = {(False, True)} if recipe == "grpo" else set()
    assert set(uses) == {(False, False), (True, True)} | shared
    if "--use_peft" in flags:
        return
    saved, given = (json.loads((path / "config.json").read_text()) for path in (tmp_path, toys / "moe"))
    assert saved == given and given["use_cache"] is True
    assert json.loads((tmp_path / "generation_config.json").read_text()).get("use_cache") is not False

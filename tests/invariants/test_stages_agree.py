"""Compare fine-tuning on conversations and on preferences, and distillation, on two ranks with one process."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT, launcher_command, start
from tests.toys import EXPERTS, toy_model, write_jsonl


pytestmark = pytest.mark.distributed

WAYS = {
    "DDP": ("torchrun", []),
    "ZeRO-2": ("deepspeed", ["--deepspeed", str(ROOT / "ds_configs/zero2.json")]),
    "ZeRO-3": ("deepspeed", ["--deepspeed", str(ROOT / "ds_configs/zero3.json")]),
}
COMMON = (
    "--use_cpu --bf16 false --max_length 64 --validation_fraction 0 --max_steps 5 --logging_steps 1 --optim sgd "
    "--learning_rate 0.1 --lr_scheduler_type constant --warmup_steps 0 --max_grad_norm 0 --weight_decay 0 "
    "--save_steps 3"
)
FLAGS = {
    # The draws depend on the record, not on its rank.
    "sft": ["--packing", "none", "--add_system_ratio", "0.5", "--empty_think_ratio", "0.5"],
    # On packed rows of text.
    "distill": "--teacher_name_or_path dense --dataset_kind text --max_length 32 --validation_fraction 0.2".split(),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Return a directory with a toy model with experts, and 11 conversations and 11 preferences of uneven length."""
    path = tmp_path_factory.mktemp("stages")
    generator = random.Random(0)

    def words() -> str:
        return " ".join(generator.choices(["river", "stone", "green", "light", "walks"], k=generator.randint(2, 9)))

    tokenizer = train_tokenizer([words() for _ in range(60)], vocab_size=320)
    for name, fields in (("moe", {"qk_norm": True, **EXPERTS}), ("dense", {"initializer_range": 0.3})):
        toy_model(vocab_size=len(tokenizer), num_key_value_heads=2, **fields).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    chats = [{"prompt": words(), "completion": words()} for _ in range(11)]
    pairs = [{"prompt": words(), "chosen": words(), "rejected": words()} for _ in range(11)]
    texts = [words() + " " + words() for _ in range(40)]
    for name, records in (("sft", chats), ("dpo", pairs), ("reward", pairs), ("distill", texts)):
        write_jsonl(path / f"{name}.jsonl", records)
    return path


@pytest.fixture(scope="module")
def launch(workspace):
    """Return a function that runs a recipe once per launch and returns the log and the weights."""
    runs: dict[str, tuple[list[dict], dict[str, torch.Tensor]]] = {}

    def run(recipe: str, launcher: str, arguments: list[str], name: str | None = None):
        name = name or f"{recipe}-{launcher}"
        if name not in runs:
            output_dir = workspace / name
            batch = ["4", "1"] if launcher == "python" else ["1", "2"]
            command = [
                *(*launcher_command(launcher), str(ROOT / f"recipes/{recipe}.py"), *COMMON.split()),
                *("--model_name_or_path", "moe", "--dataset_name", f"{recipe}.jsonl", "--output_dir", str(output_dir)),
                *("--per_device_train_batch_size", batch[0], "--gradient_accumulation_steps", batch[1]),
                *FLAGS.get(recipe, []),
            ]
            result = start([*command, *arguments], cwd=workspace)
            assert result.returncode == 0, result.stdout[-4000:]
            history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
            runs[name] = history, load_file(output_dir / "model.safetensors")
        return runs[name]

    return run


CASES = [(recipe, way) for recipe in ("sft", "dpo", "reward") for way in ("DDP", "ZeRO-2")]
# ZeRO-3 must not shard the teacher.
CASES += [("distill", "DDP"), ("distill", "ZeRO-3")]
KEYS = {"sft": ["ce_loss"], "dpo": ["rewards/margins"], "reward": ["mean_reward"]}
KEYS |= {"distill": ["ce_loss", "kl_loss", "eval_loss", "eval_kl"]}


@pytest.mark.parametrize(("recipe", "way"), CASES)
def test_losses_and_weights_agree(launch, workspace, recipe, way):
    expected, weights = launch(recipe, "python", [])
    steps, found = launch(recipe, *WAYS[way])
    assert sum("loss" in entry for entry in expected) == 5
    for key in ["loss", "aux_loss", *KEYS[recipe]]:
        values, others = ([entry[key] for entry in log if key in entry] for log in (steps, expected))
        assert values == pytest.approx(others, abs=1e-5) and values, key
    norms, others = ([entry["grad_norm"] for entry in log if "grad_norm" in entry] for log in (steps, expected))
    assert norms == pytest.approx(others, rel=1e-4) and len(norms) == 5
    # Training changed the weights, and equally in all launches.
    before = load_file(workspace / "moe/model.safetensors")
    names = before.keys() - {"lm_head.weight"} if recipe == "reward" else before.keys()
    assert all((weights[name] - before[name]).abs().max() > 1e-4 for name in names)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=5e-6, msg=name)


# Reward models have the rows of DPO.
@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_a_resume_within_a_later_epoch_keeps_its_order(launch, workspace, recipe):
    """Step 3 is the last of SFT's first epoch (3 steps), and lies within DPO's second epoch (2 steps)."""
    whole, weights = launch(recipe, *WAYS["DDP"])
    checkpoint = ["--resume_from_checkpoint", str(workspace / f"{recipe}-torchrun/checkpoint-3")]
    resumed, found = launch(recipe, "torchrun", checkpoint, name=f"{recipe}-resumed")
    losses, others = ([entry["loss"] for entry in log if "loss" in entry] for log in (resumed, whole))
    assert losses == pytest.approx(others, abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6, msg=name)

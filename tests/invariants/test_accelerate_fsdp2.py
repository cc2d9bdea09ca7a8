"""
accelerate's FSDP2 in bf16, the default on GPUs, trains the same weights as DDP, with SGD and with Muon. Each resumes
from the other's checkpoints.

On CPUs, accelerate turns FSDP into DDP. `Fsdp2Trainer` therefore sets FSDP's plug-in, prepared as on a GPU. The rest
is the real path: two ranks over gloo, `fsdp2_prepare_model`, autocast.

As a program, this file trains each model in both ways and writes the results of each rank to files.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.training import training_arguments
from tests import trainers
from tests.invariants.launching import launcher_command, start
from tests.toys import EXPERTS, toy_model


pytestmark = pytest.mark.distributed

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "MiniMindDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
# The model with experts trains with SGD, the dense one with Muon.
MODELS = {"moe": EXPERTS | {"num_key_value_heads": 2}, "muon": {}}


class Fsdp2Trainer(MaskedLossTrainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(**(self.args.fsdp_plugin_args or {}))
        plugin.set_mixed_precision(self.accelerator.mixed_precision)
        state = self.accelerator.state
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        self.is_fsdp_enabled = True


def make_rows(weight: float) -> list[dict]:
    """Return rows of three documents, whose sum of weights bfloat16 cannot represent."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(8):
        ids = torch.randint(3, 160, (120,), generator=generator).tolist()
        rows.append({"input_ids": ids, "seq_lengths": [50, 31, 39], "loss_mask": [weight] * 120})
    return rows


def train(trainer_class: type[MaskedLossTrainer], name: str, directory: Path, checkpoint: Path | None = None) -> dict:
    arguments = {"max_steps": 3, "bf16": True, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}
    if name == "muon":
        arguments |= {"optim": None, "optim_preset": "muon", "learning_rate": 1e-3}
    options = {"model": toy_model(vocab_size=160, **MODELS[name]), "batch": 2, "accumulation": 2}
    trainer = trainers.make_trainer(
        directory, make_rows(1.37), arguments=arguments, trainer_class=trainer_class, **options
    )
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {key: value.detach() for key, value in trainer.model.named_parameters()}
    return {
        "steps": steps,
        "eval_loss": trainer.evaluate()["eval_loss"],
        "sharded": sum(isinstance(value, dist.tensor.DTensor) for value in weights.values()),
        "weights": {k: v.full_tensor() if isinstance(v, dist.tensor.DTensor) else v for k, v in weights.items()},
    }


def main(directory: Path) -> None:
    # It refuses FSDP on a CPU.
    training_arguments.check_device = lambda args: None
    dist.init_process_group("gloo")
    for name in MODELS:
        kinds = (MaskedLossTrainer, Fsdp2Trainer)
        for trainer_class, other in (*((kind, None) for kind in kinds), kinds, kinds[::-1]):
            if trainer_class is Fsdp2Trainer:
                os.environ.update(FSDP)
            way = f"{name}-{trainer_class.__name__}" + ("-resumed" if other else "")
            checkpoint = directory / f"{name}-{other.__name__}" / "checkpoint-2" if other else None
            result = train(trainer_class, name, directory / way, checkpoint)
            torch.save(result, directory / f"{way}-{dist.get_rank()}.pt")
            for variable in FSDP:
                os.environ.pop(variable, None)
            AcceleratorState._reset_state(reset_partial_state=False)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("fsdp2")
    result = start([*launcher_command("torchrun"), __file__, str(directory)])
    assert result.returncode == 0, result.stdout[-3000:]
    return directory


@pytest.mark.parametrize("name", MODELS)
def test_fsdp2_in_bf16_equals_ddp_in_bf16(directory, name):
    ddp, fsdp = (
        torch.load(directory / f"{name}-{kind}-0.pt", weights_only=False)
        for kind in ("MaskedLossTrainer", "Fsdp2Trainer")
    )
    assert ddp["sharded"] == 0 and fsdp["sharded"] == len(fsdp["weights"])
    for step, expected in zip(fsdp["steps"], ddp["steps"], strict=True):
        for key in ("loss", "ce_loss", "grad_norm") + (("aux_loss",) if name == "moe" else ()):
            # The router reads bf16 activations, whose last bits differ where oneDNN emulates bf16.
            tolerance = 1e-5 if key in ("loss", "ce_loss") else 2e-4
            assert step[key] == pytest.approx(expected[key], rel=tolerance), key
    assert fsdp["eval_loss"] == pytest.approx(ddp["eval_loss"], rel=1e-5)
    # Where bf16 is emulated, the last bits of activations differ, and a token can reach another expert. With Muon,
    # AdamW trains the embedding: its first steps have the size of the learning rate, even where a gradient is only
    # such rounding. The losses and norms above notice the fault that this test guards against: gradients reduced in
    # bf16 change them by 3e-4 and more.
    for key, weight in ddp["weights"].items():
        torch.testing.assert_close(fsdp["weights"][key], weight, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["MaskedLossTrainer", "Fsdp2Trainer"])
def test_each_resumes_from_the_other(directory, kind, name):
    whole, resumed = (
        torch.load(directory / f"{name}-{kind}{suffix}-0.pt", weights_only=False) for suffix in ("", "-resumed")
    )
    assert [step["step"] for step in resumed["steps"]] == [1, 2, 3]
    assert resumed["steps"][2]["loss"] == pytest.approx(whole["steps"][2]["loss"], rel=1e-5)
    for key, weight in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][key], weight, rtol=0, atol=2e-4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""
Run the real pretraining recipe with an additional callback that checks the rotary table after training.

`DOUBLE_GRADIENT=1` doubles every gradient and leaves the losses unchanged, to show that the tests notice it.
`PLANT_SPIKE=1` calls the fifth step a spike.

NOTE: accelerate, and so this package, refuses tensor parallelism on CPUs. The probe turns both checks off, and torch
computes it over gloo.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers.trainer
from accelerate import ParallelismConfig
from transformers import TrainerCallback

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.loading.adapters import base_model_of
from hf_pretrain.training import spikes, training_arguments
from hf_pretrain.training.parsing import parse_args


sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from pretrain import ARGUMENTS, main  # noqa: E402


class RotaryTableProbe(TrainerCallback):
    def on_train_end(self, args, state, control, model=None, **kwargs):
        table, config = base_model_of(model).model.rotary_emb.pos_cis, model.config
        # The lines of MiniMind v1.
        exponents = torch.arange(0, config.head_dim, 2)[: config.head_dim // 2].float() / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_position_embeddings), 1.0 / config.rope_parameters["rope_theta"] ** exponents
        )
        expected = torch.polar(torch.ones_like(angles), angles.float())
        intact = table.dtype == torch.complex64 and torch.equal(table.cpu(), expected)
        probe = Path(args.output_dir, f"probe_rank{args.process_index}.json")
        probe.write_text(json.dumps({"pos_cis_intact": intact}))


class DoubledGradientTrainer(MaskedLossTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss if isinstance(loss, tuple) else loss + (loss - loss.detach())


if __name__ == "__main__":
    transformers.trainer.DEFAULT_CALLBACKS.append(RotaryTableProbe)
    ParallelismConfig._validate_accelerator = lambda *_: None
    training_arguments.check_device = lambda _: None
    if os.environ.get("DOUBLE_GRADIENT"):
        sys.modules["pretrain"].MaskedLossTrainer = DoubledGradientTrainer
    if os.environ.get("PLANT_SPIKE"):
        spikes.is_spike = lambda value, history, least_ratio: len(history) == 4
    main(*parse_args(*ARGUMENTS))

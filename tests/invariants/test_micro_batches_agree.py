"""Train with TRL's losses on one large and several small micro-batches: the weights agree, or the run says so."""

import inspect
import re

import pytest
from trl import DPOTrainer, GRPOTrainer

from hf_pretrain.training.resume_check import describe_run
from tests.invariants.trl_trainers import make_records, make_trl_trainer


def losses_of(trainer: type) -> list[str]:
    """Return every loss type that TRL's code of a trainer compares with, so that new ones are tested, too."""
    compared = re.findall(r"loss_type (?:==|in) (\"\w+\"|\[[^]]+\])", inspect.getsource(trainer))
    return sorted(set(re.findall(r"\w+", " ".join(compared))))


NAMED = ["aot", "aot_unpaired", "sft"]
CASES = [
    *(("dpo", {"loss_type": [name]}) for name in NAMED),
    # A sum of all others would depend on the micro-batch if one of them did.
    ("dpo", {"loss_type": sorted({*losses_of(DPOTrainer)} - {*NAMED}), "label_smoothing": 0.1}),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    ("dpo", {"ld_alpha": 0.5, "use_weighting": True, "f_divergence_type": "forward_kl"}),
    ("reward", {"center_rewards_coefficient": 0.1}),
    *(("grpo", {"loss_type": name, "beta": 0.1}) for name in losses_of(GRPOTrainer)),
    ("grpo", {"loss_type": "grpo", "entropy_coef": 0.5}),
    ("grpo", {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_target": 100.0}),
    ("grpo", {"top_entropy_quantile": 0.5}),
    ("grpo", {"importance_sampling_level": "sequence", "scale_rewards": "batch", "mask_truncated_completions": True}),
    ("rloo", {"beta": 0.1}),
]


@pytest.mark.parametrize(("recipe", "flags"), CASES, ids=lambda part: part if isinstance(part, str) else str(part))
def test_micro_batches_agree_or_the_loss_is_named(tmp_path, recipe, flags):
    flags = {"output_dir": str(tmp_path), "save_strategy": "no", "max_steps": 2, "warmup_steps": 0} | flags
    flags |= {"optim": "sgd", "learning_rate": 0.1}
    trainers = []
    for rows in (8, 4):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
        trainers.append(make_trl_trainer(recipe, *make_records(8), **flags | sizes))
        trainers[-1].train()
    one, several = trainers
    others = dict(several.model.named_parameters())
    difference = max((weight - others[name]).abs().max().item() for name, weight in one.model.named_parameters())
    depends = one.args.loss_depends_on_micro_batch
    assert difference > 2e-5 if depends else difference < 5e-6, difference
    # A resume with another size is refused.
    settings = describe_run(one)["settings"]
    assert ("per_device_train_batch_size" in settings) == depends

"""The optimizer of a run: the defaults of the stages, and DeepSpeed configs that it cannot follow."""

import copy
import gc
import json
from contextlib import nullcontext

import pytest
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, is_deepspeed_zero3_enabled

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.training import training_arguments
from hf_pretrain.training.deepspeed_support import complete_deepspeed_config, prepare_deepspeed_config
from hf_pretrain.training.training_arguments import LMTrainingArguments, SFTTrainingArguments, optimizer_name
from tests.faults.driving import command, make_workspace, run


def arguments(tmp_path, cls=LMTrainingArguments, **given):
    return cls(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **given)


@pytest.mark.parametrize(
    ("cls", "given", "expected"),
    [
        (LMTrainingArguments, {}, ("muon", 2e-3, 0.0)),
        (LMTrainingArguments, {"optim_preset": "adamw"}, ("adamw_torch_fused", 5e-4, 1.0)),
        *((LMTrainingArguments, {"optim": optim}, (optim, 5e-4, 1.0)) for optim in ("sgd", "adamw_torch_fused")),
        (LMTrainingArguments, {"learning_rate": 3.0, "max_grad_norm": 2.0}, ("muon", 3.0, 2.0)),
        (SFTTrainingArguments, {}, ("adamw_torch_fused", 1e-4, 1.0)),
        (SFTTrainingArguments, {"optim_preset": "muon"}, ("muon", 1e-4, 0.0)),
    ],
)
def test_pretraining_has_muon_and_the_other_stages_have_adamw(tmp_path, cls, given, expected):
    args = arguments(tmp_path, cls, **given)
    rate = args.learning_rate or training_arguments.default_learning_rate(args.optim_preset, 768)
    assert (optimizer_name(args), pytest.approx(rate), args.max_grad_norm) == expected


ZERO2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}, "gradient_clipping": "auto"}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("config", "max_grad_norm", "fits"),
    [
        # The shipped configs clip by --max_grad_norm, which is 0 with Muon unless the user sets it.
        *(({"zero_optimization": {"stage": stage}, "gradient_clipping": "auto"}, None, True) for stage in range(4)),
        (OFFLOADED, None, True),
        (ZERO2, 0.0, True),
        (ZERO2, 2.0, False),
        (ZERO2 | {"gradient_clipping": 0.5}, None, False),
        # DeepSpeed clips only with `gradient_clipping` in its config.
        ({"zero_optimization": {"stage": 2}}, 2.0, True),
        ({"optimizer": {"type": "AdamW"}}, None, False),
        ({"scheduler": {"type": "WarmupLR"}}, None, False),
    ],
)
def test_a_deepspeed_config_that_muon_cannot_follow_is_refused(tmp_path, config, max_grad_norm, fits):
    with nullcontext() if fits else pytest.raises(UserError):
        prepare_deepspeed_config(copy.deepcopy(config), arguments(tmp_path, max_grad_norm=max_grad_norm))
    args = arguments(tmp_path, max_grad_norm=max_grad_norm, optim_preset="adamw")
    prepare_deepspeed_config(copy.deepcopy(config), args)


def test_deepspeed_gets_what_the_optimizer_needs(tmp_path):
    clipped: dict = {}
    prepare_deepspeed_config(clipped, arguments(tmp_path, max_grad_norm=2.0, optim_preset="adamw"))
    assert clipped["gradient_clipping"] == 2.0
    config = copy.deepcopy(OFFLOADED)
    prepare_deepspeed_config(config, arguments(tmp_path))
    assert config["zero_optimization"]["reduce_scatter"] is False and config["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_needs_zero(tmp_path, precision):
    """Without ZeRO, AdamW's first step would be its second: a toy's losses then differ by 0.04 within six steps."""
    args = arguments(tmp_path)
    setattr(args, precision, True)
    for zero, fits in (({}, False), ({"stage": 0}, False), ({"stage": 1}, True)):
        with nullcontext() if fits else pytest.raises(UserError):
            prepare_deepspeed_config({"zero_optimization": zero}, args)


# As in the documentation of transformers.
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
SIZES = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
DOCUMENTED = {
    "bf16": {"enabled": "auto"},
    "optimizer": OPTIMIZER,
    "scheduler": {"type": "WarmupLR", "params": WARMUP},
    "zero_optimization": {"stage": 3},
    **dict.fromkeys(SIZES, "auto"),
}


def test_a_deepspeed_config_gets_the_settled_values(tmp_path):
    args = arguments(tmp_path, optim_preset="adamw", per_device_train_batch_size=2, gradient_accumulation_steps=8)
    args.deepspeed = copy.deepcopy(DOCUMENTED)
    args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
    held = args.hf_deepspeed_config.config
    args.hf_deepspeed_config.trainer_config_process(args)
    assert held["optimizer"]["params"]["lr"] is None
    # As `--fit_micro_batch` and the width of the model settle them.
    args.per_device_train_batch_size, args.gradient_accumulation_steps, args.learning_rate = 16, 1, 3e-4
    complete_deepspeed_config(args)
    gc.collect()
    assert is_deepspeed_zero3_enabled()
    assert (held["train_micro_batch_size_per_gpu"], held["gradient_accumulation_steps"]) == (16, 1)
    assert held["train_batch_size"] == 16
    assert held["optimizer"]["params"]["lr"] == held["scheduler"]["params"]["warmup_max_lr"] == 3e-4
    args.deepspeed["train_micro_batch_size_per_gpu"] = 2
    with pytest.raises(UserError):
        complete_deepspeed_config(args)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_deepspeed_config_of_other_projects(tmp_path):
    """Its "auto" values are those of the run, and a value that differs from the flags is named before the data."""
    workspace = make_workspace(tmp_path)

    def losses(name, *words, **changes):
        (tmp_path / f"{name}.json").write_text(json.dumps(DOCUMENTED | changes))
        given = command(workspace, tmp_path / name, "--optim_preset", "adamw", *words, launcher="deepspeed")
        place = given.index("--learning_rate")
        result = run([*given[:place], *given[place + 2 :], "--deepspeed", str(tmp_path / f"{name}.json")])
        if result.returncode:
            return result.stdout
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry]

    expected = losses("flag", "--learning_rate", str(training_arguments.default_learning_rate("adamw", 32)))
    assert losses("derived") == expected
    output = losses("differs", train_micro_batch_size_per_gpu=4, optimizer={"type": "AdamW", "params": {"lr": 3e-4}})
    assert "train_micro_batch_size_per_gpu=4, but per_device_train_batch_size=2;" in output
    assert "optimizer.params.lr=0.0003, but learning_rate=None" in output
    assert 'Set these values to "auto"' in output and "Traceback" not in output and "reading" not in output
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 5}}
    output = losses("steps", scheduler=scheduler)
    assert "scheduler.params.warmup_num_steps=5, but warmup_steps=1." in output and "Traceback" not in output

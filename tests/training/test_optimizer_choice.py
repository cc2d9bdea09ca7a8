"""The optimizer of a run: the defaults of the stages, and DeepSpeed configs that it cannot follow."""

import copy
import gc
import json
from contextlib import nullcontext

import pytest
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, is_deepspeed_zero3_enabled

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.training import training_arguments
from hf_pretrain.training.deepspeed_support import complete_deepspeed_config, prepare_deepspeed_config
from hf_pretrain.training.training_arguments import LMTrainingArguments, SFTTrainingArguments, optimizer_name
from tests.faults.driving import command, make_workspace, run
from tests.toys import toy_model
from tests.trainers import make_documents


def arguments(tmp_path, cls=LMTrainingArguments, **given):
    return cls(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **given)


@pytest.mark.parametrize(
    ("cls", "given", "expected"),
    [
        (LMTrainingArguments, {}, ("muon", 2e-3, 0.0)),
        (LMTrainingArguments, {"optim_preset": "adamw"}, ("adamw_torch_fused", 5e-4, 1.0)),
        (LMTrainingArguments, {"optim": "sgd"}, ("sgd", 5e-4, 1.0)),
        (LMTrainingArguments, {"optim": "adamw_torch_fused"}, ("adamw_torch_fused", 5e-4, 1.0)),
        (LMTrainingArguments, {"learning_rate": 3.0, "max_grad_norm": 2.0}, ("muon", 3.0, 2.0)),
        (SFTTrainingArguments, {}, ("adamw_torch_fused", 1e-4, 1.0)),
        (SFTTrainingArguments, {"optim_preset": "muon"}, ("muon", 1e-4, 0.0)),
    ],
)
def test_pretraining_has_muon_and_the_other_stages_have_adamw(tmp_path, cls, given, expected):
    args = arguments(tmp_path, cls, **given)
    rate = args.learning_rate or training_arguments.default_learning_rate(args.optim_preset, 768)
    assert (optimizer_name(args), pytest.approx(rate), args.max_grad_norm) == expected


def test_the_trainer_knows_the_width_and_refuses_muon_for_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    model = toy_model(vocab_size=64)
    assert MaskedLossTrainer(model, arguments(tmp_path), train_dataset=make_documents()).args.learning_rate == 0.048
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="--optim_preset muon trains no adapters"):
        MaskedLossTrainer(adapted, arguments(tmp_path), train_dataset=make_documents()).create_optimizer()


ZERO2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}, "gradient_clipping": "auto"}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("config", "max_grad_norm", "message"),
    [
        # The shipped configs clip by --max_grad_norm, which is 0 with Muon unless the user sets it.
        *(({"zero_optimization": {"stage": stage}, "gradient_clipping": "auto"}, None, None) for stage in range(4)),
        (OFFLOADED, None, None),
        (ZERO2, 0.0, None),
        (ZERO2, 2.0, "instead of the gradients, at 2. Leave --max_grad_norm out"),
        (ZERO2 | {"gradient_clipping": 0.5}, None, "instead of the gradients, at 0.5"),
        # DeepSpeed clips only with `gradient_clipping` in its config.
        ({"zero_optimization": {"stage": 2}}, 2.0, None),
        ({"optimizer": {"type": "AdamW"}}, None, "The `optimizer` block of the DeepSpeed config would override Muon"),
        ({"scheduler": {"type": "WarmupLR"}}, None, "The `scheduler` block .* or pass --optim_preset adamw"),
    ],
)
def test_a_deepspeed_config_that_muon_cannot_follow_is_refused(tmp_path, config, max_grad_norm, message):
    args = arguments(tmp_path, max_grad_norm=max_grad_norm)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        prepare_deepspeed_config(copy.deepcopy(config), args)
    args = arguments(tmp_path, max_grad_norm=max_grad_norm, optim_preset="adamw")
    prepare_deepspeed_config(copy.deepcopy(config), args)


def test_deepspeed_gets_what_the_optimizer_needs(tmp_path):
    clipped: dict = {}
    prepare_deepspeed_config(clipped, arguments(tmp_path, max_grad_norm=2.0, optim_preset="adamw"))
    assert clipped["gradient_clipping"] == 2.0
    config = copy.deepcopy(OFFLOADED)
    prepare_deepspeed_config(config, arguments(tmp_path))
    assert config["zero_optimization"]["reduce_scatter"] is False and config["zero_force_ds_cpu_optimizer"] is False
    with pytest.raises(ValueError, match="accelerate would replace --optim adafactor by Adam"):
        prepare_deepspeed_config(copy.deepcopy(OFFLOADED), arguments(tmp_path, optim="adafactor"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("config", [{}, {"zero_optimization": {"stage": 0}}, {"zero_optimization": {"stage": 1}}])
def test_half_precision_needs_zero(tmp_path, config, precision):
    """Without ZeRO, AdamW's first step would be its second: a toy's losses then differ by 0.04 within six steps."""
    args = arguments(tmp_path)
    setattr(args, precision, True)
    message = rf"has stage 0, and the run trains in {precision}: .* Use stage 1 \(ds_configs/zero1.json\)"
    is_refused = config != {"zero_optimization": {"stage": 1}}
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        prepare_deepspeed_config(copy.deepcopy(config), args)


# As in the documentation of transformers.
DOCUMENTED = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
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
    with pytest.raises(ValueError, match="per_gpu=2, but per_device_train_batch_size=16"):
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

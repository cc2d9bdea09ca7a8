"""The optimizer of a run: its defaults, configs that Muon cannot follow, and what a resumed run keeps."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hf_pretrain.checkpoints.manifest import write_manifest
from hf_pretrain.training import optimizer_choice
from hf_pretrain.training.arguments import DistillationTrainingArguments, LMTrainingArguments, SFTTrainingArguments
from hf_pretrain.training.deepspeed_support import check_deepspeed_optimizer
from hf_pretrain.training.optimizer_choice import keep_optimizer, use_adamw_for_adapter
from hf_pretrain.weights.adapters import AdapterArguments
from hf_pretrain.weights.model_arguments import ModelArguments


RATES = {"adamw": 0.25, "muon": 0.5}


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    monkeypatch.setattr(optimizer_choice, "default_learning_rate", lambda optimizer, hidden_size: RATES[optimizer])


def choice(args) -> tuple[str, str, float, float]:
    return str(getattr(args.optim, "value", args.optim)), args.optim_preset, args.learning_rate, args.max_grad_norm


@pytest.mark.parametrize(
    ("cls", "given", "expected"),
    [
        (LMTrainingArguments, {}, ("adamw_torch_fused", "muon", 0.5, 0.0)),
        (LMTrainingArguments, {"optim_preset": "adamw"}, ("adamw_torch_fused", "adamw", 0.25, 1.0)),
        (LMTrainingArguments, {"optim": "sgd"}, ("sgd", "adamw", 0.25, 1.0)),
        (LMTrainingArguments, {"optim": "adamw_torch_fused"}, ("adamw_torch_fused", "adamw", 0.25, 1.0)),
        (LMTrainingArguments, {"learning_rate": 3.0, "max_grad_norm": 2.0}, ("adamw_torch_fused", "muon", 3.0, 2.0)),
        (SFTTrainingArguments, {}, ("adamw_torch_fused", "adamw", 1e-4, 1.0)),
        (SFTTrainingArguments, {"optim_preset": "muon"}, ("adamw_torch_fused", "muon", 1e-4, 0.0)),
        (DistillationTrainingArguments, {}, ("adamw_torch_fused", "adamw", 1e-4, 1.0)),
    ],
)
def test_pretraining_has_muon_and_the_other_stages_have_adamw(tmp_path, cls, given, expected):
    args = cls(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    assert choice(args) == expected


ZERO2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}, "gradient_clipping": "auto"}


@pytest.mark.parametrize("preset", [None, "muon"])
@pytest.mark.parametrize(
    ("config", "max_grad_norm", "message"),
    [
        # The shipped configs clip by --max_grad_norm, which is 0 with Muon unless the user sets it.
        *(({"zero_optimization": {"stage": stage}, "gradient_clipping": "auto"}, None, None) for stage in range(4)),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, None, None),
        (ZERO2, 0.0, None),
        (ZERO2, 2.0, "instead of the gradients, at 2. Leave --max_grad_norm out"),
        (ZERO2 | {"gradient_clipping": 0.5}, None, "instead of the gradients, at 0.5"),
        # DeepSpeed clips only with `gradient_clipping` in its config.
        ({"zero_optimization": {"stage": 2}}, 2.0, None),
        ({"optimizer": {"type": "AdamW"}}, None, "The `optimizer` block of the DeepSpeed config would override Muon"),
        ({"scheduler": {"type": "WarmupLR"}}, None, "The `scheduler` block .* or pass --optim_preset adamw"),
    ],
)
def test_a_deepspeed_config_that_muon_cannot_follow_is_refused(tmp_path, config, max_grad_norm, message, preset):
    """The optimizer of a stage never depends on how the run is launched."""
    given = {"optim_preset": preset, "max_grad_norm": max_grad_norm}
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    # A real plug-in would start DeepSpeed.
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config=config)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        keep_optimizer(args, (), checkpoint=None)
    assert args.optim_preset == "muon"
    args.optim_preset = "adamw"
    check_deepspeed_optimizer(config, args)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("config", [{}, {"zero_optimization": {"stage": 0}}, {"zero_optimization": {"stage": 1}}])
def test_half_precision_needs_zero(tmp_path, config, precision):
    """Without ZeRO, AdamW's first step would be its second: a toy's losses then differ by 0.04 within six steps."""
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    check_deepspeed_optimizer(config, args)
    setattr(args, precision, True)
    message = rf"has stage 0, and the run trains in {precision}: .* Use stage 1 \(ds_configs/zero1.json\)"
    is_refused = config != {"zero_optimization": {"stage": 1}}
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        check_deepspeed_optimizer(config, args)


@pytest.mark.parametrize(
    ("given", "saved", "expected"),
    [
        # A run of an earlier version had AdamW by default.
        ({}, ("adamw_torch_fused", 0.125, 1.0), ("adamw", 0.125, 1.0)),
        ({}, ("muon", 0.125, 1.0), ("muon", 0.125, 1.0)),
        ({"learning_rate": 3.0}, ("adamw_torch_fused", 0.125, 1.0), ("adamw", 3.0, 1.0)),
        ({"optim_preset": "muon"}, ("adamw_torch_fused", 0.125, 1.0), ("muon", 0.125, 1.0)),
        # Another program wrote the checkpoint.
        ({}, None, ("adamw", 0.25, 1.0)),
    ],
)
def test_a_resumed_run_keeps_the_optimizer_of_its_checkpoint(tmp_path, given, saved, expected):
    args = LMTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, **given)
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    if saved is not None:
        settings = dict(zip(("learning_rate", "max_grad_norm", "weight_decay"), (*saved[1:], 7.0), strict=True))
        write_manifest(checkpoint, {"optimizer": saved[0], "settings": settings})
    keep_optimizer(args, (), checkpoint=str(checkpoint))
    assert choice(args)[1:] == expected and args.weight_decay == 0.1


def test_an_adapter_is_trained_with_adamw(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a"})
    )
    new = (ModelArguments(), AdapterArguments(use_peft=True))
    loaded = (ModelArguments(model_name_or_path=str(tmp_path / "adapter")), AdapterArguments())
    for others, preset in ((new, "adamw"), (loaded, "adamw"), ((ModelArguments(), AdapterArguments()), "muon")):
        args = LMTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False)
        keep_optimizer(args, others, checkpoint=None)
        assert choice(args)[1:] == ((preset, RATES[preset], 0.0 if preset == "muon" else 1.0))


def test_adapters_are_trained_with_adamw(tmp_path):
    """In a notebook, nothing names the adapter before the trainer gets the model."""
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    use_adamw_for_adapter(args)
    assert choice(args) == ("adamw_torch_fused", "adamw", 0.25, 1.0)
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, optim_preset="muon")
    with pytest.raises(ValueError, match="--optim_preset muon is not possible, because the run trains an adapter"):
        use_adamw_for_adapter(args)


def test_a_resumed_run_keeps_another_optimizer(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    write_manifest(tmp_path, run={"optimizer": "adafactor", "settings": {"learning_rate": 0.75, "max_grad_norm": 4.0}})
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    keep_optimizer(args, [], checkpoint=str(tmp_path))
    assert choice(args) == ("adafactor", "adamw", 0.75, 4.0)

"""The optimizer of a run: its defaults, where Muon is not possible, and what a resumed run keeps."""

import json
from types import SimpleNamespace

import pytest

from hf_pretrain.checkpoints.manifest import write_manifest
from hf_pretrain.training import optimizer_choice
from hf_pretrain.training.arguments import DistillationTrainingArguments, LMTrainingArguments, SFTTrainingArguments
from hf_pretrain.training.optimizer_choice import choose_optimizer, keep_optimizer, use_adamw_for_adapter
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
    assert choice(args) == expected and args.why_adamw is None


def launched(config, **given) -> SimpleNamespace:
    """Return arguments with a DeepSpeed config. The real ones would start DeepSpeed."""
    names = ("optim", "optim_preset", "learning_rate", "max_grad_norm", "why_adamw")
    return SimpleNamespace(deepspeed=config, default_optim_preset="muon", **dict.fromkeys(names) | given)


OBSTACLES = {
    "ZeRO-3": ({"zero_optimization": {"stage": 3}}, "ZeRO-3 shards the matrices"),
    "offload": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "has `offload_optimizer`",
    ),
    "optimizer": ({"optimizer": {"type": "AdamW"}}, "the `optimizer` block"),
    "scheduler": ({"scheduler": {"type": "WarmupLR"}}, "the `scheduler` block"),
    "clipping": ({"gradient_clipping": 0.5}, "instead of the gradients, at 0.5"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_adamw_trains_where_muon_is_not_possible(name):
    config, reason = OBSTACLES[name]
    args = launched(config)
    choose_optimizer(args)
    assert choice(args) == ("adamw_torch_fused", "adamw", 0.25, 1.0) and reason in args.why_adamw
    with pytest.raises(ValueError, match=f"--optim_preset muon is not possible, because .*{reason}"):
        choose_optimizer(launched(config, optim_preset="muon"))


def test_an_explicit_clipping_turns_muon_off_under_deepspeed_only():
    zero2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}, "gradient_clipping": "auto"}
    # DeepSpeed clips only with `gradient_clipping` in its config.
    without = {"zero_optimization": {"stage": 2}}
    cases = ((zero2, None, "muon"), (zero2, 0.0, "muon"), (zero2, 2.0, "adamw"), (without, 2.0, "muon"))
    for config, limit, preset in cases:
        args = launched(config, max_grad_norm=limit)
        choose_optimizer(args)
        assert (args.optim_preset, args.max_grad_norm) == (preset, limit or 0.0)
    with pytest.raises(ValueError, match="at 2. Leave --max_grad_norm out"):
        choose_optimizer(launched(zero2, max_grad_norm=2.0, optim_preset="muon"))


@pytest.mark.parametrize(("stage", "preset"), [("2", "muon"), ("3", "adamw")])
def test_the_config_of_accelerate_counts_too(monkeypatch, stage, preset):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
    args = launched(None)
    choose_optimizer(args)
    assert args.optim_preset == preset


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
    assert (str(checkpoint) in (args.why_adamw or "")) == (args.optim_preset == "adamw")


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
    assert choice(args) == ("adamw_torch_fused", "adamw", 0.25, 1.0) and "adapter" in args.why_adamw
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, optim_preset="muon")
    with pytest.raises(ValueError, match="--optim_preset muon is not possible, because the run trains an adapter"):
        use_adamw_for_adapter(args)


def test_a_resumed_run_keeps_another_optimizer(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    write_manifest(tmp_path, run={"optimizer": "adafactor", "settings": {"learning_rate": 0.75, "max_grad_norm": 4.0}})
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    keep_optimizer(args, [], checkpoint=str(tmp_path))
    assert choice(args) == ("adafactor", "adamw", 0.75, 4.0)

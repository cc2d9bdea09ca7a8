"""The command line: defaults, YAML files and refused values."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from hf_pretrain.loading.model import load_config, load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.runtime.devices import has_bfloat16_units
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.training import parsing
from hf_pretrain.training import training_arguments as training_args
from hf_pretrain.training.launch import check_accumulation, name_compile_locks
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.training_arguments import LMTrainingArguments, values_by_name
from tests.trainers import parse, small_tokenizer


def test_the_example_in_a_file_is_not_for_other_data(tmp_path, capfd):
    config = {"train_fraction": 0.4, "example": {"train_fraction": 0.6}}
    own = ["--dataset_name", "mine.jsonl"]
    for words, expected in (([], 0.6), (own, 0.4), ([*own, "--train_fraction", "0.5"], 0.5)):
        assert parse(tmp_path, *words, config=config)[1].train_fraction == expected
    for wrong in ({"example": "a.jsonl"}, {"mixed_in": "a.jsonl"}, {"mixed_in": ["a.jsonl", "half"]}):
        with pytest.raises(UserError):
            parse(tmp_path, config=wrong)
    mixed = parse(tmp_path, *own, config={"mixed_in": ["a.jsonl", 0.25]})[1]
    assert (mixed.dataset_name, mixed.dataset_weights) == (["mine.jsonl", "a.jsonl"], [0.75, 0.25])
    two = parse(tmp_path, "--dataset_name", "b.jsonl", "c.jsonl", config={"mixed_in": ["a.jsonl", 0.25]})[1]
    assert (two.dataset_name, two.dataset_weights) == (["b.jsonl", "c.jsonl"], None)
    assert "leaving out a.jsonl: there are several names in --dataset_name" in capfd.readouterr().err
    # The user's names of columns fit the user's files alone.
    named = {"mixed_in": ["a.jsonl", 0.25], "eval_dataset_name": "b.jsonl"}
    data = parse(tmp_path, *own, "--columns", "text=body", config=named)[1]
    assert (data.dataset_name, data.dataset_weights, data.eval_dataset_name) == (["mine.jsonl"], None, None)
    assert "leaving out a.jsonl: there are several names in --dataset_name, or --columns" in capfd.readouterr().err


def test_the_keys_of_a_file_win_over_the_example_of_its_parent(tmp_path):
    example = {"dataset_name": "a.jsonl", "train_fraction": 0.6, "max_length": 64}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"example": example}))
    for own, expected in (
        ({}, (["a.jsonl"], 0.6)),
        ({"train_fraction": 0.9}, (["a.jsonl"], 0.9)),
        ({"dataset_name": "b.jsonl"}, (["b.jsonl"], 1.0)),
        ({"example": {"train_fraction": 0.3}}, (["a.jsonl"], 0.3)),
    ):
        data = parse(tmp_path, config={"extends": "base.yaml"} | own)[1]
        assert (data.dataset_name, data.train_fraction) == expected, own


def test_data_in_a_file_lie_beside_it_or_in_the_working_directory(tmp_path, monkeypatch):
    for directory in ("presets", "work", "data"):
        (tmp_path / directory).mkdir()
    (tmp_path / "data/a.jsonl").touch()
    (tmp_path / "presets/base.yaml").write_text("eval_dataset_name: ../data/a.jsonl")
    names = ["../data/a.jsonl", "b.jsonl", "embedded", "owner/name", str(tmp_path / "c.jsonl")]
    content = {"extends": "base.yaml", "example": {"dataset_name": names}, "output_dir": "../data"}
    (tmp_path / "presets/mine.yaml").write_text(yaml.safe_dump(content))
    for directory, config in ((tmp_path / "work", "../presets/mine.yaml"), (tmp_path, "presets/mine.yaml")):
        monkeypatch.chdir(directory)
        _, data, training = parse_args(ModelArguments, DataArguments, LMTrainingArguments, argv=["--config", config])
        found = Path(data.dataset_name[0])
        assert found.samefile(tmp_path / "data/a.jsonl") and data.eval_dataset_name == [str(found)]
        assert data.dataset_name[1:] == names[1:] and training.output_dir == "../data"


def test_yaml_gives_defaults_and_the_command_line_wins(tmp_path):
    config = {"learning_rate": 2e-3, "lr_scheduler_kwargs": {"min_lr_rate": 0.2}, "bf16": False, "max_steps": -1}
    texts = {"learning_rate": "2e-3", "max_length": 64, "dataset_name": ["a.jsonl", "b.jsonl"]}
    _, data, training = parse(tmp_path, "--max_length", "128", config=config | texts)
    assert (data.max_length, data.dataset_name) == (128, ["a.jsonl", "b.jsonl"])
    assert vars(training).items() >= config.items()


@pytest.mark.parametrize(
    ("words", "extra", "has_units", "steps"),
    [
        ([], {}, True, 900),
        ([], {}, False, 300),
        (["--bf16", "false"], {}, True, 300),
        (["--bf16"], {"bf16": False}, False, 900),
        ([], {"bf16": False}, True, 300),
        (["--max_steps", "7"], {}, False, 7),
    ],
)
def test_a_value_of_a_yaml_file_can_depend_on_the_precision(tmp_path, monkeypatch, words, extra, has_units, steps):
    for module in (parsing, training_args):
        monkeypatch.setattr(module, "has_bfloat16_units", lambda device_type: has_units)
    config = {"max_steps": {"bf16": 900, "float32": 300}} | extra
    assert parse(tmp_path, *words, config=config)[2].max_steps == steps


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["--num_train_epochs", "2"], (2, -1, None)),
        (["--num_train_epochs", "2", "--max_steps", "3"], (2, 3, None)),
        (["--max_steps", "3"], (1, 3, None)),
        (["--max_minutes", "3"], (1, 9, 3)),
        # a value that is the name of a flag
        (["--run_name", "num_train_epochs"], (1, 9, None)),
    ],
)
def test_the_command_line_says_when_a_run_ends(tmp_path, words, ends):
    config = {"max_steps": 9, "num_train_epochs": 1}
    config |= {} if "--run_name" in words else {"max_tokens": "1M", "train_fraction": 0.5}
    _, data, args = parse(tmp_path, "--use_cpu", *words, config=config)
    assert (args.num_train_epochs, args.max_steps, args.max_minutes) == ends and args.max_tokens is None
    assert data.train_fraction == (1.0 if ends[0] == 2 or "--run_name" in words else 0.5)


def test_compile_options_apply_only_to_the_layers(tmp_path):
    args = parse(tmp_path, "--use_cpu", "--torch_compile_backend", "eager")[2]
    assert args.compiles_layers and args.compile_options == {"backend": "eager"} and not args.torch_compile
    recorded = values_by_name(args, [])
    assert recorded["torch_compile"] is True and recorded["torch_compile_backend"] == "eager"
    args = parse(tmp_path, "--use_cpu", "--torch_compile", "false", "--torch_compile_mode", "default")[2]
    assert not args.compiles_layers and not args.torch_compile and values_by_name(args, [])["torch_compile"] is False


@pytest.mark.parametrize(
    ("kind", "uses_deepspeed", "expected"),
    [("cuda", "false", True), ("cuda", "true", False), ("mps", "false", False), (None, "false", False)],
)
def test_layers_are_compiled_by_default_on_cuda_without_deepspeed(
    tmp_path, monkeypatch, kind, uses_deepspeed, expected
):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", uses_deepspeed)
    accelerator = torch.device(kind) if kind else None
    # Simulate torch on a machine with such a device.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    # Without bfloat16, CUDA would take float16, which the CPU of this test refuses.
    args = parse(tmp_path, *(["--bf16", "false"] if kind == "cuda" else []))[2]
    assert args.compiles_layers is expected and args.bf16 is (kind is None and has_bfloat16_units("cpu"))
    assert args.dataloader_pin_memory is (kind == "cuda")


def test_a_yaml_extends_another_one(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/first.yaml").write_text("learning_rate: 1\nmax_steps: 7\nwarmup_steps: 3")
    (tmp_path / "base/second.yaml").write_text("extends: first.yaml\nlearning_rate: 2")
    training = parse(tmp_path, "--use_cpu", "--warmup_steps", "4", config={"extends": "base/second.yaml"})[2]
    assert (training.learning_rate, training.max_steps, training.warmup_steps) == (2.0, 7, 4)


@pytest.mark.parametrize("asked", ["bf16", "no"])
@pytest.mark.parametrize("has_units", [True, False])
def test_accelerate_launch_chooses_the_precision_and_the_cpu(tmp_path, monkeypatch, asked, has_units):
    # What `accelerate launch --cpu` sets, beside the precision.
    defaults = {"MIXED_PRECISION": asked, "DYNAMO_BACKEND": "NO", "DYNAMO_MODE": "default", "USE_CPU": "True"}
    for name, value in defaults.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setattr(training_args, "has_bfloat16_units", lambda _: has_units)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    training = parse(tmp_path)[-1]
    # `no` is the launcher's default, so the recipe decides.
    assert training.bf16 == (asked == "bf16" or has_units)
    assert training.mixed_precision == ("bf16" if training.bf16 else "no")
    assert training.use_cpu and training.device.type == "cpu" and not training.compiles_layers


@pytest.mark.parametrize(
    ("tp_size", "qk_norm", "accumulation"), [(2, True, 2), (None, True, 2), (2, False, 2), (2, True, 1)]
)
def test_tensor_parallelism_does_not_accumulate_the_gradients_of_head_norms(tmp_path, tp_size, qk_norm, accumulation):
    args = parse(tmp_path, "--use_cpu", "--gradient_accumulation_steps", str(accumulation))[2]
    model = SimpleNamespace(tp_size=tp_size, config=SimpleNamespace(qk_norm=qk_norm))
    refused = (tp_size, qk_norm, accumulation) == (2, True, 2)
    with pytest.raises(UserError) if refused else nullcontext():
        check_accumulation(args, model)


def test_load_model_takes_preset_overrides_and_special_tokens():
    arguments = ModelArguments(model_preset="tiny", config_overrides="num_hidden_layers=1,dim=96,vocab_size=320")
    model = load_model(arguments, small_tokenizer())
    expected = {"num_hidden_layers": 1, "hidden_size": 96, "vocab_size": 320, "_attn_implementation": "packed"}
    expected |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    assert {name: getattr(model.config, name) for name in expected} == expected and model.dtype == torch.float32


def test_the_model_gets_the_vocab_size_of_a_tokenizer_trained_here():
    for others, expected in (({}, 8000), ({"tokenizer_name_or_path": "somewhere"}, 6400)):
        arguments = ModelArguments(model_preset="tiny", vocab_size=8000, **others)
        assert load_config(arguments, small_tokenizer(), None).vocab_size == expected


def test_overrides_may_be_nested():
    overrides = "num_hidden_layers=2, rope_parameters={rope_type: yarn, factor: 2.0, rope_theta: 1e4}"
    config = load_config(ModelArguments(model_preset="tiny", config_overrides=overrides), small_tokenizer(), None)
    assert config.num_hidden_layers == 2
    expected = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    assert config.rope_parameters.items() >= expected.items()


def test_the_lock_of_a_killed_compile_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    lock = tmp_path / "deepspeed_shm_comm/lock"
    lock.touch()
    with caplog.at_level("WARNING"):
        name_compile_locks()
    assert f"{lock}" in caplog.text and "delete it" in caplog.text

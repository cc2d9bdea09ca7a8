"""
Compare the pretraining recipe under every kind of sharding with one process. `test_recipes.py` starts the launchers.

A run has six steps with a global batch of 8 over 9 rows. Each of its three epochs ends with a step of a single row, in
which the other rank has no labels.
"""

import random
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_pretrain.data.documents import load_documents
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT, Run, run_probe
from tests.toys import EXPERTS, toy_model, write_jsonl


pytestmark = pytest.mark.distributed

DEEPSPEED = {path.stem: ["--deepspeed", str(path)] for path in sorted((ROOT / "ds_configs").glob("*.json"))}
LAUNCHES = {
    "DDP": ("torchrun", []),
    "FSDP2": ("torchrun", ["--fsdp_size", "2"]),
    "TP": ("torchrun", ["--tp_size", "2"]),
    **{name: ("deepspeed", words) for name, words in DEEPSPEED.items()},
}
SGD = ["--optim", "sgd", "--learning_rate", "0.1", "--max_grad_norm", "0", "--weight_decay", "0"]
ADAMW = ["--optim_preset", "adamw", "--learning_rate", "1e-3"]
MUON = ["--learning_rate", "1e-3"]
# Runs that report a spike, which changes no number.
SPIKED = dict.fromkeys(("DDP", "FSDP2", "zero2", "zero3"), {"PLANT_SPIKE": "1"})


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Return a directory with two toy models, their tokenizer, and sentences of uneven length."""
    path = tmp_path_factory.mktemp("launchers")
    generator = random.Random(0)
    words = ["river", "stone", "green", "light", "walks", "under", "seven", "quiet", "birds", "home", "far", "to"]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 18))) for _ in range(10)]
    tokenizer = train_tokenizer(texts * 20, vocab_size=320)
    sizes = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "intermediate_size": 64, "qk_norm": True}
    for name, experts in (("dense", {}), ("moe", EXPERTS)):
        toy_model(**sizes, **experts).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    write_jsonl(path / "train.jsonl", texts)
    train_documents, _ = load_documents([str(path / "train.jsonl")], Reading(validation_fraction=0.2))
    assert len(train_documents) == 9
    return path


@pytest.fixture(scope="module")
def launch(workspace):
    """Return a function that runs each launch once and caches its results."""
    runs: dict[tuple, Run] = {}

    def run(model: str, way: str, arguments: list[str], **environment: str) -> Run:
        launcher, sharding = LAUNCHES[way] if way in LAUNCHES else (way, [])
        key = (model, way, *arguments, *environment)
        if key not in runs:
            # Tensor-parallel ranks share their rows.
            batch = ["8", "1"] if launcher == "python" or way == "TP" else ["2", "2"]
            words = [
                *("--model_name_or_path", str(workspace / model), "--dataset_name", str(workspace / "train.jsonl")),
                *("--packing", "none", "--max_length", "32", "--validation_fraction", "0.2"),
                *("--max_steps", "6", "--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"),
                *("--per_device_train_batch_size", batch[0], "--gradient_accumulation_steps", batch[1]),
                *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--disable_tqdm", "true"),
                *([] if "--bf16" in arguments else ["--bf16", "false"]),
            ]
            output_dir = workspace / f"run{len(runs)}"
            runs[key] = run_probe(launcher, [*words, *sharding, *arguments], output_dir, **environment)
        return runs[key]

    return run


def assert_same_steps(run: Run, reference: Run):
    assert len(run.steps) == len(reference.steps) == 6
    for step, expected in zip(run.steps, reference.steps, strict=True):
        for key in [key for key in ("loss", "ce_loss", "aux_loss") if key in expected]:
            assert step[key] == pytest.approx(expected[key], abs=1e-5), (key, step["step"])
        if "grad_norm" in step:
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), step["step"]
        assert step["num_input_tokens_seen"] == expected["num_input_tokens_seen"]
    assert run.eval_loss == pytest.approx(reference.eval_loss, abs=1e-5)


def assert_same_weights(run: Run, reference: Run):
    assert run.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=5e-6, msg=name)


@pytest.mark.parametrize(
    ("model", "way"),
    [*(("moe", way) for way in LAUNCHES if "offload" not in way), ("dense", "TP")],
)
def test_losses_gradient_norms_and_weights_agree(launch, model, way):
    """AdamW hides a wrong gradient scale; SGD without clipping shows it in the weights."""
    reference, run = launch(model, "python", SGD), launch(model, way, SGD, **SPIKED.get(way, {}))
    assert ("aux_loss" in reference.steps[0]) == (model == "moe")
    assert_same_steps(run, reference)
    assert_same_weights(run, reference)
    # DeepSpeed's stage 0 in float32 reports no norm of the gradients.
    assert ("grad_norm" in run.steps[0]) == (way != "zero0")
    assert run.pos_cis_intact == [True, True]


def test_the_checks_notice_a_doubled_gradient(launch):
    reference, run = launch("moe", "python", SGD), launch("moe", "DDP", SGD, DOUBLE_GRADIENT="1")
    assert run.steps[0]["loss"] == pytest.approx(reference.steps[0]["loss"], abs=1e-5)
    with pytest.raises(AssertionError):
        assert run.steps[0]["grad_norm"] == pytest.approx(reference.steps[0]["grad_norm"], rel=1e-4)
    with pytest.raises(AssertionError):
        assert_same_weights(run, reference)


@pytest.mark.parametrize("way", ["DDP", "FSDP2", "zero2", "zero3_offload"])
def test_clipping_and_adamw_agree(launch, way):
    assert_same_steps(launch("moe", way, ADAMW), launch("moe", "python", ADAMW))


@pytest.mark.parametrize("way", ["DDP", "FSDP2", "TP", "zero1", "zero2_offload", "zero3_offload"])
def test_muon_is_the_default_and_agrees(launch, way):
    """Agree within the rounding of Muon's bfloat16 iteration. AdamW's weights are much farther away."""
    reference, run = launch("moe", "python", MUON), launch("moe", way, MUON)
    assert "muon, learning rate 0.001" in reference.output and "muon, learning rate 0.001" in run.output
    for step, expected in zip(run.steps, reference.steps, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=2e-3)
        # DeepSpeed has no norm of the gradients, only one of Muon's updates.
        assert ("grad_norm" in step) != ("zero" in way)
        if "grad_norm" in step:
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    adamw = launch("moe", "python", ADAMW)
    for name, weight in reference.weights.items():
        if "_proj" in name:
            difference, distance = (run.weights[name] - weight).norm(), (adamw.weights[name] - weight).norm()
            assert difference < 0.1 * distance, name


@pytest.mark.parametrize("way", ["DDP", "zero3"])
def test_bf16_agrees_roughly_and_saves_float32(launch, way):
    reference, run = launch("dense", "python", SGD), launch("dense", way, [*SGD, "--bf16", "true"])
    assert run.pos_cis_intact == [True, True]
    assert run.weights.keys() == reference.weights.keys()
    for weight in run.weights.values():
        # The weights have digits that bf16 cannot hold.
        assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
    for step, expected in zip(run.steps, reference.steps, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-2)
        assert step["loss"] != expected["loss"]


@pytest.mark.parametrize("way", ["DDP", "FSDP2", "zero2", "zero3"])
def test_dense_models_agree_and_end_in_the_dtype_of_save_dtype(launch, workspace, way):
    run = launch("dense", way, [*SGD, "--save_dtype", "float16", "--save_strategy", "steps", "--save_steps", "6"])
    directory = max(workspace.glob("run*"), key=lambda path: path.stat().st_ctime)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float16 and model.config.dtype == torch.float16
    exact = load_file(directory / "checkpoint-6/model.safetensors")
    assert exact.keys() == run.weights.keys()
    for name, weight in exact.items():
        assert weight.dtype == torch.float32 and torch.equal(run.weights[name], weight.half()), name
    reference = launch("dense", "python", SGD)
    assert_same_steps(run, reference)
    assert_same_weights(replace(run, weights=exact), reference)
    assert run.pos_cis_intact == [True, True]


@pytest.mark.parametrize("way", SPIKED)
def test_spikes_agree_and_change_nothing(launch, way):
    """Compare also the row with the highest loss, which only one rank has. The test above compares the numbers."""
    found = []
    for name in (way, "python"):
        run = launch("moe", name, SGD, PLANT_SPIKE="1")
        pattern = r"spike at step 5: loss (\S+) .*?, gradient norm (\S+) .*? loss, (\S+): (.*?)\. More in"
        ((*values, text),) = re.findall(pattern, run.output)
        found.append((list(map(float, values)), text))
    assert_same_steps(run, launch("moe", "python", SGD))
    assert_same_weights(run, launch("moe", "python", SGD))
    (values, text), (expected, expected_text) = found
    assert values == pytest.approx(expected, rel=1e-3) and text == expected_text


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_skipped_updates_agree(launch, way):
    skipping = [*SGD, "--skip_spikes", "true"]
    run, reference = (launch("moe", name, skipping, PLANT_SPIKE="1") for name in (way, "python"))
    assert "its update was skipped" in run.output
    assert_same_steps(run, reference)
    assert_same_weights(run, reference)
    assert run.steps[5]["loss"] != pytest.approx(launch("moe", "python", SGD).steps[5]["loss"], abs=1e-3)


def test_streams_agree(launch):
    """Make three passes over a stream whose length is no multiple of the global batch."""
    streamed = [*SGD, "--streaming", "true"]
    assert_same_steps(launch("moe", "DDP", streamed), launch("moe", "python", streamed))

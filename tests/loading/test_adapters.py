"""Adapters compared with their written-out formula, saved, resumed, merged, pushed, and under every launcher."""

import json
import re
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.func import functional_call

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.checkpoints.writer import write_model
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter, load_adapter
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights import adapted_model
from hf_pretrain.weights.upstream_lora import load_merged
from tests.conftest import GENERATIONS
from tests.hub_server import HubServer
from tests.invariants.launching import ROOT, run_probe, start
from tests.invariants.test_launchers_agree import assert_same_steps, workspace  # noqa: F401
from tests.models import saved_model
from tests.toys import LikeMPS
from tests.trainers import make_documents, make_trainer, train


@pytest.fixture
def named(tmp_path):
    """Return a function that saves a toy model of a generation, and loads it from its directory."""
    return lambda generation, **overrides: saved_model(tmp_path / "base", **GENERATIONS[generation], **overrides)


def adapt(model: MiniMindForCausalLM, **arguments):
    """Return the model with an adapter of rank 4 and random weights that are not zero."""
    adapted = add_adapter(model, AdapterArguments(use_peft=True, lora_r=4, lora_alpha=8, **arguments))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return adapted


def written_out_deltas(adapter: dict[str, torch.Tensor], base: dict[str, torch.Tensor], scale: float):
    """Return `scale * B @ A` for each adapted weight of `base`, and for each expert of stacked experts."""
    deltas = {}
    for name in (name for name in adapter if ".lora_B." in name):
        a, b = adapter[name.replace(".lora_B.", ".lora_A.")], adapter[name]
        target = name.split("base_model.model.")[1].split(".lora_B.")[0] + ".weight"
        if target not in base:
            # peft wraps the first stack of experts (gate_up_proj) inside the second one.
            stem = target.removesuffix(".weight")
            inner = stem.endswith(".base_layer")
            target = stem.removesuffix(".base_layer") + (".gate_up_proj" if inner else ".down_proj")
            num_experts = base[target].shape[0]
            experts = zip(a.chunk(num_experts), b.unflatten(1, (-1, num_experts)).unbind(-1), strict=True)
            deltas[target] = torch.stack([scale * b_of @ a_of for a_of, b_of in experts])
        else:
            deltas[target] = scale * b @ a
    return deltas


@pytest.mark.parametrize("generation", GENERATIONS)
def test_logits_and_gradients_follow_the_formula(named, input_ids, generation):
    model = named(generation)
    base = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapted = adapt(model)
    loss = adapted(input_ids, labels=input_ids).loss
    loss.backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)

    leaves = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    deltas = written_out_deltas(leaves, base, scale=8 / 4)
    projections = {name for name in base if "_proj" in name}
    assert deltas.keys() == projections
    weights = {name: base[name] + deltas.get(name, 0) for name in base if name != "lm_head.weight"}
    plain = MiniMindForCausalLM(model.config)
    expected = functional_call(plain, weights, (input_ids,), {"labels": input_ids}, tie_weights=True)
    expected.loss.backward()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-6)
    for name, leaf in leaves.items():
        assert leaf.grad.abs().max() > 0, name
        torch.testing.assert_close(trained[name].grad, leaf.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("generation", "arguments"),
    [
        *((generation, {}) for generation in GENERATIONS),
        ("v1", {"use_dora": True, "lora_dropout": 0.1}),
        ("v1-moe", {"use_dora": True, "lora_target_modules": ["q_proj", "gate_proj"]}),
    ],
)
def test_a_saved_and_a_merged_adapter_give_the_same_model(named, input_ids, tmp_path, generation, arguments):
    adapted = adapt(named(generation), **arguments).eval()
    with torch.no_grad():
        expected = adapted(input_ids).logits
        assert (expected - named(generation)(input_ids).logits).abs().max() > 1e-2
        adapted.save_pretrained(tmp_path / "adapter")
        merged, _ = load_merged(str(tmp_path / "adapter"))
        assert type(merged) is MiniMindForCausalLM
        torch.testing.assert_close(merged(input_ids).logits, expected, rtol=0, atol=1e-5)
        # The merged model is also saved as a full checkpoint.
        merged.save_pretrained(tmp_path / "merged")
        again = MiniMindForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(again(input_ids).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("samples", [True, False])
def test_a_merged_adapter_generates_as_its_run_trained_it(named, tmp_path, samples):
    """Fine-tuning an adapter of a base model makes a chat model, which `chat` recognises by these settings."""
    adapted = adapt(named("v1"))
    base = adapted.get_base_model()
    base.generation_config.do_sample = samples
    write_model(str(tmp_path / "adapter"), adapted, None, None, is_writer=True)
    assert load_merged(str(tmp_path / "adapter"))[0].generation_config.do_sample is samples
    assert not MiniMindForCausalLM.from_pretrained(tmp_path / "base").generation_config.do_sample
    (tmp_path / "adapter/generation_config.json").write_text("{")
    with pytest.raises(OSError):
        load_merged(str(tmp_path / "adapter"))


def test_only_asked_for_adapters_are_added_and_zero3_adapts_linear_layers(named, monkeypatch):
    model = named("v1")
    assert add_adapter(model, AdapterArguments()) is model
    monkeypatch.setattr(adapted_model, "is_deepspeed_zero3_enabled", lambda: True)
    add_adapter(named("v1-moe"), AdapterArguments(use_peft=True, lora_target_modules=["q_proj"]))


def test_training_continues_an_adapter(named, tmp_path, input_ids):
    tokenizer = train_tokenizer(["a few words of text"] * 5, vocab_size=300)
    model_args = ModelArguments(model_name_or_path=str(tmp_path / "adapter"))
    adapted = adapt(named("v1-moe", vocab_size=300))
    adapted.save_pretrained(tmp_path / "adapter")
    model = load_model(model_args, tokenizer)
    assert add_adapter(model, AdapterArguments(use_peft=True, lora_r=64)) is model
    torch.testing.assert_close(model(input_ids).logits, adapted(input_ids).logits, rtol=0, atol=1e-6)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, p in adapted.named_parameters() if p.requires_grad
    }


# Trainer


@pytest.mark.parametrize("generation", ["v1", "v1-moe"])
def test_the_trainer_trains_saves_and_resumes_the_adapter_alone(named, tmp_path, generation):
    rows = make_documents(weighted=True)
    arguments = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "learning_rate": 1e-2}

    def build(name: str, **kwargs):
        torch.manual_seed(3)
        adapted = add_adapter(named(generation), AdapterArguments(use_peft=True, lora_r=4))
        return make_trainer(tmp_path / name, rows, model=adapted, arguments=arguments, **kwargs)

    whole = build("whole", batch=8)
    frozen = {name: p.clone() for name, p in whole.model.named_parameters() if not p.requires_grad}
    first = {name: p.clone() for name, p in whole.model.named_parameters() if p.requires_grad}
    with LikeMPS():
        steps = train(whole)
        assert whole.evaluate()["eval_loss"] > 0
    for name, parameter in whole.model.named_parameters():
        same = torch.equal(parameter, frozen[name] if name in frozen else first[name])
        assert same == (name in frozen), name

    # Any accumulation gives the gradients of one big batch.
    for step, expected in zip(train(build("accumulated", batch=2, accumulation=4)), steps, strict=True):
        for key in ("loss", "ce_loss", "grad_norm"):
            assert step[key] == pytest.approx(expected[key], rel=2e-4), key

    checkpoint = tmp_path / "whole/checkpoint-3"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt"} <= names
    assert not [name for name in names if name.endswith(".py") or name in ("model.safetensors", "README.md")]
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32} and len(saved) == len(first)

    resumed = build("resumed", batch=8)
    with LikeMPS():
        resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name


# Recipes


@pytest.fixture
def toy_run(workspace):  # noqa: F811
    words = "--packing none --max_length 32 --validation_fraction 0.2 --max_steps 6 --lr_scheduler_type constant "
    words += "--warmup_steps 0 --logging_steps 1 --learning_rate 1e-2 --eval_strategy no --save_strategy no "
    words += f"--disable_tqdm true --use_peft --lora_r 4 --optim_preset adamw --dataset_name {workspace}/train.jsonl"
    return lambda model, *more: ["--model_name_or_path", str(model), *words.split(), *more]


PULL = """
import sys, torch
sys.modules["hf_pretrain"] = None  # as where it is not installed
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained("user/adapter", trust_remote_code=True).eval()
AutoTokenizer.from_pretrained("user/adapter")
torch.save(model(torch.arange(20)[None]).logits, sys.argv[1])
"""


@pytest.mark.slow
def test_an_adapter_is_pushed_pulled_and_merged(toy_run, workspace, tmp_path):  # noqa: F811
    with HubServer() as server:

        def run(*words: str, **options: bool) -> str:
            result = start([sys.executable, *words], **options, **server.client_environment())
            assert result.returncode == 0, result.stdout[-3000:]
            return result.stdout

        push = "import sys; from hf_pretrain.hub.pushing import *; "
        push += "create_repository(sys.argv[2]); push_folder(*sys.argv[1:])"
        run("-c", push, str(workspace / "moe"), "user/base")
        words = ["--push_to_hub", "--hub_model_id", "user/adapter", "--output_dir", str(tmp_path / "run")]
        output = run(str(ROOT / "recipes/pretrain.py"), *toy_run("user/base", *words, "--bf16", "false"))
        assert re.search(r"^Optimizer +adamw_torch_fused", output, re.MULTILINE)

        files = set(server.repos["user/adapter"].files) - {".gitattributes"}
        assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= files
        assert not [name for name in files if name.endswith(".py") or name in ("model.safetensors", "config.json")]
        card = ModelCard(server.repos["user/adapter"].files["README.md"].decode())
        metadata = card.data.to_dict()
        assert (metadata["base_model"], metadata["library_name"]) == ("user/base", "peft")
        trained = sum(tensor.numel() for tensor in load_file(tmp_path / "run/adapter_model.safetensors").values())
        whole = sum(p.numel() for p in MiniMindForCausalLM.from_pretrained(workspace / "moe").parameters())
        assert f"| adapter | {trained:,} parameters, rank" in card.text
        assert f"| parameters | {whole:,} |" in card.text
        assert "The code comes with the base model" in card.text

        logits_path = tmp_path / "logits.pt"
        run("-c", PULL, str(logits_path), fresh=True)
        run(str(ROOT / "recipes/convert.py"), "--from", "user/adapter", "--to", str(tmp_path / "merged"))
    logits = torch.load(logits_path)
    base = MiniMindForCausalLM.from_pretrained(workspace / "moe")
    ids = torch.arange(20)[None]
    local = load_adapter(base, tmp_path / "run").eval()
    torch.testing.assert_close(local(ids).logits, logits, rtol=0, atol=1e-5)
    merged = MiniMindForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, logits, rtol=0, atol=1e-5)
    assert (logits - MiniMindForCausalLM.from_pretrained(workspace / "moe")(ids).logits).abs().max() > 1e-2
    assert (tmp_path / "merged/tokenizer.json").is_file()
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["base_model_name_or_path"] == "user/base"


@pytest.mark.distributed
@pytest.mark.slow
def test_losses_agree_under_every_launcher(toy_run, workspace, tmp_path):  # noqa: F811
    runs = []
    for launcher, batch, accumulation in (("python", "8", "1"), ("torchrun", "2", "2")):
        words = ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]
        runs.append(run_probe(launcher, toy_run(workspace / "moe", *words, "--bf16", "false"), tmp_path / launcher))
    reference, run = runs
    assert_same_steps(run, reference)
    assert run.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=2e-4, msg=name)

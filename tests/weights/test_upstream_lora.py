"""MiniMind's LoRA files, against its formula on transformers' own models, and against peft."""

import runpy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.weights.exporting import to_state_dict, to_stock_model
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.layouts import stock_layout
from hf_pretrain.weights.upstream_lora import load_merged, write_upstream_lora
from tests.models import saved_model
from tests.weights.files import SQUARE, save_lora


@pytest.fixture
def base_of(tmp_path):
    """Return a function that saves a toy model of a generation, and loads it from its directory."""
    return lambda generation: saved_model(tmp_path / "base", qk_norm=generation == "v3").eval()


@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_a_file_merges_into_what_minimind_computes(base_of, input_ids, tmp_path, generation):
    """
    Llama's and Qwen3's layers have the rows of MiniMind v2 and v3, and ours those of v1. MiniMind adds `B(A(x))` to a
    layer.
    """
    base = base_of(generation)
    is_v1, renames = generation == "v1", {"q_proj": "wq", "o_proj": "wo", "model.": "", "self_attn": "attention"}
    stock = base_of("v1") if is_v1 else to_stock_model(base, stock_layout(base.config)).float()
    words = {"stem": "layers.{}.attention.{}", "names": ("wq", "wo")} if is_v1 else {}
    tensors = save_lora(tmp_path / "lora_x.pth", base.config.num_hidden_layers, base.config.hidden_size, **words)
    for name, module in stock.named_modules():
        if name.endswith(SQUARE):
            for ours, theirs in renames.items() if is_v1 else ():
                name = name.replace(ours, theirs)
            a, b = (tensors[f"{name}.lora.{letter}.weight"] for letter in "AB")
            module.register_forward_hook(lambda module, args, output, a=a, b=b: output + args[0] @ a.T @ b.T)
    plain, merged = base(input_ids).logits, load_merged(str(tmp_path / "lora_x.pth"), base=str(tmp_path / "base"))[0]
    torch.testing.assert_close(merged(input_ids).logits, stock(input_ids).logits, rtol=0, atol=2e-5)
    assert (merged(input_ids).logits - plain).abs().max() > 0.01


@pytest.mark.parametrize("generation", ["v2", "v3"])
def test_an_adapter_is_written_and_merges_to_the_same_model(
    base_of, input_ids, tmp_path, generation, monkeypatch, capsys
):
    adapter = AdapterArguments(use_peft=True, lora_target_modules=list(SQUARE))
    adapted = add_adapter(base_of(generation), adapter)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(tmp_path / "adapter")

    def convert(*words: str):
        monkeypatch.setattr("sys.argv", ["convert.py", *words])
        runpy.run_path("recipes/convert.py", run_name="__main__")

    source, out = str(tmp_path / "adapter"), str(tmp_path / "out")
    convert("--from", source, "--to", out, "--format", "lora", "--stage", "lora_x")
    assert "largest logit difference" in capsys.readouterr().out
    base = load_upstream(tmp_path / "base")
    file = tmp_path / f"out/lora_x_{base.config.hidden_size}.pth"
    tensors = torch.load(file)
    # MiniMind loads the file strictly: all square projections, with rank 16.
    square = [
        name for name, weight in to_state_dict(base, generation).items()
        if weight.dim() == 2 and len(weight) == weight.shape[1]
    ]  # fmt: skip
    stems = [name.removesuffix("weight") for name in square]
    assert tensors.keys() == {f"{stem}lora.{letter}.weight" for stem in stems for letter in "AB"} and square
    assert all(tensor.shape in ((16, 32), (32, 16)) for tensor in tensors.values())
    convert("--from", str(file), "--base", str(tmp_path / "base"), "--to", str(tmp_path / "merged"))
    logits = MiniMindForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids).logits
    torch.testing.assert_close(logits, load_merged(source)[0](input_ids).logits, rtol=0, atol=1e-5)


def test_an_adapter_with_further_weights_is_not_written(base_of, tmp_path):
    base = base_of("v3")
    config = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=[*SQUARE], modules_to_save=["norm"])
    adapted = get_peft_model(base, config)
    with torch.no_grad():
        adapted.base_model.model.model.norm.modules_to_save["default"].weight += 1
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(RuntimeError):
        write_upstream_lora(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()

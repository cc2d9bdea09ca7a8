"""Every format that holds a model, read back by its own program and by this package."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.model.router_loss import find_documents, router_loss
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights import exporting
from hf_pretrain.weights.exporting import DTYPES, export, make_format, to_stock_model
from hf_pretrain.weights.gguf import FILE_NAME
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.layouts import find_features
from tests.models import GOLDEN, assert_near, recorded
from tests.toys import limited_file_size, needs_posix
from tests.weights.files import MOE, NAMES, SHAPES, build_shape, weights_of


STOCK = ("llama", "qwen3", "qwen3_moe", "ernie4_5_moe")
FORMATS = ("minimind", "upstream", *STOCK, "gguf")
# The same in a config that was read back.
FIELDS = ("norm_topk_prob", "num_experts_per_tok", "rope_parameters", "rms_norm_eps", "tie_word_embeddings")


def holds(format: str, model: MiniMindForCausalLM) -> bool:
    features = {feature for feature, is_there in find_features(model.config).items() if is_there}
    return features.isdisjoint(make_format(format, model.config).lacks)


@pytest.mark.parametrize("name", [*NAMES, *SHAPES])
def test_every_format_that_holds_a_model_gives_its_logits_and_loads_again(name, input_ids, tmp_path):
    """The recorded models of MiniMind's generations, and further shapes. `MISTAKES` names what each format lacks."""
    if name in NAMES:
        model, expected = load_upstream(GOLDEN / name), recorded(name)
    else:
        model = build_shape(name)
        expected = {"input_ids": input_ids, "logits": model(input_ids).logits}
    for format in (format for format in FORMATS if holds(format, model)):
        assert export(model, tmp_path / format, format).relative_difference <= 1e-5
        if format in STOCK:
            written = AutoModelForCausalLM.from_pretrained(tmp_path / format)
            assert type(written).__module__.startswith("transformers.models.")
            assert_near(written(expected["input_ids"]).logits, expected["logits"])
        again = load_upstream(tmp_path / format / (FILE_NAME if format == "gguf" else ""))
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items()), format
        assert [getattr(again.config, field) for field in FIELDS] == [getattr(model.config, field) for field in FIELDS]
        assert_near(again(expected["input_ids"]).logits, expected["logits"])
        if format != "gguf":
            coefficient = model.config.router_aux_loss_coef
            assert again.config.router_aux_loss_coef == pytest.approx(coefficient, rel=1e-12)
    if "greedy" in expected:
        prompt = expected["greedy"][:, :12]
        generated = written.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert torch.equal(generated, expected["greedy"])


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("A")])
def test_an_upstream_file_is_that_of_minimind(name, tmp_path):
    export(load_upstream(GOLDEN / name), tmp_path / "out", "upstream")
    written = torch.load(tmp_path / f"out/full_sft_32{'_moe' if 'moe' in name else ''}.pth", weights_only=True)
    weights = weights_of(name)
    assert written.keys() == weights.keys() and all(torch.equal(written[key], weights[key]) for key in weights)


def test_the_config_of_a_stock_format_is_complete(build_model, tmp_path, caplog):
    overrides = {"num_experts": 4, "qk_norm": True, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.3}
    model = build_model(
        **overrides, rms_norm_eps=1e-6, vocab_size=320, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    tokenizer = train_tokenizer(["a few words", "and some more"], vocab_size=320)
    export(model, tmp_path / "out", "qwen3_moe", tokenizer=tokenizer, dtype="bfloat16")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    # Our 0.3 (a sum over two layers, divided by top-2) is 0.3 * 2 / 2 in their formula.
    expected = {"router_aux_loss_coef": 0.3, "dtype": torch.bfloat16, "tie_word_embeddings": True, "head_dim": 8}
    expected |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 2}
    expected |= {"rms_norm_eps": 1e-6}
    assert {name: getattr(config, name) for name in expected} == pytest.approx(expected)
    assert config.rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (4, 2, True)
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 0)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert (tmp_path / "out/chat_template.jinja").is_file() and "without a tokenizer" not in caplog.text
    export(build_model(**MOE), tmp_path / "bare", "ernie4_5_moe")
    assert "of 6,400 ids, 9 mean the same in v1/v2 and in v3" in caplog.text
    assert AutoConfig.from_pretrained(tmp_path / "bare").output_router_logits is False


@pytest.mark.parametrize("format", ["qwen3_moe", "ernie4_5_moe"])
@pytest.mark.parametrize("num_layers, top_k", [(1, 1), (1, 3), (3, 2)])
def test_the_router_loss_means_the_same_in_their_formula(format, num_layers, top_k, build_model, input_ids):
    """Compare coefficient times loss over all tokens, for one layer and for layers that route alike."""
    overrides = {"num_hidden_layers": num_layers, "num_experts": 4, "num_experts_per_tok": top_k}
    shared = {"qk_norm": True} if format == "qwen3_moe" else {"num_shared_experts": 1}
    model = build_model(**overrides, **shared, router_aux_loss_coef=0.2, router_aux_loss_level="batch")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.experts.down_proj)
        if layer.mlp.shared_experts is not None:
            torch.nn.init.zeros_(layer.mlp.shared_experts.down_proj.weight)
        layer.mlp.gate.weight.data.copy_(model.model.layers[0].mlp.gate.weight)
    stock = to_stock_model(model, format)
    ours = model(input_ids, output_router_logits=True)
    theirs = stock(input_ids, output_router_logits=True)
    torch.testing.assert_close(
        model.config.router_aux_loss_coef * ours.aux_loss, stock.config.router_aux_loss_coef * theirs.aux_loss
    )
    documents = find_documents(input_ids.shape)
    assert ours.aux_loss == router_loss(ours.router_logits, top_k, documents, level="batch")


@torch.no_grad()
@pytest.mark.parametrize("format, dtype", [("minimind", "float16"), ("llama", "bfloat16"), ("upstream", "float16")])
def test_another_dtype_reports_its_difference(format, dtype, build_model, tmp_path):
    model = build_model()
    report = export(model, tmp_path / "out", format, dtype=dtype)
    rounded = build_model().to(DTYPES[dtype]).float()
    ids = torch.randint(160, (8, 64), generator=torch.Generator().manual_seed(0))
    expected = (rounded(ids).logits - model(ids).logits).abs().max().item()
    assert expected > 1e-3
    assert report.max_difference == pytest.approx(expected, rel=0.05)
    assert f"{report.max_difference:.2e}" in str(report)
    assert load_upstream(tmp_path / "out").dtype == DTYPES[dtype]


@pytest.mark.parametrize("num_wrong, overrides, is_noticed", [(1, {}, True), (1, MOE, False), (2, MOE, True)])
def test_a_few_wrong_rows_are_noticed(num_wrong, overrides, is_noticed, build_model, tmp_path, monkeypatch):
    """The check compares eight rows. With experts, one row may differ, because of a near tie of two experts."""
    rows = torch.randint(6400, (8, 64), generator=torch.Generator().manual_seed(0))

    def write_wrongly(model, format):
        stock = to_stock_model(model, format)
        stock.model.embed_tokens.weight.data[rows[:num_wrong, 0]] *= -1
        return stock

    monkeypatch.setattr(exporting, "to_stock_model", write_wrongly)
    model = build_model(vocab_size=6400, tie_word_embeddings=False, **overrides)
    format = "ernie4_5_moe" if overrides else "llama"
    if is_noticed:
        with pytest.raises(RuntimeError):
            export(model, tmp_path / "out", format)
    else:
        assert export(model, tmp_path / "out", format).relative_difference > 1e-3


def test_what_cannot_be_written_leaves_nothing(build_model, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").touch()
    for name, format, dtype, norm in (
        *(("full", "llama", None, 1), ("out", "ollama", None, 1), ("out", "llama", "q8_0", 1)),
        *(("out", "llama", "float16", 1e5), ("out", "gguf", "q8_0", 1e5), ("b/c", "llama", None, 1e38)),
    ):
        model = build_model(intermediate_size=72, initializer_range=norm if format == "gguf" else 0.3)
        model.model.norm.weight.data.fill_(norm)
        with pytest.raises(RuntimeError if norm == 1e38 else UserError):
            export(model, tmp_path / name, format, dtype=dtype)
    assert {path.name for path in tmp_path.rglob("*")} == {"full", "kept", "b"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("format", ["llama", "minimind", "upstream"])
def test_no_file_is_mapped_when_it_gets_its_name(format, build_model, tmp_path, monkeypatch):
    """Windows refuses to rename such a file."""
    rename = os.replace

    def replace(source, target):
        assert str(source) not in Path("/proc/self/maps").read_text()
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    export(build_model(), tmp_path / "out", format)


@needs_posix
@pytest.mark.parametrize("format", ["llama", "gguf", "upstream"])
def test_a_full_disk_leaves_nothing_and_the_retry_works(format, build_model, tmp_path):
    out, model = tmp_path / "out", build_model()
    with limited_file_size(4096), pytest.raises(OSError):
        export(model, out, format)
    assert not out.exists()
    export(model, out, format)
    assert not list(out.glob(".*"))

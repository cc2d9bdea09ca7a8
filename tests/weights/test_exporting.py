"""Every format, read back by its own program; models that a format cannot hold are refused by name."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_pretrain import MiniMindConfig
from hf_pretrain.model.router_loss import find_documents, router_loss
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights import exporting
from hf_pretrain.weights.exporting import DTYPES, choose_format, export, make_format, to_stock_model
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.layouts import find_features
from tests.models import GOLDEN, assert_near, recorded
from tests.toys import limited_file_size, needs_posix
from tests.weights.test_importing import NAMES, weights_of


# The stock format that holds each recorded model. Qwen3 needs q/k norms, which v3 has; Llama and Ernie4.5 have none.
STOCK_OF = {"A_dense": "llama", "B_dense": "llama", "C_dense": "qwen3", "A_moe": "ernie4_5_moe"}
STOCK_OF |= {"B_moe": "ernie4_5_moe", "C_moe": "qwen3_moe", "C_moe_top1": "qwen3_moe"}


STOCK = ("llama", "qwen3", "qwen3_moe", "ernie4_5_moe")


MOE = {"num_experts": 4, "num_shared_experts": 1}


@pytest.mark.parametrize("format", ["minimind", "upstream", "stock", "gguf"])
@pytest.mark.parametrize("name", NAMES)
def test_every_format_of_every_generation(name, format, tmp_path):
    model = load_upstream(GOLDEN / name)
    format = STOCK_OF[name] if format == "stock" else format
    report = export(model, tmp_path / "out", format)
    assert report.relative_difference <= 1e-5

    expected = recorded(name)
    if format in STOCK:
        written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert type(written).__module__.startswith("transformers.models.")
        assert_near(written(expected["input_ids"]).logits, expected["logits"])
        prompt = expected["greedy"][:, :12]
        generated = written.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert torch.equal(generated, expected["greedy"])
    if format == "upstream" and not name.startswith("A"):
        back = torch.load(tmp_path / f"out/full_sft_32{'_moe' if 'moe' in name else ''}.pth", weights_only=True)
        weights = weights_of(name)
        assert back.keys() == weights.keys()
        assert all(torch.equal(back[key], weights[key]) for key in weights)
    if format != "gguf":
        again = load_upstream(tmp_path / "out")
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
        assert again.config.router_aux_loss_coef == pytest.approx(model.config.router_aux_loss_coef, rel=1e-12)
        fields = ("norm_topk_prob", "num_experts_per_tok", "rope_parameters", "rms_norm_eps", "tie_word_embeddings")
        assert [getattr(again.config, field) for field in fields] == [getattr(model.config, field) for field in fields]


GENERATIONS = {
    "v1": {},
    "v1-moe": {"num_experts": 4, "num_shared_experts": 1},
    "v2-moe": {"num_experts": 4, "num_shared_experts": 2},
    "no-shared": {"num_experts": 4},
    "top1": {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": False, "num_shared_experts": 1},
    "v3": {"qk_norm": True, "head_dim": 12},
    "v3-moe": {"qk_norm": True, "num_experts": 4, "num_experts_per_tok": 3},
    "v3-unnormalised": {"qk_norm": True, "num_experts": 4, "norm_topk_prob": False},
    "untied": {"tie_word_embeddings": False},
    "untied-moe": {"tie_word_embeddings": False, "num_experts": 4, "num_shared_experts": 1},
    "yarn": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0},
        }
    },
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_format_that_fits_is_exact_and_loads_again(name, build_model, input_ids, tmp_path):
    """The norms differ from one, so that a forgotten permutation of them shows."""
    model = build_model(**GENERATIONS[name])
    for key, parameter in model.named_parameters():
        if "norm" in key:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    features = {feature for feature, is_there in find_features(model.config).items() if is_there}
    fitting = [name for name in (*STOCK, "upstream") if features.isdisjoint(make_format(name, model.config).lacks)]
    assert fitting
    for format in fitting:
        report = export(model, tmp_path / format, format)
        assert report.relative_difference <= 1e-5
        again = load_upstream(tmp_path / format)
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
        assert_near(again(input_ids).logits, model(input_ids).logits, rel=1e-6)


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


@pytest.mark.parametrize(
    "overrides, format, message",
    [
        ({"qk_norm": True}, "llama", "llama cannot hold q/k norms. .*: minimind, upstream, qwen3, gguf\\.$"),
        ({}, "qwen3", "attention without q/k norms. .*: minimind, upstream, llama, gguf\\.$"),
        ({"num_experts": 4}, "llama", "experts. .*: minimind, upstream, ernie4_5_moe, gguf\\.$"),
        (MOE | {"qk_norm": True}, "qwen3_moe", "shared experts. Formats that can hold this model: minimind\\.$"),
        (
            {"tie_word_embeddings": False},
            "upstream",
            "MiniMind v2 cannot hold an untied .*: minimind, llama, gguf\\.$",
        ),
        (MOE | {"num_experts_per_tok": 1}, "upstream", "normalised top-1 routing. .*: minimind, ernie4_5_moe, gguf"),
        ({"head_dim": 16}, "upstream", "a head_dim other than .*: minimind, llama, gguf\\.$"),
        # llama.cpp would compute these differently.
        (MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False}, "gguf", "not normalised. .*ernie4_5_moe"),
        ({"hidden_act": "gelu"}, "gguf", "the activation gelu"),
        (GENERATIONS["yarn"], "gguf", "scaled rotary positions"),
        (MOE | {"qk_norm": True}, "gguf", "shared experts"),
    ],
)
def test_misfits_name_the_part_and_the_formats_that_hold_it(overrides, format, message):
    config = MiniMindConfig(hidden_size=32, num_attention_heads=4, **overrides)
    with pytest.raises(UserError, match=message):
        choose_format(config, format, dtype="float32")


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
        with pytest.raises(RuntimeError, match="is not the same model"):
            export(model, tmp_path / "out", format)
    else:
        assert export(model, tmp_path / "out", format).relative_difference > 1e-3


def test_what_cannot_be_written_leaves_nothing(build_model, tmp_path):
    model = build_model()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").touch()
    for name, format, dtype, message in (
        ("full", "llama", None, "is not empty"),
        ("out", "ollama", None, "'ollama' is unknown; use one of minimind, upstream"),
        ("out", "llama", "q8_0", "q8_0 is not possible for llama"),
        ("out", "llama", "float16", "--dtype float16: model.norm.weight holds values that are not finite"),
    ):
        model.model.norm.weight.data[0] = 1e5 if dtype == "float16" else 1
        with pytest.raises(UserError, match=message):
            export(model, tmp_path / name, format, dtype=dtype)
    with pytest.raises(UserError, match="overflow float16"):
        export(build_model(intermediate_size=72, initializer_range=1e5), tmp_path / "out", "gguf", dtype="q8_0")
    model.model.norm.weight.data.fill_(1e38)
    with pytest.raises(RuntimeError, match="not the same model: .* nan"):
        export(model, tmp_path / "b/c", "llama")
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
    with limited_file_size(4096), pytest.raises(OSError, match=f"{out} could not be written, and nothing was kept"):
        export(model, out, format)
    assert not out.exists()
    export(model, out, format)
    assert not list(out.glob(".*"))

"""Every format, read back by its own program; models that a format cannot hold are refused by name."""

import json
import os
import re
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model.loss import find_documents, router_loss
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights import exporting
from hf_pretrain.weights.exporting import (
    DTYPES,
    EXPORT_FORMATS,
    GGUF_TYPES,
    check_fits,
    export,
    to_stock_model,
)
from hf_pretrain.weights.foreign_configs import write_stock_fields
from hf_pretrain.weights.gguf import FILE_NAME
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.layouts import unsupported_feature, upstream_layout
from tests.model.test_modeling_minimind import assert_near
from tests.toys import limited_file_size, needs_posix
from tests.weights.test_conversion import GOLDEN, NAMES, weights_of


# The formats that hold each recorded model. Dense models have no MoE format and vice versa. Qwen3 needs q/k norms,
# which v1 and v2 lack. Llama and Ernie4.5 have no q/k norms, and v3 does.
CELLS = {
    "A_dense": ("minimind", "upstream", "llama", "gguf"),
    "A_moe": ("minimind", "upstream", "ernie4_5_moe", "gguf"),
    "B_dense": ("minimind", "upstream", "llama", "gguf"),
    "B_moe": ("minimind", "upstream", "ernie4_5_moe", "gguf"),
    "C_dense": ("minimind", "upstream", "qwen3", "gguf"),
    "C_moe": ("minimind", "upstream", "qwen3_moe", "gguf"),
    "C_moe_top1": ("minimind", "upstream", "qwen3_moe", "gguf"),
}
STOCK = ("llama", "qwen3", "qwen3_moe", "ernie4_5_moe")


def recorded(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / name / "expected.safetensors")


@pytest.mark.parametrize("format", EXPORT_FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_of_every_generation(name, format, tmp_path):
    model = load_upstream(GOLDEN / name)
    if format not in CELLS[name]:
        with pytest.raises(ValueError, match="cannot hold .* Formats that can hold this model: minimind"):
            export(model, tmp_path / "out", format)
        assert not (tmp_path / "out").exists()
        return
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
    formats = {format: format for format in STOCK} | {"upstream": upstream_layout(model.config)}
    fitting = [format for format, layout in formats.items() if unsupported_feature(model.config, layout) is None]
    assert fitting
    for format in fitting:
        report = export(model, tmp_path / format, format)
        assert report.relative_difference <= 1e-5
        again = load_upstream(tmp_path / format)
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
        assert_near(again(input_ids).logits, model(input_ids).logits, rel=1e-6)


def test_the_config_of_a_stock_format_is_complete(build_model, tmp_path):
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
    chat = [{"role": "user", "content": "hello"}]
    expected_text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    written = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert written.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected_text
    assert (tmp_path / "out/chat_template.jinja").is_file()


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
        ({"qk_norm": True}, "llama", "llama cannot hold q/k norms. .*: minimind, upstream, qwen3\\.$"),
        ({}, "qwen3", "attention without q/k norms. .*: minimind, upstream, llama\\.$"),
        ({"num_experts": 4}, "llama", "experts. .*: minimind, upstream, ernie4_5_moe\\.$"),
        ({"num_experts": 4, "num_shared_experts": 1, "qk_norm": True}, "qwen3_moe", "shared experts. .*: minimind"),
        ({"tie_word_embeddings": False}, "v2", "an untied output head. .*: minimind, llama\\.$"),
        ({"num_experts": 4, "num_experts_per_tok": 1}, "v2", "normalised top-1 routing. .*: minimind, ernie4_5_moe"),
        ({"head_dim": 16}, "v2", "a head_dim other than .*: minimind, llama\\.$"),
    ],
)
def test_misfits_name_the_part_and_the_formats_that_hold_it(overrides, format, message):
    with pytest.raises(ValueError, match=message):
        check_fits(MiniMindConfig(hidden_size=32, num_attention_heads=4, **overrides), format)


def test_an_export_without_a_tokenizer_warns(build_model, tmp_path, caplog):
    tokenizer = train_tokenizer(["some words"], vocab_size=320)
    model = build_model(num_experts=4, num_shared_experts=1, vocab_size=320)
    export(model, tmp_path / "a", "upstream", tokenizer=tokenizer)
    assert "without a tokenizer" not in caplog.text
    export(model, tmp_path / "c", "ernie4_5_moe")
    assert "of 6,400 ids, 9 mean the same in v1/v2 and in v3" in caplog.text
    assert AutoConfig.from_pretrained(tmp_path / "c").output_router_logits is False


MOE = {"num_experts": 4, "num_shared_experts": 1}


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


def test_overflow_and_overwriting_are_refused(build_model, tmp_path):
    model = build_model()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").touch()
    with pytest.raises(ValueError, match="is not empty"):
        export(model, tmp_path / "full", "llama")
    with pytest.raises(ValueError, match="'ollama' is unknown; use one of minimind, upstream"):
        export(model, tmp_path / "out", "ollama")
    with pytest.raises(ValueError, match="q8_0 is not possible for llama"):
        export(model, tmp_path / "out", "llama", dtype="q8_0")
    model.model.norm.weight.data[0] = 1e5
    with pytest.raises(ValueError, match="model.norm.weight holds values that overflow torch.float16"):
        export(model, tmp_path / "out", "llama", dtype="float16")
    assert not (tmp_path / "out").exists()


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


def test_a_failed_export_leaves_nothing(build_model, tmp_path):
    with pytest.raises(ValueError, match="overflow float16"):
        export(build_model(intermediate_size=72, initializer_range=1e5), tmp_path / "a", "gguf", dtype="q8_0")
    model = build_model()
    model.model.norm.weight.data.fill_(1e38)
    with pytest.raises(RuntimeError, match="not the same model: .* nan"):
        export(model, tmp_path / "b/c", "llama")
    assert [path.name for path in tmp_path.rglob("*")] == ["b"]


TEXT = "The river 河流 walks, 12345 steps <|im_start|>user\n你好  world<|im_end|><think>'s"


@pytest.fixture(scope="module")
def with_vocabulary():
    """Return a function that builds a model with the vocabulary size of the published tokenizers."""

    def build(**overrides) -> MiniMindForCausalLM:
        torch.manual_seed(0)
        config = MiniMindConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
            **overrides,
        )  # fmt: skip
        return MiniMindForCausalLM(config).eval()

    return build


@pytest.mark.parametrize(
    "part, value",
    [
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("normalizer", normalizers.NFKC()),
        ("model", models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_gguf_refuses_what_llama_cpp_would_split_differently(part, value, with_vocabulary, tmp_path):
    tokenizer = train_tokenizer([TEXT], vocab_size=330)
    setattr(tokenizer.backend_tokenizer, part, value)
    with pytest.raises(ValueError, match="llama.cpp splits text as GPT-2 does"):
        export(with_vocabulary(), tmp_path / "out", "gguf", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


ARCHITECTURES = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "qwen3moe": {"qk_norm": True, "num_experts": 4},
    "ernie4_5-moe": {"num_experts": 4, "num_shared_experts": 2},
}


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((name, "float32") for name in ARCHITECTURES), *(("qwen3moe", dtype) for dtype in GGUF_TYPES)],
)
def test_gguf_types(architecture, dtype, with_vocabulary, tmp_path):
    model = with_vocabulary(**ARCHITECTURES[architecture])
    report = export(model, tmp_path / "out", "gguf", dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "out" / FILE_NAME)
    assert reader.fields["general.architecture"].contents() == architecture
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    matrix = dtype.upper() if dtype.startswith("q") else dtype.upper().replace("LOAT", "")
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == matrix
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert "output.weight" not in types
    if dtype == "float32":
        assert report.relative_difference <= 1e-5
        if architecture != "ernie4_5-moe":
            # transformers has its own table of names, and reads the config of Llama from the file.
            stock = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}[architecture]
            config = (
                AutoConfig.for_model(stock, **write_stock_fields(model.config, stock)) if stock != "llama" else None
            )
            read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=FILE_NAME, config=config)
            ids = torch.randint(6400, (2, 40), generator=torch.Generator().manual_seed(0))
            assert_near(read(ids).logits, model(ids).logits)
    else:
        assert 1e-4 < report.relative_difference < {"q5_1": 0.5, "q4_0": 1.0}.get(dtype, 0.1)


def test_a_chat_model_gets_a_modelfile_that_renders_its_template(with_vocabulary, tmp_path):
    tokenizer = train_tokenizer(["some words to train on"], vocab_size=300)
    export(with_vocabulary(vocab_size=len(tokenizer)), tmp_path / "out", "gguf", tokenizer=tokenizer, dtype="q4_0")
    text = (tmp_path / "out/Modelfile").read_text()
    assert text.startswith("FROM ./model.gguf\n") and 'PARAMETER stop "<|im_end|>"' in text
    (template,) = re.findall(r'TEMPLATE """(.*?)"""', text, re.DOTALL)
    loop, end = re.fullmatch(r"\{\{- range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL).groups()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    # Go's template, written out.
    rendered = "".join(
        loop.replace("{{ .Role }}", message["role"]).replace("{{ .Content }}", message["content"])
        for message in messages
    )
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered + end == expected
    # A model without a chat template gets none.
    export(with_vocabulary(), tmp_path / "plain", "gguf")
    assert not (tmp_path / "plain/Modelfile").exists()


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": False}, "not normalised. .*ernie4_5_moe"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        (GENERATIONS["yarn"], "scaled rotary positions"),
        ({"num_experts": 4, "qk_norm": True, "num_shared_experts": 1}, "shared experts"),
    ],
)
def test_gguf_refuses_what_llama_cpp_would_compute_differently(overrides, message, build_model, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(build_model(**overrides), tmp_path / "out", "gguf")

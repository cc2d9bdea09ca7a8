"""Exports as other programs read them: transformers 4.57 and 5.19, which servers pin, and this one; mlx; vLLM."""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from tests.models import FIXTURES, TEXT, assert_near
from tests.weights.files import MODELS, YARN, build


# No architecture has this theta by default, so that an ignored field shows.
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}
SERVED = {
    "llama": {},
    "llama-yarn": {"rope_parameters": YARN | {"attention_factor": 1.2}},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": False},
    "qwen3_moe": {"qk_norm": True, "num_experts": 4, "norm_topk_prob": False, "moe_intermediate_size": 24},
    "ernie4_5_moe": {"num_experts": 4, "num_shared_experts": 2},
    "minimind": {},
}


# transformers


# transformers 4.57.1 with the newest versions that it accepts, and the version that vLLM 0.32 takes. torch and the
# others come from this environment.
OLD = ("transformers==4.57.1", "tokenizers==0.22.1", "huggingface_hub==0.36.0")
ENGINES = ("transformers==5.19.0",)
READ = """
import json, sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

sys.modules["hf_pretrain"] = None
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import PreTrainedTokenizerFast, __version__

root, text = Path(sys.argv[1]), sys.argv[2]
input_ids = load_file(root / "input_ids.safetensors")["input_ids"]
logits, ids, errors = {}, {}, {}
for path in root.glob("exports/*"):
    # As the model card has it: AutoTokenizer of transformers 5 resolves the model's config first, and asks.
    tokenizer = (PreTrainedTokenizerFast if path.name == "minimind" else AutoTokenizer).from_pretrained(path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    padded = tokenizer(["a b c", "a"], padding=True)
    ids[path.name] = [tokenizer(text).input_ids, tokenizer(prompt).input_ids, padded.input_ids]
    try:
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    except ImportError as error:
        errors[path.name] = str(error)
        continue
    if path.name == "minimind":
        AutoModelForSequenceClassification.from_pretrained(path, trust_remote_code=True)
    with torch.no_grad():
        logits[path.name] = model(input_ids).logits
save_file(logits, root / f"{__version__}.safetensors")
(root / f"{__version__}.json").write_text(json.dumps([ids, errors]))
"""


def install(*packages: str) -> str:
    """Return a directory with a version of transformers, which hides this environment's version; install it once."""
    directory = Path(sys.prefix) / "-".join(packages).replace("==", "-")
    if not directory.is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps")
        with tempfile.TemporaryDirectory(dir=sys.prefix) as scratch:
            subprocess.run([*pip, "--target", f"{scratch}/packages", *packages], check=True)
            os.rename(f"{scratch}/packages", directory)
    return str(directory)


@pytest.mark.slow
@torch.no_grad()
def test_all_versions_of_transformers_give_the_logits_and_ids(build_model, input_ids, tmp_path):
    """Load without this package, and without a question whether to run custom code."""
    tokenizers = [
        train_tokenizer([TEXT, "some more words"], vocab_size=330),
        load_tokenizer(FIXTURES / "tokenizers/v1"),
        load_tokenizer(FIXTURES / "tokenizers/v3"),
    ]
    logits, ids = {}, {}
    for number, (name, fields) in enumerate(SERVED.items()):
        tokenizer = tokenizers[number % 3]
        model = build_model(**ROPE | fields, vocab_size=len(tokenizer))
        export(model, tmp_path / "exports" / name, name.partition("-")[0], tokenizer=tokenizer)
        logits[name] = model(input_ids).logits
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)
        row, short = tokenizer("a b c").input_ids, tokenizer("a").input_ids
        padded = [row, [tokenizer.pad_token_id] * (len(row) - len(short)) + short]
        ids[name] = [tokenizer(TEXT).input_ids, tokenizer(prompt).input_ids, padded]
    save_file({"input_ids": input_ids}, tmp_path / "input_ids.safetensors")

    versions = {"4.57.1": install(*OLD), "5.19.0": install(*ENGINES), transformers.__version__: ""}
    for version, path in versions.items():
        environment = os.environ | {"PYTHONPATH": path, "HF_MODULES_CACHE": str(tmp_path / f"modules-{version}")}
        command = [sys.executable, "-c", READ, str(tmp_path), TEXT]
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        result = subprocess.run(command, env=environment, cwd=tmp_path, **streams)
        assert result.returncode == 0, result.stderr
        assert "custom code" not in result.stdout
        read_ids, errors = json.loads((tmp_path / f"{version}.json").read_text())
        read_logits = load_file(tmp_path / f"{version}.safetensors")
        assert read_ids == ids
        if version == "4.57.1":
            assert "5.19 or newer (tested: 5.19 to 5.24), and 4.57.1 is installed" in errors.pop("minimind")
        assert not errors and read_logits.keys() == logits.keys() - ({"minimind"} if version == "4.57.1" else set())
        for name, read in read_logits.items():
            assert_near(read, logits[name])


# mlx, as people run it on Macs; its CPU backend runs on Linux


FORMATS = {"qwen3moe": "qwen3_moe", "ernie4_5-moe": "ernie4_5_moe"}


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="mlx is tested with its wheel for Linux"
)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_in_mlx(name, tmp_path):
    import mlx.core as mx
    from mlx_lm import load

    model = build(**MODELS[name])
    tokenizer = load_tokenizer(FIXTURES / "tokenizers" / ("v3" if model.config.qk_norm else "v1"))
    export(model, tmp_path / "out", FORMATS.get(name, name), tokenizer=tokenizer)
    ids = torch.randint(100, 6400, (1, 40), generator=torch.Generator().manual_seed(1))
    found, read = load(str(tmp_path / "out"))
    logits = torch.tensor(found(mx.array(ids.numpy())).astype(mx.float32).tolist())
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-4)
    chat = [{"role": "user", "content": "What is two and two?"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids
    assert read.apply_chat_template(chat, add_generation_prompt=True) == expected


# vLLM


ARCHITECTURES = {"llama-yarn": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# Fields without which vLLM takes another default or fails; it reads theta from either of two places, by version.
FIELDS = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
FIELDS |= {"head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "vocab_size"}
MOE_FIELDS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"}


def names(config: dict, architecture: str) -> set[str]:
    """Return the names of the tensors that vLLM's loaders put into the parameters of a model."""
    layer = {"input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo")}
    if architecture != "llama":
        layer |= {"self_attn.q_norm", "self_attn.k_norm"}
    parts = ["mlp"]
    if architecture == "qwen3_moe":
        layer, parts = layer | {"mlp.gate"}, [f"mlp.experts.{expert}" for expert in range(config["num_experts"])]
    layer |= {f"{part}.{name}_proj" for part in parts for name in ("gate", "up", "down")}
    found = {f"model.layers.{number}.{name}" for number in range(config["num_hidden_layers"]) for name in layer}
    found |= {"model.embed_tokens", "model.norm"} | (set() if config["tie_word_embeddings"] else {"lm_head"})
    return {f"{name}.weight" for name in found}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vllm_finds_every_parameter_and_field(name, build_model, tmp_path):
    """
    Compare with what vLLM's loaders read, recorded from its source: `llama.py`, `qwen2.py`, `qwen3.py` and
    `qwen3_moe.py` in `vllm/model_executor/models` at 0035bdf2 and 002456df, and `make_expert_params_mapping`. This
    proves names and fields, and neither numbers nor kernels.
    """
    architecture, tokenizer = name.partition("-")[0], train_tokenizer(["the river walks"] * 4, vocab_size=300)
    export(build_model(vocab_size=300, **ROPE | SERVED[name]), tmp_path / "out", architecture, tokenizer=tokenizer)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[name]] and config["model_type"] == architecture
    assert config.keys() >= FIELDS | (MOE_FIELDS if architecture == "qwen3_moe" else set())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 3e4
    # vLLM multiplies `attn_factor` by what YaRN's paper gives.
    if architecture == "llama":
        for name in ("rope_parameters", "rope_scaling"):
            assert config[name]["attn_factor"] * (0.1 * math.log(4) + 1) == pytest.approx(1.2)
    # vLLM has no other activation, and reads a bias that these layers do not have.
    assert config["hidden_act"] == "silu" and not config.get("attention_bias") and not config.get("mlp_bias")
    assert not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1
    assert load_file(tmp_path / "out/model.safetensors").keys() == names(config, architecture)
    # vLLM loads the tokenizer with AutoTokenizer, and chats with the template beside it.
    served = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert served.eos_token_id == config["eos_token_id"] and served.chat_template == tokenizer.chat_template
    assert served("the river").input_ids == tokenizer("the river").input_ids

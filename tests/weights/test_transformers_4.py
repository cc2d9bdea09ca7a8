"""Exports give the same logits and ids without this package, and under transformers 4.57, which servers pin."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from tests.models import FIXTURES, TEXT, assert_near


# The newest versions that transformers 4.57.1 accepts. torch and the others come from this environment.
PACKAGES = ("transformers==4.57.1", "tokenizers==0.22.1", "huggingface_hub==0.36.0")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}
# No architecture has this theta by default, so that an ignored field shows.
MODELS = {
    "llama": ROPE,
    "llama-yarn": {"rope_parameters": YARN | {"rope_theta": 3e4}},
    "qwen3": ROPE | {"qk_norm": True},
    "qwen3_moe": ROPE | {"qk_norm": True, "num_experts": 4, "norm_topk_prob": False},
    "ernie4_5_moe": ROPE | {"num_experts": 4, "num_shared_experts": 2},
    "minimind": ROPE,
}

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


def install_transformers_4() -> str:
    """Return a directory with transformers 4.57, which hides this environment's version; install it once."""
    directory = Path(sys.prefix) / "-".join(PACKAGES).replace("==", "-")
    if not directory.is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps")
        with tempfile.TemporaryDirectory(dir=sys.prefix) as scratch:
            subprocess.run([*pip, "--target", f"{scratch}/packages", *PACKAGES], check=True)
            os.rename(f"{scratch}/packages", directory)
    return str(directory)


@pytest.mark.slow
@torch.no_grad()
def test_every_format_and_tokenizer_in_both_versions(build_model, input_ids, tmp_path):
    """Load without this package, and without a question whether to run custom code."""
    tokenizers = [
        train_tokenizer([TEXT, "some more words"], vocab_size=330),
        load_tokenizer(FIXTURES / "tokenizers/v1"),
        load_tokenizer(FIXTURES / "tokenizers/v3"),
    ]
    logits, ids = {}, {}
    for number, (name, overrides) in enumerate(MODELS.items()):
        tokenizer = tokenizers[number % 3]
        model = build_model(**overrides, vocab_size=len(tokenizer))
        export(model, tmp_path / "exports" / name, name.partition("-")[0], tokenizer=tokenizer)
        logits[name] = model(input_ids).logits
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)
        row, short = tokenizer("a b c").input_ids, tokenizer("a").input_ids
        padded = [row, [tokenizer.pad_token_id] * (len(row) - len(short)) + short]
        ids[name] = [tokenizer(TEXT).input_ids, tokenizer(prompt).input_ids, padded]
    save_file({"input_ids": input_ids}, tmp_path / "input_ids.safetensors")

    for version, path in (("4.57.1", install_transformers_4()), (transformers.__version__, "")):
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
            assert "5.23 or newer (tested: 5.23 to 5.24), and 4.57.1 is installed" in errors.pop("minimind")
        assert not errors and read_logits.keys() == logits.keys() - ({"minimind"} if version == "4.57.1" else set())
        for name, read in read_logits.items():
            assert_near(read, logits[name])

"""GGUF files in llama.cpp's server give our logits, greedy continuation, token ids and chat template."""

import json
import platform
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from hf_pretrain.weights.gguf import FILE_NAME
from tests.weights.test_conversion import FIXTURES
from tests.weights.test_exporting import TEXT


pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="llama.cpp's wheel is for Linux on x86-64"
)

MODELS = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"qk_norm": True, "head_dim": 24},
    "qwen3moe": {"qk_norm": True, "num_experts": 4, "num_experts_per_tok": 3},
    "ernie4_5-moe-2": {"num_experts": 4, "num_shared_experts": 2, "moe_intermediate_size": 96},
}


def build(**overrides) -> MiniMindForCausalLM:
    torch.manual_seed(0)
    config = MiniMindConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15,
        **overrides,
    )  # fmt: skip
    model = MiniMindForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


# NOTE: use a separate process, which can be killed: stopping the server sometimes hangs.
SERVE = """
import sys
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 0
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def llama_server(path: Path) -> Iterator[Any]:
    """Return a function that posts to llama.cpp's server."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVE, str(path)], **streams) as process:
        address = next((line.strip() for line in process.stdout if line.startswith("http")), None)
        assert address is not None, "the server did not start"

        def post(route: str, **content: Any) -> dict[str, Any]:
            body = json.dumps(content).encode()
            request = urllib.request.Request(f"{address}{route}", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=500) as answer:
                return json.load(answer)

        try:
            yield post
        finally:
            process.kill()


def next_token(post: Any, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the next token, over the whole vocabulary."""
    # The server gives no probabilities for a token that is a part of a character, so make it answer with "a". The
    # probabilities that it gives are those before the bias.
    answer = post("/completion", prompt=prompt, n_predict=1, temperature=0.0, n_probs=6400, logit_bias=[["a", 1000]])
    entries = answer["completion_probabilities"][0]["top_logprobs"]
    return torch.tensor([entry["logprob"] for entry in sorted(entries, key=lambda entry: entry["id"])])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_greedy_continuation(name, tmp_path):
    model = build(**MODELS[name])
    tokenizer = load_tokenizer(FIXTURES / "tokenizers" / ("v3" if model.config.qk_norm else "v1"))
    export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    prompt = torch.randint(100, 6400, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    greedy = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = model(greedy).logits[0].log_softmax(-1)
    with llama_server(tmp_path / "out" / FILE_NAME) as post:
        for length in range(40, 52):
            actual = next_token(post, greedy[0, :length].tolist())
            assert actual.argmax() == greedy[0, length]
            torch.testing.assert_close(actual, expected[length - 1], rtol=0, atol=5e-5)


@pytest.mark.parametrize("tokenizer_name", ["v1", "v3", "ours"])
def test_it_tokenizes_and_renders_chats_alike(tokenizer_name, tmp_path):
    if tokenizer_name == "ours":
        tokenizer = train_tokenizer([TEXT, "some more words"], vocab_size=330)
    else:
        tokenizer = load_tokenizer(FIXTURES / "tokenizers" / tokenizer_name)
    export(build(), tmp_path / "out", "gguf", tokenizer=tokenizer)
    chat = [{"role": "user", "content": "你好 world, 12"}]
    with llama_server(tmp_path / "out" / FILE_NAME) as post:
        read = post("/tokenize", content=TEXT, parse_special=True, add_special=True)["tokens"]
        prompt = post("/apply-template", messages=chat)["prompt"]
        # The prompt must not have a bos token that the server will add itself.
        prompt_ids = post("/tokenize", content=prompt, parse_special=True, add_special=True)["tokens"]
    assert read == tokenizer(TEXT).input_ids
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt_ids == tokenizer(expected, add_special_tokens=False).input_ids
    assert expected.endswith(prompt)


@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0", "q5_1"])
@torch.no_grad()
def test_it_runs_the_smaller_types(dtype, tmp_path):
    model = build()
    export(model, tmp_path / "out", "gguf", tokenizer=load_tokenizer(FIXTURES / "tokenizers/v1"), dtype=dtype)
    prompt = list(range(100, 140))
    with llama_server(tmp_path / "out" / FILE_NAME) as post:
        actual = next_token(post, prompt)
    expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    # llama.cpp also rounds activations to this type. Random weights are the worst case. Other random weights differ by
    # 0.19, and equal probabilities of all tokens by 0.15.
    difference = (actual - expected).norm() / expected.norm()
    assert 1e-6 < difference < {"float16": 1e-3, "bfloat16": 5e-3, "q8_0": 2e-2, "q5_1": 5e-2, "q4_0": 0.1}[dtype]

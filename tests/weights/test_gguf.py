"""GGUF files, as the gguf package, transformers and llama.cpp's server read them."""

import json
import platform
import random
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.gguf.dequant import dequantize

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import GGUF_TYPES, export, to_stock_model
from hf_pretrain.weights.foreign_configs import write_stock_fields
from hf_pretrain.weights.gguf import FILE_NAME
from hf_pretrain.weights.gguf_tokenizer import TEXT_SPLITS, find_text_split
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.package_models import find_gguf
from tests.models import FIXTURES, TEXT, assert_near
from tests.weights.files import MODELS, build, rewrite


needs_llama_cpp = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="llama.cpp's wheel is for Linux on x86-64"
)


@pytest.mark.parametrize(
    "part, value",
    [
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("normalizer", normalizers.NFKC()),
        ("model", models.WordLevel({"a": 0}, unk_token="a")),
        ("model", models.BPE(ignore_merges=True)),
    ],
)
def test_gguf_refuses_what_llama_cpp_would_split_differently(part, value, tmp_path):
    tokenizer = train_tokenizer([TEXT], vocab_size=330)
    setattr(tokenizer.backend_tokenizer, part, value)
    with pytest.raises(UserError):
        export(build(), tmp_path / "out", "gguf", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


@needs_llama_cpp
@pytest.mark.parametrize("name", TEXT_SPLITS)
def test_each_way_to_split_text_is_that_of_llama_cpp(name, tmp_path):
    # NOTE: in `tekken`, llama.cpp takes letters beyond ASCII for small and capital at once.
    alphabet = "ab 12\n\t'.,!你🙂Z/" + "éÉＡ" * (name != "tekken")
    generator = random.Random(0)
    texts = ["I'm 12345  'LL\r\n\n x", *("".join(generator.choices(alphabet, k=40)) for _ in range(60))]
    backend = Tokenizer(models.BPE(ignore_merges=TEXT_SPLITS[name].ignore_merges))
    TEXT_SPLITS[name].apply(backend)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|e|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|e|>", pad_token="<|e|>")
    assert find_text_split(tokenizer) == name
    export(build(vocab_size=900), tmp_path / "out", "gguf", tokenizer=tokenizer)
    with llama_server(tmp_path / "out" / FILE_NAME) as post:
        for text in texts:
            expected = post("/tokenize", content=text, parse_special=False, add_special=False)["tokens"]
            assert tokenizer(text).input_ids == expected, text
    again = load_tokenizer(tmp_path / "out" / FILE_NAME)
    assert [again(text).input_ids for text in texts] == [tokenizer(text).input_ids for text in texts]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((name, "float32") for name in MODELS), *(("qwen3moe", dtype) for dtype in GGUF_TYPES if dtype != "float32")],
)
def test_gguf_types(architecture, dtype, tmp_path):
    model = build(**MODELS[architecture])
    report = export(model, tmp_path / "out", "gguf", dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "out" / FILE_NAME)
    assert reader.fields["general.architecture"].contents() == architecture
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == GGUF_TYPES[dtype]
    # A rounded score of the router could choose another expert.
    assert types["blk.0.attn_norm.weight"] == types.get("blk.0.ffn_gate_inp.weight", "F32") == "F32"
    assert ("output.weight" in types) != model.config.tie_word_embeddings
    if dtype != "float32":
        assert 1e-4 < report.relative_difference < {"q5_1": 0.5, "q4_0": 1.0}.get(dtype, 0.1)
    elif architecture != "ernie4_5-moe":
        # transformers has its own table of names, and reads the config of Llama from the file.
        stock = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}[architecture]
        config = AutoConfig.for_model(stock, **write_stock_fields(model.config, stock)) if stock != "llama" else None
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=FILE_NAME, config=config)
        ids = torch.randint(6400, (2, 40), generator=torch.Generator().manual_seed(0))
        assert_near(read(ids).logits, model(ids).logits)


@pytest.mark.parametrize("source", ["ours", "v3", "smollm2"])
def test_a_chat_model_gets_a_modelfile_that_renders_its_template(tmp_path, source):
    """minimind-3 puts an empty thought in front of answers without one, and SmolLM2 has a default system message."""
    tokenizer = train_tokenizer(["some words to train on"], vocab_size=300)
    if source != "ours":
        name = FIXTURES / "tokenizers/v3" if source == "v3" else "embedded:smollm2"
        tokenizer.chat_template = load_tokenizer(name).chat_template
    export(build(vocab_size=len(tokenizer)), tmp_path / "out", "gguf", tokenizer=tokenizer, dtype="q4_0")
    text = (tmp_path / "out/Modelfile").read_text()
    assert text.startswith("FROM ./model.gguf\n") and 'PARAMETER stop "<|im_end|>"' in text
    (template,) = re.findall(r'TEMPLATE """(.*?)"""', text, re.DOTALL)
    loop, end = re.fullmatch(r"\{\{- range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL).groups()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    messages += [{"role": "assistant", "content": "yo"}, {"role": "user", "content": "and?"}]

    # Go's template, written out.
    rendered = ""
    for role, content in (message.values() for message in messages):
        condition = r'\{\{ if eq \.Role "assistant" \}\}(.*?)\{\{ end \}\}'
        branch = re.sub(condition, r"\1" * (role == "assistant"), loop, flags=re.DOTALL)
        rendered += branch.replace("{{ .Role }}", role).replace("{{ .Content }}", content)
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered + end == expected
    # Ollama puts this message in front of a conversation without one.
    prompt = tokenizer.apply_chat_template(messages[1:2], tokenize=False)
    assert re.findall(r'SYSTEM """(.*?)"""', text) == re.findall(r"system\n(.*?)<\|im_end", prompt)


def test_a_base_model_gets_no_modelfile_and_another_template_is_left_to_ollama(tmp_path):
    tokenizer = train_tokenizer(["some words to train on"], vocab_size=300)
    export(build(), tmp_path / "plain", "gguf")
    assert not (tmp_path / "plain/Modelfile").exists()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    export(build(vocab_size=len(tokenizer)), tmp_path / "other", "gguf", tokenizer=tokenizer, dtype="q4_0")
    text = (tmp_path / "other/Modelfile").read_text()
    assert text.startswith("FROM ./model.gguf\nREQUIRES 0.30.0\n") and "TEMPLATE" not in text


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


@needs_llama_cpp
def test_a_model_takes_its_sampling_along(tmp_path):
    """Ollama would use a penalty of 1.1, and llama.cpp a `top_k` of 40."""
    tokenizer, own = load_tokenizer(FIXTURES / "tokenizers/v1"), {"temperature": 0.7, "repetition_penalty": 1.25}
    for name, more in (("own", own), ("none", {})):
        model = build(**MODELS["llama"])
        model.generation_config.update(do_sample=True, **more)
        export(model, tmp_path / name, "gguf", tokenizer=tokenizer)
    lines = [(tmp_path / name / "Modelfile").read_text().splitlines()[-5:] for name in ("own", "none")]
    rest = ["PARAMETER top_p 0.9", "PARAMETER top_k 50"]
    end = "PARAMETER repeat_last_n -1"
    assert lines[0] == ["PARAMETER temperature 0.7", *rest, "PARAMETER repeat_penalty 1.25", end]
    assert lines[1] == ["PARAMETER temperature 0.8", *rest, "PARAMETER repeat_penalty 1.0", end]
    with llama_server(tmp_path / "own" / FILE_NAME) as post:
        settings = post("/completion", prompt=[1, 2], n_predict=1)["generation_settings"]
    found = [settings[name] for name in ("temperature", "repeat_penalty", "repeat_last_n")]
    assert found == pytest.approx([0.7, 1.25, -1])


CALL = {"name": "weather", "arguments": {"city": "Wien", "unit": "c"}}
CALL_MESSAGE = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]}
CHAT = [
    {"role": "user", "content": "你好 world, 12"},
    CALL_MESSAGE,
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]
CHAT += [{"role": "assistant", "content": "3 degrees"}, {"role": "user", "content": "and?"}]
# In the order of fields in which Ollama passes tools on.
PARAMETERS = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "enum": ["a", "<b>"]}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "'天气'", "parameters": PARAMETERS}}


def check_continuation(post: Any, model: MiniMindForCausalLM) -> None:
    prompt = torch.randint(100, 6400, (1, 40), generator=torch.Generator().manual_seed(1))
    greedy = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = model(greedy).logits[0].log_softmax(-1)
    for length in range(40, 52):
        actual = next_token(post, greedy[0, :length].tolist())
        assert actual.argmax() == greedy[0, length]
        torch.testing.assert_close(actual, expected[length - 1], rtol=0, atol=5e-5)


# Each architecture with a tokenizer of its own. The last two have Qwen's and Llama's templates.
CASES = [("ernie4_5-moe", "v1"), ("qwen3", "v3"), ("", "ours"), ("", "embedded:smollm2")]
CASES += [("qwen3moe", "qwen3"), ("llama", "llama3_2")]


@needs_llama_cpp
@pytest.mark.parametrize(("name", "tokenizer_name"), CASES)
@torch.no_grad()
def test_it_continues_tokenizes_and_renders_chats_alike(name, tokenizer_name, tmp_path):
    """Programs with llama.cpp's server, as Ollama, render the template in the file, tools and their calls included."""
    if tokenizer_name == "ours":
        tokenizer = train_tokenizer([TEXT, "some more words"], vocab_size=330)
    elif tokenizer_name in ("qwen3", "llama3_2"):
        tokenizer = load_tokenizer(FIXTURES / "tokenizers/v3")
        template = files("trl") / f"chat_templates/{tokenizer_name}.jinja"
        # Llama 3's template asks for the date.
        tokenizer.chat_template = "{% set date_string = 'today' %}" + template.read_text(encoding="utf-8")
    else:
        is_own = tokenizer_name in ("v1", "v3")
        tokenizer = load_tokenizer(FIXTURES / "tokenizers" / tokenizer_name if is_own else tokenizer_name)
    model = build(**MODELS.get(name, {}), vocab_size=max(6400, len(tokenizer)))
    export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    with llama_server(tmp_path / "out" / FILE_NAME) as post:
        if len(tokenizer) == 6400:
            check_continuation(post, model)
        read = post("/tokenize", content=TEXT, parse_special=True, add_special=True)["tokens"]
        assert read == tokenizer(TEXT).input_ids
        for messages, tools in ((CHAT[:1], None), (CHAT[:1], [TOOL]), (CHAT[:3], [TOOL]), (CHAT, [TOOL])):
            sent = json.loads(json.dumps(messages))
            for call in (call for message in sent for call in message.get("tool_calls", ())):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            prompt = post("/apply-template", messages=sent, tools=tools or [])["prompt"]
            # The prompt must not have a bos token that the server will add itself.
            prompt_ids = post("/tokenize", content=prompt, parse_special=True, add_special=True)["tokens"]
            expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            assert prompt_ids == tokenizer(expected, add_special_tokens=False).input_ids
            assert expected.endswith(prompt)


@needs_llama_cpp
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 5e-3), ("q8_0", 2e-2), ("q5_1", 5e-2)])
@torch.no_grad()
def test_it_runs_the_smaller_types(dtype, bound, tmp_path):
    model = build()
    export(model, tmp_path / "out", "gguf", tokenizer=load_tokenizer(FIXTURES / "tokenizers/v1"), dtype=dtype)
    prompt = list(range(100, 140))
    with llama_server(tmp_path / "out" / FILE_NAME) as post:
        actual = next_token(post, prompt)
    expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    # llama.cpp also rounds activations to this type. Random weights are the worst case. Other random weights differ by
    # 0.19, and equal probabilities of all tokens by 0.15.
    difference = (actual - expected).norm() / expected.norm()
    assert 1e-6 < difference < bound


# GGUF files of others, read


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct, a published chat model in blocks of four and eight bits."""
    return find_gguf("embedded:smollm2")


@torch.no_grad()
def test_a_published_model_is_that_of_transformers(smollm2):
    stock = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    model = load_upstream("embedded:smollm2")
    own = {"do_sample": True, "temperature": 1e-4, "repetition_penalty": 1.1}
    assert {name: getattr(model.generation_config, name) for name in own} == own
    ours = to_stock_model(model, "llama")
    for name, weight in stock.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    for field in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "head_dim", "max_position_embeddings"):
        assert getattr(ours.config, field) == pytest.approx(getattr(stock.config, field)), field


@needs_llama_cpp
def test_a_published_tokenizer_gives_the_ids_of_llama_cpp(smollm2, tmp_path):
    tokenizer, generator = load_tokenizer(smollm2), random.Random(0)
    texts = [
        "a  2 b",
        "In 2024 there were 365 days.\n\n  def f(x):\n\treturn 12",
        "你好 12 三",
        "   lead",
        "I'm 'll\r\n x",
    ]
    texts += ["".join(generator.choices("ab 12\n\t'.,!é你🙂ＡZ", k=40)) for _ in range(100)]
    with llama_server(smollm2) as post:
        for text in texts:
            expected = post("/tokenize", content=text, parse_special=False, add_special=False)["tokens"]
            assert tokenizer(text).input_ids == expected, text
            assert tokenizer.decode(expected) == text
        chat = [{"role": "user", "content": "What is 2+2?"}]
        prompt = post("/apply-template", messages=chat)["prompt"]
    assert prompt == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


# The package quantizes to few of the types that it dequantizes, so the blocks are random bytes below 64: no scale in
# them is infinite or NaN.
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_every_type_of_blocks(kind, tmp_path):
    # A block of the K types has 256 values.
    export(
        build(hidden_size=256, num_hidden_layers=1, vocab_size=300, intermediate_size=256), tmp_path / "out", "gguf"
    )
    quantized = gguf.GGMLQuantizationType[kind]
    blocks = np.random.default_rng(0).integers(0, 64, gguf.quant_shape_to_byte_shape((256, 256), quantized), np.uint8)
    other = {"blk.0.ffn_up.weight": (blocks, quantized)}
    rewrite(tmp_path / "out" / FILE_NAME, tmp_path / "blocks.gguf", tensors=other)
    read = load_upstream(tmp_path / "blocks.gguf").model.layers[0].mlp.up_proj.weight.detach()
    # transformers has its own code for each type.
    expected = dequantize(torch.from_numpy(blocks), int(quantized)).reshape(256, 256)
    torch.testing.assert_close(read, expected, rtol=1e-6, atol=1e-6)
    assert read.abs().max() > 0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaled_positions_of_llama_3(factor, tmp_path):
    """A GGUF file holds the factors of the frequencies, which llama.cpp's converter computes by this formula."""
    export(build(head_dim=64, rope_parameters={"rope_theta": 5e5}), tmp_path / "out", "gguf")
    frequencies = 5e5 ** -(np.arange(0, 64, 2) / 64)
    wavelengths, low, high = 2 * np.pi / frequencies, 8192 / 1.0, 8192 / 4.0
    smooth = (8192 / wavelengths - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wavelengths < high, 1.0, np.where(wavelengths > low, factor, between)).astype(np.float32)
    tensor = {"rope_freqs.weight": (factors, gguf.GGMLQuantizationType.F32)}
    rewrite(tmp_path / "out" / FILE_NAME, tmp_path / "llama3.gguf", tensors=tensor)
    model = load_upstream(tmp_path / "llama3.gguf")
    assert (model.config.rope_parameters["rope_type"], model.config.rope_parameters["factor"]) == ("llama3", factor)
    expected = torch.outer(torch.arange(50).double(), torch.from_numpy(frequencies / factors))
    torch.testing.assert_close(
        torch.view_as_real(model.model.rotary_emb.pos_cis[:50]).double(),
        torch.stack((expected.cos(), expected.sin()), -1),
        rtol=0,
        atol=1e-5,
    )


def test_the_tokenizer_of_a_file_comes_back_whole(tmp_path):
    tokenizer = load_tokenizer(FIXTURES / "tokenizers/v3")
    export(build(), tmp_path / "out", "gguf", tokenizer=tokenizer)
    again = load_tokenizer(tmp_path / "out" / FILE_NAME)
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template
    assert again(TEXT).input_ids == tokenizer(TEXT).input_ids
    tokens, expected = (
        [(index, token.content, token.special) for index, token in each.added_tokens_decoder.items()]
        for each in (again, tokenizer)
    )
    assert tokens == expected

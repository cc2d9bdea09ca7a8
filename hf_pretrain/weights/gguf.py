"""
GGUF files: written for llama.cpp and Ollama, and read.

The tables of that package give the names of tensors; keys and layouts follow llama.cpp's `convert_hf_to_gguf.py`. In
the graphs `llama` and `ernie4_5-moe`, llama.cpp rotates neighbouring channels, as MiniMind v1 does. In `qwen3` and
`qwen3moe`, it rotates the two halves of a head.
"""

import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..loading.native import DEFAULT_SAMPLING, own_sampling
from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..rows.encoding import EMPTY_THOUGHT
from ..runtime.errors import UserError
from ..tokenizer.control_tokens import encode_prompt, find_turn_end
from .gguf_file import GGUFFile, GGUFTensor, read_gguf_file
from .gguf_tokenizer import find_text_split
from .layouts import is_rotated, stock_layout, to_half_split


# transformers' names of the architectures, and llama.cpp's names for them.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "ernie4_5_moe": "ernie4_5-moe"}
GGUF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q5_1": "Q5_1", "q4_0": "Q4_0"}
FILE_NAME = "model.gguf"
# The modules of a layer, by transformers' names.
_PARTS = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo"))
_PARTS += ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate")
_PARTS += tuple(
    f"mlp.{mlp}{name}_proj" for mlp in ("", "experts.", "shared_experts.") for name in ("gate", "up", "down")
)
# Our names of the sizes that every file holds, and llama.cpp's keys, in the order of the file.
_KEYS = {
    "max_position_embeddings": ("context_length",),
    "hidden_size": ("embedding_length",),
    "num_hidden_layers": ("block_count",),
    "intermediate_size": ("feed_forward_length",),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length", "attention.value_length", "rope.dimension_count"),
    "rope_theta": ("rope.freq_base",),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon",),
    "vocab_size": ("vocab_size",),
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA_3 |= {"original_max_position_embeddings": 8192}
# Ollama 0.30 and newer render the Jinja template in the GGUF file, with tools, if the Modelfile has no template or if
# only the Jinja template knows tools. Older versions render this one, which is ChatML without tools. `%(thought)s` is
# the empty thought of minimind-3 in front of answers, and `%(system)s` the system message that templates such as
# SmolLM2's write where a conversation has none.
_CHATML = Path(__file__).with_name("Modelfile.txt")
_NEWER_OLLAMA = "FROM ./model.gguf\nREQUIRES 0.30.0\n"
# llama.cpp's names of the settings of the sampling.
_LLAMA_CPP = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "repetition_penalty": "penalty_repeat"}


def _write_modelfile(tokenizer: PreTrainedTokenizerFast, config: GenerationConfig) -> str:
    """Return Ollama's `Modelfile`. Ollama's own defaults differ, so it holds all settings of the sampling."""
    # As in transformers, the penalty counts the whole text.
    settings = DEFAULT_SAMPLING | own_sampling(config) | {"repeat_last_n": -1}
    lines = (f"PARAMETER {name.replace('repetition', 'repeat')} {value}\n" for name, value in settings.items())
    return _write_template(tokenizer) + "".join(lines)


def _write_template(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a `Modelfile` with a template if ChatML gives the prompts of the chat template token by token."""
    messages = [("user", "Why?"), ("assistant", "Because."), ("user", "And?")]
    try:
        prompt = encode_prompt(tokenizer, [{"role": role, "content": content} for role, content in messages])
    except UserError:  # a template may refuse such a conversation
        return _NEWER_OLLAMA
    text = tokenizer.decode(prompt)
    system = re.match(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
    thought = EMPTY_THOUGHT * text.endswith(EMPTY_THOUGHT)
    turns = [*([("system", system[1])] if system else []), *messages]
    parts = [f"{role}\n{thought * (role == 'assistant')}{content}<|im_end|>\n" for role, content in turns]
    written = "<|im_start|>" + "<|im_start|>".join([*parts, f"assistant\n{thought}"])
    # Ollama adds bos where the tokenizer does.
    if tokenizer(written).input_ids != prompt:
        return _NEWER_OLLAMA
    line = f'SYSTEM """{system[1]}"""\n' if system else ""
    return _CHATML.read_text(encoding="utf-8") % {"thought": thought, "system": line}


def _gguf_names(model: MiniMindForCausalLM) -> dict[str, list[str]]:
    """Return the GGUF names of the parts of each tensor; only `gate_up_proj` has two parts. Leave out a tied head."""
    import gguf

    # The package identifies architectures by numbers.
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = architectures[ARCHITECTURES[stock_layout(model.config)]]
    table = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    names = {}
    for ours in model.state_dict():
        parts = ("gate_proj", "up_proj") if ours.endswith("gate_up_proj") else ("gate_up_proj",)
        stems = [ours.removesuffix(".weight").replace("gate_up_proj", part) for part in parts]
        # llama.cpp uses the embedding if a file has no output head.
        if ours != "lm_head.weight" or not model.config.tie_word_embeddings:
            names[ours] = [f"{table.get_name(stem)}.weight" for stem in stems]
    return names


def gguf_tensors(model: MiniMindForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield the weights with GGUF names and layouts, in float32. Leave out a tied output head. Matrices have the shape
    `(out_features, in_features)`, stacked experts one more dimension in front.
    """
    state_dict = model.state_dict()
    for ours, names in _gguf_names(model).items():
        tensor = state_dict[ours].float()
        if model.config.qk_norm and is_rotated(ours):
            tensor = to_half_split(tensor, model.config.head_dim)
        # (num_experts, 2 * width, hidden_size) -> twice (num_experts, width, hidden_size)
        for name, part in zip(names, tensor.chunk(2, dim=1) if len(names) > 1 else [tensor], strict=True):
            yield name, part.contiguous()


def id_text(token: int) -> str:
    """Return the text of a token in a vocabulary of numbers. No text is a part of another."""
    return f"<{token}>"


def write_gguf(
    model: MiniMindForCausalLM,
    directory: Path,
    *,
    name: str,
    tokenizer: PreTrainedTokenizerFast | Literal["ids"] | None,
    dtype: str,
) -> Path:
    """
    Write `model.gguf` and return its path; for a tokenizer with a chat template, also Ollama's `Modelfile`.

    Args:
        model ([`MiniMindForCausalLM`]): the model.
        directory (`Path`): an existing directory.
        name (`str`): the name of the model that programs show.
        tokenizer ([`PreTrainedTokenizerFast`] or `"ids"`, *optional*): written into the file. `"ids"` writes a
            vocabulary of numbers, without special tokens, for programs that exchange only ids with llama.cpp.
        dtype (`str`): a key of `GGUF_TYPES`, for matrices. Norms and routers stay float32, as in llama.cpp. In the
            last three types, a matrix whose row length is not a multiple of 32 (a block) is written in F16.

    Raises:
        `UserError`: if a value overflows float16.
    """
    import gguf

    tensor_type = GGUF_TYPES[dtype]
    writer = gguf.GGUFWriter(directory / FILE_NAME, ARCHITECTURES[stock_layout(model.config)])
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if tensor_type == "F32" else f"MOSTLY_{tensor_type}"])
    writer.add_name(name)
    _add_config(writer, model.config)
    for setting, value in own_sampling(model.generation_config).items():
        getattr(writer, f"add_sampling_{_LLAMA_CPP[setting]}")(value)
    writer.add_sampling_penalty_last_n(-1)
    if tokenizer is None:
        # llama.cpp loads such a file, but accepts only ids, no text.
        writer.add_tokenizer_model("no_vocab")
    elif tokenizer == "ids":
        # The only kind of llama.cpp that has no special tokens by default.
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list([id_text(index) for index in range(model.config.vocab_size)])
        writer.add_token_types([gguf.TokenType.NORMAL] * model.config.vocab_size)
    else:
        _add_tokenizer(writer, tokenizer, model.config.vocab_size)
        if tokenizer.chat_template:
            modelfile = _write_modelfile(tokenizer, model.generation_config)
            (directory / "Modelfile").write_text(modelfile, encoding="utf-8")
    for tensor_name, tensor in gguf_tensors(model):
        quantized = gguf.GGMLQuantizationType[tensor_type]
        # Keep the router (ffn_gate_inp) exact: a rounded score could choose a different expert.
        if tensor.dim() == 1 or "ffn_gate_inp" in tensor_name:
            quantized = gguf.GGMLQuantizationType.F32
        elif tensor_type.startswith("Q") and tensor.shape[-1] % 32 != 0:
            quantized = gguf.GGMLQuantizationType.F16
        # The package casts to float16 without a check of the range, so look for infinities in the result.
        values = gguf.quantize(tensor.numpy(), quantized)
        if quantized == gguf.GGMLQuantizationType.F16 and not np.isfinite(values).all():
            raise UserError(f"{tensor_name} holds values that overflow float16; use bfloat16 or float32.")
        writer.add_tensor(tensor_name, values, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / FILE_NAME


def _add_config(writer: Any, config: MiniMindConfig):
    """Write the sizes and constants of the model."""
    architecture = ARCHITECTURES[stock_layout(config)]
    values = {**config.to_dict(), "rope_theta": config.rope_parameters["rope_theta"]}
    for name, key in ((name, key) for name, keys in _KEYS.items() for key in keys):
        add = writer.add_float32 if name in ("rope_theta", "rms_norm_eps") else writer.add_uint32
        add(f"{architecture}.{key}", values[name])
    if not config.num_experts:
        return
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if not config.qk_norm:
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.num_shared_experts * config.moe_intermediate_size)
        # Every layer has experts, beginning with the first one.
        writer.add_interleave_moe_layer_step(1)
        writer.add_leading_dense_block_count(0)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerFast, vocab_size: int):
    """Write vocabulary, merges, special tokens and chat template."""
    import gguf

    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    # The model's vocabulary may be larger than the tokenizer's, but llama.cpp needs a token for every row of the
    # embedding.
    types = dict.fromkeys(range(vocab_size), gguf.TokenType.UNUSED) | dict.fromkeys(pieces, gguf.TokenType.NORMAL)
    for index, token in tokenizer.added_tokens_decoder.items():
        types[index] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(find_text_split(tokenizer))
    writer.add_token_list([pieces.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types([types[index] for index in range(vocab_size)])
    # The package reads the rest only from files.
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        rest = gguf.SpecialVocab(directory, load_merges=True)
    # A prompt must not end with eos, even if the training rows do.
    rest.add_special_token = {"bos": tokenizer("a").input_ids[0] == tokenizer.bos_token_id, "eos": False}
    rest.add_to_gguf(writer, quiet=True)
    if (turn_end := find_turn_end(tokenizer)) is not None:
        writer.add_eot_token_id(turn_end)


def read_gguf(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """
    Return the weights and the configs of a GGUF file as transformers writes them: the tensors of the architecture's
    state dict in float32, the fields of config.json, and those of generation_config.json.

    Raises:
        `UserError`: for an architecture that is not in `ARCHITECTURES`, or a type of tensors that the `gguf` package
            cannot dequantize.
    """
    import gguf

    file = read_gguf_file(path)
    kind = file.fields.get("general.architecture")
    stock = next((name for name, theirs in ARCHITECTURES.items() if theirs == kind), None)
    if stock is None:
        known = ", ".join(ARCHITECTURES.values())
        raise UserError(f"{path} holds a model of the architecture {kind}. Those that are read: {known}.")
    fields = _read_config(path, stock, file)
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    table = gguf.get_tensor_name_map(architecture, fields["num_hidden_layers"])
    stems = ["model.embed_tokens", "model.norm", "lm_head"]
    stems += [f"model.layers.{i}.{part}" for i in range(fields["num_hidden_layers"]) for part in _PARTS]
    names = {f"{table.get_name(stem)}.weight": f"{stem}.weight" for stem in stems}
    tensors: dict[str, torch.Tensor] = {}
    for name, (number, shape, data) in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        try:
            quantized = gguf.GGMLQuantizationType(number)
            bytes_shape = gguf.quant_shape_to_byte_shape(shape, quantized)
            values = data[: math.prod(bytes_shape)].reshape(bytes_shape)
            # Copy the values: the file is mapped into memory, and `dequantize` may return a view of it.
            tensor = torch.from_numpy(np.array(gguf.dequantize(values, quantized), dtype=np.float32))
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"{path}: the tensor {name} cannot be read: {error}.") from error
        # A tensor that transformers' models lack keeps its name, and the import reports it.
        theirs = names.get(name, name)
        if kind == "llama" and is_rotated(theirs):
            # llama.cpp rotates neighbouring channels here, and transformers the halves of a head.
            tensor = to_half_split(tensor, fields["head_dim"])
        if ".experts." in theirs:
            # (num_experts, out_features, in_features) -> num_experts times (out_features, in_features)
            head, part = theirs.split("experts.")
            tensors |= {f"{head}experts.{i}.{part}": expert for i, expert in enumerate(tensor)}
        else:
            tensors[theirs] = tensor
    keys = {name: f"general.sampling.{theirs}" for name, theirs in _LLAMA_CPP.items()}
    # The file has float32.
    sampling = {name: round(float(file.fields[key]), 6) for name, key in keys.items() if key in file.fields}
    return tensors, fields, {"do_sample": "temperature" in sampling} | sampling


def _read_config(path: Path, stock: str, file: GGUFFile) -> dict[str, Any]:
    """Return the fields of config.json of the transformers architecture `stock`."""

    def get(name: str, default: Any = None) -> Any:
        return file.fields.get(f"{ARCHITECTURES[stock]}.{name}", default)

    sizes = {name: get(keys[0]) for name, keys in _KEYS.items()}
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rms_norm_eps")
    if lacking := [name for name in required if not isinstance(sizes[name], int | float) or sizes[name] <= 0]:
        raise UserError(f"{path} does not tell {', '.join(lacking)}, or not as one number.")
    if sizes["num_hidden_layers"] > len(file.tensors):
        raise UserError(f"{path} holds {len(file.tensors)} tensors for {sizes['num_hidden_layers']} layers.")
    heads, context = sizes["num_attention_heads"], sizes["max_position_embeddings"]
    defaults = {"num_key_value_heads": heads, "head_dim": sizes["hidden_size"] // heads, "rope_theta": 10000.0}
    defaults["vocab_size"] = len(file.fields.get("tokenizer.ggml.tokens", ())) or None
    sizes |= {name: value for name, value in defaults.items() if sizes[name] is None}
    head_dim = sizes["head_dim"]
    features = {
        "a sliding window": get("attention.sliding_window", context) < context,
        "experts": stock == "llama" and get("expert_count", 0) > 0,
        "scaled rotary positions": get("rope.scaling.type", "none") != "none",
        "a partly rotated head": get("rope.dimension_count", head_dim) != head_dim,
        "values of another width than keys": get("attention.value_length", head_dim) != head_dim,
    }
    if has := [feature for feature, is_there in features.items() if is_there]:
        raise UserError(f"{path}: a GGUF file with {', '.join(has)} is not read. Convert the checkpoint of the Hub.")
    fields = sizes | {
        "model_type": stock,
        # The file holds float32, and the config that it comes from a decimal number.
        "rms_norm_eps": float(f"{sizes['rms_norm_eps']:.6g}"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.fields.get("tokenizer.ggml.padding_token_id"),
    }
    if _ROPE_FACTORS in file.tensors:
        fields["rope_scaling"] = _find_llama3_scaling(path, file.tensors[_ROPE_FACTORS], fields)
    experts = {"num_experts": get("expert_count"), "num_experts_per_tok": get("expert_used_count")}
    if stock == "qwen3_moe":
        # llama.cpp always normalises.
        fields |= experts | {"moe_intermediate_size": get("expert_feed_forward_length"), "norm_topk_prob": True}
    if stock == "ernie4_5_moe":
        fields |= {"moe_num_experts": experts["num_experts"], "moe_k": experts["num_experts_per_tok"]}
        fields |= {"moe_intermediate_size": get("expert_feed_forward_length")}
        fields |= {"moe_num_shared_experts": get("expert_shared_count"), "moe_layer_start_index": 0}
    return fields


def _find_llama3_scaling(path: Path, tensor: GGUFTensor, fields: dict[str, Any]) -> dict[str, Any]:
    """
    Return the `rope_scaling` of Llama 3.1 or 3.2. A GGUF file holds the factors by which it divides the frequencies
    instead, in a tensor of shape `(head_dim // 2,)`.
    """
    factors = torch.from_numpy(tensor.data[: 4 * tensor.shape[0]].view(np.float32).copy())
    for factor in (8.0, 32.0):
        rope = _LLAMA_3 | {"factor": factor, "rope_theta": fields["rope_theta"]}
        config = LlamaConfig(**{**fields, "rope_parameters": rope})
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = fields["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        if factors.shape == plain.shape and torch.allclose(plain / scaled, factors, rtol=1e-4):
            return {name: value for name, value in rope.items() if name != "rope_theta"}
    raise UserError(f"{path}: its {_ROPE_FACTORS} is not that of Llama 3.1 or 3.2. Convert the checkpoint of the Hub.")

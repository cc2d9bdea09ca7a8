"""
GGUF files for llama.cpp and Ollama, through the `gguf` package (`hf_pretrain[gguf]`).

The tables of that package give the names of tensors; keys and layouts follow llama.cpp's `convert_hf_to_gguf.py`. In
the graphs `llama` and `ernie4_5-moe`, llama.cpp rotates neighbouring channels, as MiniMind v1 does. In `qwen3` and
`qwen3moe`, it rotates the two halves of a head.
"""

import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError
from ..runtime.installation import install_command
from .layouts import to_half_split


# transformers' names of the architectures, and llama.cpp's names for them.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "ernie4_5_moe": "ernie4_5-moe"}
FILE_NAME = "model.gguf"
# The tensor names of llama.cpp's ernie4_5-moe graph, written by hand: the check of a file must not use the same table
# as the writer.
_ERNIE_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def _gguf() -> Any:
    """Import the `gguf` package, which is optional; raise `ValueError` if it is missing."""
    try:
        import gguf
    except ImportError:
        raise UserError(f"GGUF needs the gguf package: {install_command('gguf')}") from None
    return gguf


def gguf_layout(config: MiniMindConfig) -> str:
    """Return the transformers architecture (a key of `ARCHITECTURES`) that a GGUF file of this model declares."""
    if config.num_experts:
        return "qwen3_moe" if config.qk_norm else "ernie4_5_moe"
    return "qwen3" if config.qk_norm else "llama"


def check_gguf(config: MiniMindConfig, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Raise `ValueError` for features and tokenizers that a GGUF file cannot describe."""
    _gguf()
    problem = None
    if config.num_experts and not config.norm_topk_prob:
        problem = "llama.cpp always normalises the top-k probabilities, this model does not (norm_topk_prob=False)"
    elif config.rope_parameters["rope_type"] != "default":
        problem = f"scaled rotary positions ({config.rope_parameters['rope_type']}) cannot be exported to GGUF"
    elif config.hidden_act != "silu":
        problem = f"llama.cpp's graphs use the activation silu, this model uses {config.hidden_act}"
    if problem is not None:
        raise UserError(f"No GGUF: {problem}. Formats that can hold this model: minimind, {gguf_layout(config)}.")
    if tokenizer is not None:
        _check_tokenizer(tokenizer)


def _check_tokenizer(tokenizer: PreTrainedTokenizerFast):
    """Raise `ValueError` unless llama.cpp's pre-tokenizer `gpt-2` splits text exactly as `tokenizer` does."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # `trim_offsets` changes only offsets, never tokens.
    split = {name: value for name, value in (backend["pre_tokenizer"] or {}).items() if name != "trim_offsets"}
    model = backend["model"]
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    # llama.cpp ignores these options of a BPE model.
    beyond = {name: model[name] for name in names if model.get(name)}
    is_gpt2 = (
        backend["normalizer"] is None
        and split == {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        and model["type"] == "BPE"
        and not beyond
    )
    if not is_gpt2:
        raise UserError(
            f"No GGUF: llama.cpp splits text as GPT-2 does, this tokenizer by {model['type']} ({beyond or 'plain'}) "
            f"and {split} after the normalizer {backend['normalizer']}. Use a byte-level BPE, as "
            "`hf-pretrain tokenizer` trains it."
        )
    _adds_bos(tokenizer)


def _adds_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether `tokenizer(text)` begins with bos. Raise `ValueError` if it adds anything else."""
    plain, whole = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    if whole not in (plain, [tokenizer.bos_token_id, *plain]):
        raise UserError(
            f"No GGUF: llama.cpp can put bos before a text, but this tokenizer turns {plain} into {whole}. Change its "
            "post_processor."
        )
    return whole != plain


def gguf_tensors(model: MiniMindForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with GGUF names and layouts, in float32 on the CPU. Leave out a tied output head."""
    config = model.config
    gguf = _gguf()
    layout = gguf_layout(config)
    # The package identifies architectures by numbers. Invert its table of names.
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[ARCHITECTURES[layout]], config.num_hidden_layers)
    for ours, tensor in model.state_dict().items():
        # llama.cpp uses the embedding if a file has no output head.
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = tensor.detach().cpu().float()
        if layout.startswith("qwen3") and re.search(r"\.[qk]_(proj|norm)\.", ours):
            tensor = to_half_split(tensor, config.head_dim)
        parts = {ours: tensor}
        if ours.endswith("gate_up_proj"):
            # (num_experts, 2 * width, hidden_size) -> twice (num_experts, width, hidden_size)
            gate, up = tensor.chunk(2, dim=1)
            parts = {ours.replace("gate_up_proj", "gate_proj"): gate, ours.replace("gate_up_proj", "up_proj"): up}
        for name, part in parts.items():
            yield f"{names.get_name(name.removesuffix('.weight'))}.weight", part.contiguous()


def write_gguf(
    model: MiniMindForCausalLM,
    output_dir: Path,
    *,
    model_name: str,
    tokenizer: PreTrainedTokenizerFast | None,
    tensor_type: str,
) -> Path:
    """
    Write `model.gguf` and return its path.

    Args:
        model ([`MiniMindForCausalLM`]): the model.
        output_dir (`Path`): an existing directory.
        model_name (`str`): the name that programs show.
        tokenizer ([`PreTrainedTokenizerFast`], *optional*): written into the file.
        tensor_type (`str`): `F32`, `F16`, `BF16`, `Q8_0`, `Q5_1` or `Q4_0`, for matrices. Norms and routers stay
            float32, as in llama.cpp. In the last three types, a matrix whose row length is not a multiple of 32 (a
            block) is written in F16.

    Raises:
        `ValueError`: if a value overflows float16.
    """
    gguf = _gguf()
    writer = gguf.GGUFWriter(output_dir / FILE_NAME, ARCHITECTURES[gguf_layout(model.config)])
    is_float = tensor_type == "F32"
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if is_float else f"MOSTLY_{tensor_type}"])
    writer.add_name(model_name)
    _add_config(writer, model.config)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, model.config.vocab_size)
    else:
        # llama.cpp loads such a file, but accepts only ids, no text.
        writer.add_tokenizer_model("no_vocab")
    for name, tensor in gguf_tensors(model):
        quantized = gguf.GGMLQuantizationType[tensor_type]
        # Keep the router (ffn_gate_inp) exact: a rounded score could choose a different expert.
        if tensor.dim() == 1 or "ffn_gate_inp" in name:
            quantized = gguf.GGMLQuantizationType.F32
        elif tensor_type.startswith("Q") and tensor.shape[-1] % 32 != 0:
            quantized = gguf.GGMLQuantizationType.F16
        # The package casts to float16 without a check of the range, so look for infinities in the result.
        values = gguf.quantize(tensor.numpy(), quantized)
        if quantized == gguf.GGMLQuantizationType.F16 and not np.isfinite(values).all():
            raise UserError(f"{name} holds values that overflow float16; use bfloat16 or float32.")
        writer.add_tensor(name, values, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output_dir / FILE_NAME


def write_modelfile(output_dir: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """
    Write the `Modelfile` with which Ollama imports `model.gguf`: `ollama create NAME -f Modelfile`.

    Ollama does not read the chat template of the file, which is a Jinja template. The one here renders system, user
    and assistant messages in the same way, and no tools.
    """
    eos = tokenizer.eos_token
    lines = [
        f"FROM ./{FILE_NAME}",
        'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}',
        "{{ .Content }}<|im_end|>",
        "{{ end }}<|im_start|>assistant",
        '"""',
        *(f'PARAMETER stop "{stop}"' for stop in dict.fromkeys(["<|im_end|>", eos])),
        "PARAMETER temperature 0.8",
        "PARAMETER top_p 0.9",
    ]
    path = output_dir / "Modelfile"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _add_config(writer: Any, config: MiniMindConfig):
    """Write the sizes and constants of the model."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if not config.num_experts:
        return
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if gguf_layout(config) == "ernie4_5_moe":
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.num_shared_experts * config.moe_intermediate_size)
        # Every layer has experts, beginning with the first one.
        writer.add_interleave_moe_layer_step(1)
        writer.add_leading_dense_block_count(0)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerFast, vocab_size: int):
    """Write vocabulary, merges, special tokens and chat template."""
    gguf = _gguf()
    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for index in range(vocab_size):
        # The model's vocabulary may be larger than the tokenizer's, but llama.cpp needs a token for every row of the
        # embedding.
        tokens.append(pieces.get(index, f"[PAD{index}]"))
        if index not in pieces:
            types.append(gguf.TokenType.UNUSED)
        elif index in added:
            types.append(gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_add_bos_token(_adds_bos(tokenizer))
    # A prompt must not end with eos, even if the training rows do.
    writer.add_add_eos_token(False)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        # The package reads merges only from a tokenizer's files, so save the tokenizer first.
        merges = gguf.SpecialVocab(directory, load_merges=True).merges
    writer.add_token_merges(merges)
    for kind in ("bos", "eos", "pad", "unk"):
        index = getattr(tokenizer, f"{kind}_token_id")
        if index is not None:
            getattr(writer, f"add_{kind}_token_id")(index)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def read_gguf_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, dequantized to float32."""
    gguf = _gguf()
    # Copy the values: the reader maps the file into memory, and `dequantize` may return a view of it.
    return {
        tensor.name: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).float()
        for tensor in gguf.GGUFReader(path).tensors
    }


def read_ernie_weights(path: Path) -> dict[str, torch.Tensor]:
    """
    Return the dequantized weights of an `ernie4_5-moe` file under our names. Unknown tensors keep their own names.
    """
    tensors = read_gguf_tensors(path)
    ends = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    weights = {f"{ends[name]}.weight": tensors.pop(f"{name}.weight") for name in ends if f"{name}.weight" in tensors}
    for name in [name for name in tensors if name.endswith(".ffn_gate_exps.weight")]:
        layer = f"model.layers.{name.split('.')[1]}.mlp.experts"
        gate, up = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        # twice (num_experts, width, hidden_size) -> (num_experts, 2 * width, hidden_size)
        weights[f"{layer}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        weights[f"{layer}.down_proj"] = tensors.pop(name.replace("gate", "down"))
    for name, tensor in tensors.items():
        layer, _, part = name.removeprefix("blk.").removesuffix(".weight").partition(".")
        weights[f"model.layers.{layer}.{_ERNIE_NAMES[part]}.weight" if part in _ERNIE_NAMES else name] = tensor
    return weights


def check_gguf_fields(path: Path, config: MiniMindConfig) -> None:
    """Raise `RuntimeError` unless a file holds exactly the sizes and constants of `config`."""
    architecture = ARCHITECTURES[gguf_layout(config)]
    expected: dict[str, float] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if config.num_experts:
        expected |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if architecture == "ernie4_5-moe":
        expected |= {
            "expert_shared_count": config.num_shared_experts,
            "expert_shared_feed_forward_length": config.num_shared_experts * config.moe_intermediate_size,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 0,
        }
    # GGUF prefixes the fields with the architecture's name.
    expected = {f"{architecture}.{name}": value for name, value in expected.items()}
    fields = _gguf().GGUFReader(path).fields
    written = {name: field.contents() for name, field in fields.items() if name.startswith(f"{architecture}.")}
    # GGUF stores fractional numbers in float32, so compare with a tolerance. NaN stands for a missing field and is
    # never close to anything.
    wrong = [
        f"{name} is {written.get(name)} and should be {expected.get(name)}"
        for name in sorted(written.keys() | expected.keys())
        if not math.isclose(written.get(name, math.nan), expected.get(name, math.nan), rel_tol=1e-6)
    ]
    if wrong:
        raise RuntimeError(f"{path} was written wrongly: {'; '.join(wrong)}. Please report this.")


__all__ = [
    "FILE_NAME",
    "check_gguf",
    "check_gguf_fields",
    "gguf_layout",
    "gguf_tensors",
    "read_ernie_weights",
    "read_gguf_tensors",
    "write_modelfile",
    "write_gguf",
]

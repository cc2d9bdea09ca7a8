"""
GGUF files for llama.cpp and Ollama, through the `gguf` package (`hf_pretrain[gguf]`).

The tables of that package give the names of tensors; keys and layouts follow llama.cpp's `convert_hf_to_gguf.py`. In
the graphs `llama` and `ernie4_5-moe`, llama.cpp rotates neighbouring channels, as MiniMind v1 does. In `qwen3` and
`qwen3moe`, it rotates the two halves of a head.
"""

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError, needing_extra
from .layouts import is_rotated, stock_layout, to_half_split, to_interleaved


# transformers' names of the architectures, and llama.cpp's names for them.
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "ernie4_5_moe": "ernie4_5-moe"}
FILE_NAME = "model.gguf"
# Ollama does not read the Jinja template in the GGUF file. This one renders system, user and assistant messages in the
# same way, and no tools.
_MODELFILE = f'''\
FROM ./{FILE_NAME}
TEMPLATE """{{{{- range .Messages }}}}<|im_start|>{{{{ .Role }}}}
{{{{ .Content }}}}<|im_end|>
{{{{ end }}}}<|im_start|>assistant
"""
PARAMETER stop "<|im_end|>"
PARAMETER temperature 0.8
PARAMETER top_p 0.9
'''


def _gguf() -> Any:
    """Import the `gguf` package, which is optional; raise `ValueError` if it is missing."""
    with needing_extra("gguf", "GGUF needs the gguf package"):
        import gguf
    return gguf


def check_tokenizer_for_gguf(tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Raise `ValueError` for a tokenizer that a GGUF file cannot describe, or if the package is missing."""
    _gguf()
    if tokenizer is None:
        return
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    splits = {name: value for name, value in (backend["pre_tokenizer"] or {}).items() if name != "trim_offsets"}
    if (
        backend["normalizer"] is not None
        or splits != {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        or backend["model"]["type"] != "BPE"
    ):
        raise UserError(
            "No GGUF: llama.cpp splits text as GPT-2 does, this tokenizer does not. Use a byte-level BPE, as "
            "`hf-pretrain tokenizer` trains it."
        )


def _namer(config: MiniMindConfig) -> Callable[[str], list[str]]:
    """Return a function that maps our name of a tensor to the GGUF names of its parts; only `gate_up_proj` has two."""
    gguf = _gguf()
    # The package identifies architectures by numbers.
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[ARCHITECTURES[stock_layout(config)]], config.num_hidden_layers)

    def names(ours: str) -> list[str]:
        parts = ["gate_proj", "up_proj"] if ours.endswith("gate_up_proj") else ["gate_up_proj"]
        stem = ours.removesuffix(".weight")
        return [f"{table.get_name(stem.replace('gate_up_proj', part))}.weight" for part in parts]

    return names


def gguf_tensors(model: MiniMindForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with GGUF names and layouts, in float32. Leave out a tied output head."""
    config, names = model.config, _namer(model.config)
    for ours, tensor in model.state_dict().items():
        # llama.cpp uses the embedding if a file has no output head.
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = tensor.float()
        if config.qk_norm and is_rotated(ours):
            tensor = to_half_split(tensor, config.head_dim)
        # (num_experts, 2 * width, hidden_size) -> twice (num_experts, width, hidden_size)
        parts = tensor.chunk(2, dim=1) if ours.endswith("gate_up_proj") else [tensor]
        for name, part in zip(names(ours), parts, strict=True):
            yield name, part.contiguous()


def write_gguf(
    model: MiniMindForCausalLM,
    output_dir: Path,
    *,
    model_name: str,
    tokenizer: PreTrainedTokenizerFast | None,
    tensor_type: str,
) -> Path:
    """
    Write `model.gguf` and return its path; for a tokenizer with MiniMind's chat format, also Ollama's `Modelfile`.

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
    writer = gguf.GGUFWriter(output_dir / FILE_NAME, ARCHITECTURES[stock_layout(model.config)])
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if tensor_type == "F32" else f"MOSTLY_{tensor_type}"])
    writer.add_name(model_name)
    _add_config(writer, model.config)
    if tokenizer is None:
        # llama.cpp loads such a file, but accepts only ids, no text.
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_tokenizer(writer, tokenizer, model.config.vocab_size)
        if "<|im_start|>" in (tokenizer.chat_template or ""):
            (output_dir / "Modelfile").write_text(_MODELFILE, encoding="utf-8")
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
    if not config.qk_norm:
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.num_shared_experts * config.moe_intermediate_size)
        # Every layer has experts, beginning with the first one.
        writer.add_interleave_moe_layer_step(1)
        writer.add_leading_dense_block_count(0)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerFast, vocab_size: int):
    """Write vocabulary, merges, special tokens and chat template."""
    gguf = _gguf()
    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    # The model's vocabulary may be larger than the tokenizer's, but llama.cpp needs a token for every row of the
    # embedding.
    types = dict.fromkeys(range(vocab_size), gguf.TokenType.UNUSED) | dict.fromkeys(pieces, gguf.TokenType.NORMAL)
    for index, token in tokenizer.added_tokens_decoder.items():
        types[index] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([pieces.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types([types[index] for index in range(vocab_size)])
    # The package reads the rest only from files.
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        rest = gguf.SpecialVocab(directory, load_merges=True)
    # A prompt must not end with eos, even if the training rows do.
    rest.add_special_token = {"bos": tokenizer("a").input_ids[0] == tokenizer.bos_token_id, "eos": False}
    rest.add_to_gguf(writer, quiet=True)


def read_gguf(path: Path, config: MiniMindConfig) -> MiniMindForCausalLM:
    """Return the model in a file that [`write_gguf`] wrote, dequantized to float32."""
    gguf = _gguf()
    # Copy the values: the reader maps the file into memory, and `dequantize` may return a view of it.
    tensors = {
        tensor.name: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).float()
        for tensor in gguf.GGUFReader(path).tensors
    }
    model, names = MiniMindForCausalLM(copy.deepcopy(config)), _namer(config)
    state_dict = {}
    for ours in model.state_dict():
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = [tensors.pop(name) for name in names(ours)]
        # twice (num_experts, width, hidden_size) -> (num_experts, 2 * width, hidden_size)
        state_dict[ours] = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if config.qk_norm and is_rotated(ours):
            state_dict[ours] = to_interleaved(state_dict[ours], config.head_dim)
    assert not tensors, f"unexpected tensors: {', '.join(tensors)}"
    # A tied head has no weights of its own.
    model.load_state_dict(state_dict, strict=not config.tie_word_embeddings)
    return model.eval()

"""
Tokenizers: train, load, check and apply them.

A tokenizer trained here is a byte-level BPE (https://arxiv.org/abs/1508.07909 on bytes, as in GPT-2): it covers any
text without an unknown token and gives it back unchanged. Its chat template is `templates/minimind.jinja`, and
`templates/response.json` parses what a model answers.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from ..runtime.names import may_be_checkpoint, split_hub_name
from .special_tokens import BOS_TOKEN, EOS_TOKEN, MARKS, RESPONSE_TEMPLATE_PATH


logger = logging.get_logger(__name__)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """
    Writes a tokenizer that transformers 4.57 reads as well, and that pads on the left: a decoder generates from the
    right end of a row, so a padded batch gives the answers of its single prompts.
    """
    tokenizer.save_pretrained(directory)
    path = Path(directory, "tokenizer_config.json")
    fields = json.loads(path.read_text(encoding="utf-8"))
    # NOTE: transformers 4 knows neither the class TokenizersBackend nor a list of extra special tokens.
    if fields["tokenizer_class"] == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(fields.setdefault("extra_special_tokens", {}), list):
        fields |= {"additional_special_tokens": fields["extra_special_tokens"], "extra_special_tokens": {}}
    fields["padding_side"] = "left"
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(name_or_path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """
    Loads a tokenizer from a directory or from the Hub. One that has our control tokens and no response template, as
    MiniMind-3's, gets ours. Code that comes with it runs with `trust_remote_code` alone.

    Raises:
        `ValueError`: if there is none under that name.
    """
    name_or_path, _ = split_hub_name(str(name_or_path))
    if not may_be_checkpoint(name_or_path):
        raise ValueError(
            f"There is no directory {name_or_path} to load a tokenizer from. Check --tokenizer_name_or_path and "
            "--model_name_or_path."
        )
    is_path = Path(name_or_path).is_dir()
    if is_path and not (Path(name_or_path) / "tokenizer.json").is_file():
        raise ValueError(
            f"The directory {name_or_path} holds no tokenizer.json. Point --tokenizer_name_or_path (or --model_name_or_path) at what "
            "recipes/tokenizer.py or `save_pretrained` wrote, or leave it out to train a tokenizer on the data."
        )
    try:
        # NOTE: without a value, transformers asks on stdin.
        tokenizer = AutoTokenizer.from_pretrained(
            str(name_or_path), use_fast=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        where = "the directory" if is_path else "neither a directory here nor a tokenizer on the Hub:"
        raise ValueError(
            f"No tokenizer could be loaded from {where} {str(name_or_path)!r}. Check --tokenizer_name_or_path and --model_name_or_path, or "
            f"leave it out to train a tokenizer on the data. ({error})"
        ) from error
    control_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if tokenizer.response_template is None and control_tokens.issuperset([BOS_TOKEN, EOS_TOKEN, *MARKS]):
        tokenizer.response_template = json.loads(RESPONSE_TEMPLATE_PATH.read_text(encoding="utf-8"))
    return tokenizer


def find_tokenizer(path: str | Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer beside weights: in their directory, in that of a file of them, or on the Hub; `None` without one."""
    path, _ = split_hub_name(str(path))
    local = Path(path)
    directory = local.parent if local.is_file() else local
    if directory.is_dir():
        return load_tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
    try:
        # NOTE: without this file AutoTokenizer makes an empty tokenizer from the config's model_type.
        hf_hub_download(path, "tokenizer.json")
    except (OSError, ValueError):
        return None
    return load_tokenizer(path)


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, *, vocab_size: int, name: str) -> None:
    """
    Makes sure that a model can embed every id that a tokenizer gives.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer.
        vocab_size (`int`): entries of the model's embedding.
        name (`str`): what the error calls the tokenizer.

    Raises:
        `ValueError`: if an id is at or above `vocab_size`, or if bos, eos or pad is missing.
    """
    missing = [kind for kind in ("bos", "eos", "pad") if tokenizer.special_tokens_map.get(f"{kind}_token") is None]
    if missing:
        raise ValueError(
            f"The tokenizer {name} has no {', '.join(f'{kind}_token' for kind in missing)}. Set it in its "
            "tokenizer_config.json: documents begin with bos, end with eos and rows are filled with pad."
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise ValueError(
            f"The tokenizer {name} gives ids up to {largest}, but the model's vocab_size is {vocab_size}. Pass "
            f"--config_overrides vocab_size={largest + 1} for a new model, or use the model's own tokenizer."
        )


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> torch.LongTensor:
    """
    UTF-8 bytes that each id stands for, to turn nats per token into bits per byte.

    Exact for byte-level BPE, where a piece is spelt with one character for each byte. SentencePiece-like pieces count
    their white space mark as one byte and `<0xAB>` as one byte.

    Returns:
        `torch.LongTensor` of shape `(len(tokenizer),)`: bytes; 0 for special tokens.
    """
    lengths = torch.zeros(len(tokenizer), dtype=torch.long)
    is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    added = tokenizer.added_tokens_decoder
    for piece, index in tokenizer.get_vocab().items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(piece.encode())
        elif is_byte_level:
            lengths[index] = len(piece)
        else:
            is_byte = len(piece) == 6 and piece.startswith("<0x")
            lengths[index] = 1 if is_byte else len(piece.replace("\u2581", " ").encode())
    return lengths

"""
Save, load and check tokenizers.

The tokenizers of this package are byte-level BPEs (https://arxiv.org/abs/1508.07909 on bytes, as in GPT-2). They
encode any text without an unknown token and decode it unchanged. Their chat template is `templates/minimind.jinja`;
`templates/response.json` parses a model's answers.
"""

import json
import os
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..runtime.errors import UserError
from ..runtime.names import may_be_checkpoint, split_hub_name
from .chat_template import add_marks
from .control_tokens import BOS_TOKEN, EOS_TOKEN, MARKS, RESPONSE_TEMPLATE_PATH


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """
    Save a tokenizer so that transformers 4.57 can read it too, with padding on the left.

    A decoder generates at the right end of a row. So with padding on the left, a batch of prompts gives the same
    answers as the single prompts.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer; it is not changed.
        directory (`str` or `Path`): directory to write to.
    """
    tokenizer.save_pretrained(directory)
    path = Path(directory, "tokenizer_config.json")
    fields = json.loads(path.read_text(encoding="utf-8"))
    # NOTE: transformers 4 knows neither the class `TokenizersBackend` nor a list in `extra_special_tokens`.
    if fields["tokenizer_class"] == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(fields.setdefault("extra_special_tokens", {}), list):
        fields |= {"additional_special_tokens": fields["extra_special_tokens"], "extra_special_tokens": {}}
    fields["padding_side"] = "left"
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerFast:
    """
    Load a tokenizer from a directory or from the Hub.

    A tokenizer with our control tokens but without a response template, such as minimind-3's, gets our template. The
    chat templates of MiniMind's own tokenizers get marks around the text of the assistant, so that TRL's
    `assistant_only_loss` works.

    Args:
        name_or_path (`str` or `Path`): a directory or Hub id.

    Raises:
        `ValueError`: if no tokenizer can be loaded from there.
    """
    name_or_path, _ = split_hub_name(os.path.expanduser(name_or_path))
    is_path = Path(name_or_path).is_dir()
    if Path(name_or_path).is_file():
        raise UserError(
            f"{name_or_path} holds weights, but no tokenizer. Pass --tokenizer_name_or_path with the directory of its "
            "tokenizer, such as MiniMind's `model`; or convert the file with `hf-pretrain convert`."
        )
    if not may_be_checkpoint(name_or_path):
        raise UserError(
            f"There is no directory {name_or_path}. Correct the name, or first run the stage that writes it, such as "
            "`hf-pretrain pretrain --preset tiny` for out/pretrain-tiny."
        )
    # Without this file, transformers would build an empty tokenizer from a config.json.
    if is_path and not (Path(name_or_path) / "tokenizer.json").is_file():
        raise UserError(
            f"The directory {name_or_path} holds no tokenizer.json. Name a directory that a run, "
            "`hf-pretrain tokenizer` or `save_pretrained` wrote."
        )
    try:
        # NOTE: without a value for `trust_remote_code`, transformers asks on stdin, and a batch job cannot answer.
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, use_fast=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name_or_path!r} is neither a directory here nor a Hub id with a tokenizer that can be loaded: {error}"
        ) from error
    # minimind-3's template writes tool calls and thoughts as ours does, so our response template fits its answers.
    control_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if tokenizer.response_template is None and control_tokens.issuperset([BOS_TOKEN, EOS_TOKEN, *MARKS]):
        tokenizer.response_template = json.loads(RESPONSE_TEMPLATE_PATH.read_text(encoding="utf-8"))
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = add_marks(tokenizer.chat_template)
    return tokenizer


def add_words(tokenizer: PreTrainedTokenizerFast, path: str) -> None:
    """
    Add the lines of a file to a tokenizer, as tokens that also occur in text.

    Raises:
        `UserError`: if the file cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--add_tokens {path} cannot be read: {error}. Name a text file with a token per line."
        ) from error
    tokenizer.add_tokens([line for line in lines if line.strip()])


def find_tokenizer(path: str | Path) -> PreTrainedTokenizerFast | None:
    """
    Return the tokenizer that lies beside weights, or `None` if there is none.

    Args:
        path (`str` or `Path`): a checkpoint directory, a file of weights, or a Hub id.
    """
    path, _ = split_hub_name(str(path))
    local = Path(path)
    directory = local.parent if local.is_file() else local
    if directory.is_dir():
        return load_tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
    try:
        # NOTE: without this file, AutoTokenizer builds an empty tokenizer from the config's `model_type`, without an
        # error.
        hf_hub_download(path, "tokenizer.json")
    except (OSError, ValueError):
        return None
    return load_tokenizer(path)


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, *, vocab_size: int, name: str) -> None:
    """
    Check that a model can embed every id of a tokenizer.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer.
        vocab_size (`int`): number of entries in the model's embedding.
        name (`str`): name of the tokenizer in error messages.

    Raises:
        `ValueError`: if an id is at or above `vocab_size`, or if eos or pad is missing.
    """
    missing = [kind for kind in ("eos", "pad") if tokenizer.special_tokens_map.get(f"{kind}_token") is None]
    if missing:
        raise UserError(
            f"The tokenizer {name} has no {', '.join(f'{kind}_token' for kind in missing)}. Set it in its "
            "tokenizer_config.json: documents end with eos, and pad fills rows up."
        )
    # Do not use `len(tokenizer)`: ids need not be contiguous.
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise UserError(
            f"The tokenizer {name} gives ids up to {largest}, but the model's vocab_size is {vocab_size}. Pass "
            f"--config_overrides vocab_size={largest + 1} for a new model, or use the model's own tokenizer."
        )


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> torch.LongTensor:
    """
    Count the UTF-8 bytes of each id, to convert nats per token into bits per byte.

    The counts are exact for byte-level BPE, which spells a piece with one character per byte. In SentencePiece-like
    vocabularies, the mark for white space and pieces such as `<0xAB>` count as one byte each.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer.

    Returns:
        `torch.LongTensor` of shape `(largest id + 1,)`: bytes; 0 for special tokens and unused ids.
    """
    vocab = tokenizer.get_vocab()
    # As in `check_tokenizer`: ids need not be contiguous.
    lengths = torch.zeros(max(vocab.values()) + 1, dtype=torch.long)
    # NOTE: the backend has no attribute for its kind, only its `repr`.
    is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    added = tokenizer.added_tokens_decoder
    for piece, index in vocab.items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(piece.encode())
        elif is_byte_level:
            # One visible character for each byte.
            lengths[index] = len(piece)
        else:
            lengths[index] = 1 if piece.startswith("<0x") else len(piece.replace("\u2581", " ").encode())
    return lengths

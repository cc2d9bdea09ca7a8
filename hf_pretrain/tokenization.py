"""
Tokenizers: train, load, check and apply them.

A tokenizer trained here is a byte-level BPE (https://arxiv.org/abs/1508.07909 on bytes, as in GPT-2): it covers any
text without an unknown token and gives it back unchanged. Its chat template is `templates/minimind.jinja`, and
`templates/response.json` parses what a model answers.
"""

import hashlib
import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from datasets import Dataset, IterableDataset
from huggingface_hub import hf_hub_download
from huggingface_hub.constants import HF_HOME
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from .weight_files import may_be_checkpoint, split_hub_name


logger = logging.get_logger(__name__)

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# They show in decoded text even with `skip_special_tokens=True`, because tool parsers and users read them there.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
RESERVED_TOKENS = [f"<|reserved_{index}|>" for index in range(27)]
SPECIAL_TOKENS = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, *MARKS, *RESERVED_TOKENS]

CHAT_TEMPLATE_PATH = Path(__file__).parent / "templates" / "minimind.jinja"
# Reads back what the assistant writes in that template: reasoning, tool calls and the rest. A call whose arguments are
# not JSON keeps them as text, and what is no call at all is text as well, because a small model writes both.
RESPONSE_TEMPLATE_PATH = Path(__file__).parent / "templates" / "response.json"
# Stands inside the spelling of a control token that is only text, until the text is encoded.
_GUARD = "\ue000"
_UNGUARDED = re.compile(f"{_GUARD}{_GUARD}|[^{_GUARD}]")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 6400) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer. The same texts in the same order give the same tokenizer.

    Args:
        texts (`Iterable[str]`): the text to learn from.
        vocab_size (`int`, defaults to 6400): entries in total, `SPECIAL_TOKENS` and the 256 bytes included. Little
            text gives fewer.

    Returns:
        [`PreTrainedTokenizerFast`]: with `<|endoftext|>` 0 (pad), `<|im_start|>` 1 (bos), `<|im_end|>` 2 (eos) and the
        chat and response templates. `tokenizer(text)` adds neither bos nor eos; [`encode_documents`] does.

    Raises:
        `ValueError`: if `vocab_size` has no room for the special tokens and the bytes.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens and 256 bytes need at least "
            f"{smallest}."
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=token not in MARKS, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE_PATH.read_text(encoding="utf-8"),
        response_template=json.loads(RESPONSE_TEMPLATE_PATH.read_text(encoding="utf-8")),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


# A tokenizer that an older version trained is not taken for one of this version.
_TRAINING_CODE = inspect.getsource(train_tokenizer)


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


def load_or_train_tokenizer(
    name_or_path: str | None,
    documents: Dataset | IterableDataset,
    *,
    vocab_size: int,
    cache_dir: str | Path | None = None,
    max_training_chars: int = 50_000_000,
) -> PreTrainedTokenizerFast:
    """
    Loads a tokenizer, or trains one on the documents and keeps it for the next run on the same ones.

    Args:
        name_or_path (`str`, *optional*): a directory or Hub id to load; `None` trains.
        documents ([`Dataset`] or [`IterableDataset`]): with a column `text`.
        vocab_size (`int`): entries of the trained tokenizer, in total.
        cache_dir (`str` or `Path`, *optional*): where trained tokenizers are kept, by the content of what they were
            trained on; by default `hf_pretrain/tokenizers` in `HF_HOME`.
        max_training_chars (`int`, defaults to 50,000,000): above this, training sees evenly spaced documents; of a
            stream, the first ones.

    Raises:
        `ValueError`: if the named tokenizer cannot be loaded, or `vocab_size` is too small.
    """
    if name_or_path is not None:
        return load_tokenizer(name_or_path)
    texts = _sample_texts(documents, max_training_chars)
    digest = hashlib.blake2b(digest_size=16)
    templates = [path.read_text(encoding="utf-8") for path in (CHAT_TEMPLATE_PATH, RESPONSE_TEMPLATE_PATH)]
    recipe = [vocab_size, SPECIAL_TOKENS, *templates, _TRAINING_CODE, tokenizers.__version__]
    for part in (json.dumps(recipe), *texts):
        digest.update(part.encode() + b"\0")
    directory = Path(cache_dir or Path(HF_HOME) / "hf_pretrain" / "tokenizers") / digest.hexdigest()
    if directory.is_dir():
        logger.info(f"Taking the tokenizer trained before on these documents: {directory}")
        return load_tokenizer(directory)

    logger.info(f"Training a tokenizer of {vocab_size} entries on {len(texts)} documents")
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: another process never sees half of it, and whoever is second finds the same content.
    scratch = tempfile.mkdtemp(dir=directory.parent)
    try:
        save_tokenizer(tokenizer, scratch)
        os.rename(scratch, directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return load_tokenizer(directory)


def _sample_texts(documents: Dataset | IterableDataset, max_chars: int) -> list[str]:
    """Texts of at most about `max_chars` characters: evenly spaced, or the first ones of a stream."""
    if isinstance(documents, Dataset):
        probe = documents.select(np.linspace(0, len(documents) - 1, min(len(documents), 1000), dtype=np.int64))
        mean_chars = sum(map(len, probe["text"])) / max(len(probe), 1)
        if mean_chars * len(documents) <= max_chars:
            return list(documents["text"])
        count = max(1, int(max_chars / mean_chars))
        return list(documents.select(np.linspace(0, len(documents) - 1, count, dtype=np.int64))["text"])
    texts, num_chars = [], 0
    for document in documents:
        texts.append(document["text"])
        num_chars += len(texts[-1])
        if num_chars >= max_chars:
            break
    return texts


def encode_documents(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """
    Ids of each document: bos, the text, eos.

    Text is only text here: where it contains the spelling of a control token, such as `<|im_end|>` or `<think>`, it is
    encoded letter by letter like any other text and still decodes to itself. Control tokens come from the chat
    template alone, so that no document can end itself early or speak as the assistant.

    Args:
        texts (`list[str]`): the documents.
        tokenizer ([`PreTrainedTokenizerFast`]): with bos and eos.
    """
    encodings = _plain_backend(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [[bos, *encoding.ids, eos] for encoding in encodings]


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    enable_thinking: bool | None = None,
) -> list[int]:
    """
    Ids of a conversation up to where the assistant answers: those of `apply_chat_template`, except that no message can
    bring in a control token by spelling it.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): with a chat template.
        messages (`list[dict]`): the conversation so far.
        tools (`list[dict]`, *optional*): JSON schemas of the tools on offer.
        enable_thinking (`bool`, *optional*): with or without reasoning; by default as the template has it.
    """
    # MiniMind-3's own template has another name for it.
    thinking = {} if enable_thinking is None else dict.fromkeys(("enable_thinking", "open_thinking"), enable_thinking)
    rendered = tokenizer.apply_chat_template(
        guard_control_tokens(tokenizer, messages),
        tools=guard_control_tokens(tokenizer, tools),
        add_generation_prompt=True,
        tokenize=False,
        **thinking,
    )
    return encode_rendered(tokenizer, rendered)[0]


def guard_control_tokens(tokenizer: PreTrainedTokenizerFast, value: Any) -> Any:
    """
    A copy of messages or tools whose texts do not spell control tokens, to be rendered by a chat template and then
    encoded by [`encode_rendered`], which takes the guards out again.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): its added tokens are the control tokens, special or not.
        value (JSON): any nesting of dictionaries, lists and texts.
    """
    if isinstance(value, str):
        _, beginning = _control_patterns(tokenizer)
        return beginning.sub(rf"\g<0>{_GUARD}", value.replace(_GUARD, 2 * _GUARD))
    if isinstance(value, dict):
        return {guard_control_tokens(tokenizer, k): guard_control_tokens(tokenizer, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [guard_control_tokens(tokenizer, item) for item in value]
    return value


def encode_rendered(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """
    Encodes what a chat template made of guarded messages ([`guard_control_tokens`]): the control tokens in it are the
    template's, and what is guarded is plain text.

    Returns:
        `tuple[list[int], list[tuple[int, int]]]`: ids, and for each the characters `[start, end)` of `text`, guards
        counted, that it stands for.
    """
    control, _ = _control_patterns(tokenizer)
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    position = 0
    for match in [*control.finditer(text), None]:
        end = match.start() if match else len(text)
        plain = text[position:end]
        kept: Sequence[int] = range(position, end)
        if _GUARD in plain:
            # Of two guards the first is the text's own.
            kept = [found.start() for found in _UNGUARDED.finditer(text, position, end)]
            plain = "".join(text[i] for i in kept)
        if plain:
            encoding = _plain_backend(tokenizer).encode(plain, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(kept[first], kept[last - 1] + 1) for first, last in encoding.offsets]
        if match:
            ids.append(tokenizer.convert_tokens_to_ids(match[0]))
            offsets.append(match.span())
            position = match.end()
    return ids, offsets


@lru_cache(maxsize=4)
def _control_patterns(tokenizer: PreTrainedTokenizerFast) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds the control tokens in a text, and what finds the first character of each."""
    spellings = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    beginnings = (f"{re.escape(spelling[0])}(?={re.escape(spelling[1:])})" for spelling in spellings)
    return re.compile("|".join(map(re.escape, spellings))), re.compile("|".join(beginnings))


@lru_cache(maxsize=4)
def _plain_backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """
    The tokenizer's backend without added tokens.

    NOTE: `split_special_tokens=True` is not enough, it still matches added tokens that are not marked special, as
    `<think>` is here and in Qwen's tokenizers.
    """
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    absent: dict[str, Any] = {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps(fields | absent))

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
from huggingface_hub import constants, get_session, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.named import load_named
from ..runtime.names import is_gguf, may_be_checkpoint, split_hub_name
from .chat_template import add_marks, free_date
from .control_tokens import BOS_TOKEN, EOS_TOKEN, MARKS, RESPONSE_TEMPLATE


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """
    Save a tokenizer so that transformers 4.57 can read it too, with padding on the left.

    A decoder generates at the right end of a row. So with padding on the left, a batch of prompts gives the same
    answers as the single prompts.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer; it is not changed.
        directory (`str` or `Path`): directory to write to.
    """
    template = tokenizer.chat_template
    tokenizer.chat_template = free_date(template)
    tokenizer.save_pretrained(directory)
    tokenizer.chat_template = template
    path = Path(directory, "tokenizer_config.json")
    fields = json.loads(path.read_text(encoding="utf-8"))
    # NOTE: transformers 4 knows neither the class `TokenizersBackend` nor a list in `extra_special_tokens`.
    if fields["tokenizer_class"] == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(fields.setdefault("extra_special_tokens", {}), list):
        fields |= {"additional_special_tokens": fields["extra_special_tokens"], "extra_special_tokens": {}}
    fields["padding_side"] = "left"
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _hub_answers() -> bool:
    """
    Return whether the Hub can be reached.

    NOTE: if it cannot, `huggingface_hub` tries each file six times, for a minute in all. No setting changes that.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:
        announce(f"The Hub ({constants.ENDPOINT}) cannot be reached ({error}): reading what was downloaded earlier")
        return False
    return True


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerFast:
    """
    Load a tokenizer from a directory or from the Hub.

    A tokenizer with our control tokens but without a response template, such as minimind-3's, gets our template. The
    chat templates of MiniMind's own tokenizers get marks around the text of the assistant, so that TRL's
    `assistant_only_loss` works.

    Args:
        name_or_path (`str` or `Path`): a directory or Hub id; a file of weights, as in [`find_tokenizer`].

    Raises:
        `UserError`: if no tokenizer can be loaded from there.
    """
    if is_gguf(name_or_path):
        return _complete(load_named("hf_pretrain.weights.gguf_tokenizer:read_gguf_tokenizer")(name_or_path))
    name_or_path, _ = split_hub_name(os.path.expanduser(name_or_path))
    is_path = Path(name_or_path).is_dir()
    if Path(name_or_path).is_file():
        if _has_tokenizer(directory := _directory_of(Path(name_or_path))):
            return load_tokenizer(directory)
        fix = "Pass the directory of its tokenizer, such as MiniMind's `model`: --tokenizer_name_or_path of a stage"
        raise UserError(f"{name_or_path} holds weights, but no tokenizer. {fix}, or --tokenizer of convert.")
    if not may_be_checkpoint(name_or_path):
        stage = "the stage that writes it, such as `hf-pretrain pretrain --preset tiny` for out/pretrain-tiny"
        raise UserError(f"There is no directory {name_or_path}. Correct the name, or first run {stage}.")
    # Without this file, transformers would build an empty tokenizer from a config.json.
    can_answer = is_path or constants.HF_HUB_OFFLINE or _hub_answers()
    if can_answer and (base := _base_of_adapter(name_or_path)):
        return load_tokenizer(base)
    if is_path and not (Path(name_or_path) / "tokenizer.json").is_file():
        raise UserError(f"The directory {name_or_path} holds no tokenizer.json. Name one that a run or recipe wrote.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path,
            # NOTE: without a value, transformers asks on stdin, and a batch job cannot answer.
            trust_remote_code=False,
            local_files_only=is_path or constants.HF_HUB_OFFLINE or not can_answer,
        )
    # The last two: a JSON file of another shape.
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{name_or_path!r} is neither a directory here nor a Hub id with a tokenizer that can be loaded: {error}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        fix = "Pass a directory with a tokenizer.json and no tekken.json, or uninstall mistral-common"
        raise UserError(f"{name_or_path} loads as {type(tokenizer).__name__}, which is no fast tokenizer. {fix}.")
    return _complete(tokenizer)


def _base_of_adapter(name_or_path: str | Path) -> str | None:
    """Return the base model of an adapter without a tokenizer, as stock peft saves it; `None` for anything else."""
    base = load_named("hf_pretrain.loading.adapters:adapter_base")(name_or_path)
    return None if base is None or _has_tokenizer(name_or_path) else base


def _directory_of(path: Path) -> Path:
    """Return the directory of a model's tokenizer. In MiniMind's checkout, `model` stands beside `out`."""
    places = [path.parent] if path.is_file() else [path]
    places += [path.absolute().parents[1] / "model"] if path.suffix == ".pth" else []
    return next((place for place in places if (place / "tokenizer.json").is_file()), places[0])


def _has_tokenizer(name_or_path: str | Path) -> bool:
    """Return whether a directory or a repository holds a tokenizer.json, or whether nobody can tell."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path, "tokenizer.json").is_file()
    try:
        hf_hub_download(str(name_or_path), "tokenizer.json")
    except EntryNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _complete(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        # Llama's and Mistral's have none. Masks leave padding out, whatever its id.
        tokenizer.pad_token = tokenizer.eos_token
    # minimind-3's template writes tool calls and thoughts as ours does, so our response template fits its answers.
    control_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if tokenizer.response_template is None and control_tokens.issuperset([BOS_TOKEN, EOS_TOKEN, *MARKS]):
        tokenizer.response_template = json.loads(RESPONSE_TEMPLATE)
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = add_marks(tokenizer.chat_template)
    return tokenizer


def add_words(tokenizer: PreTrainedTokenizerFast, path: str) -> None:
    """
    Add the lines of a file to a tokenizer, as tokens that also occur in text.

    Raises:
        `UserError`: if the file cannot be read, or the tokenizer would decode a word to another text. A byte-level
            decoder reads letters such as `ß` and `č` as bytes.
    """
    try:
        words = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        message = f"--add_tokens {path} cannot be read: {error}. Name a text file with a token per line."
        raise UserError(message) from error
    tokenizer.add_tokens(words)
    for word in words:
        # Some tokenizers begin every text with a space, put one behind each added token, or lose those around it.
        text = f"a {word}, b"
        alone, within = (tokenizer.decode(tokenizer.encode(part, add_special_tokens=False)) for part in (word, text))
        if alone != word or within.strip() != text:
            decoded = f"the tokenizer decodes the word {word!r} as {alone!r}, and {text!r} as {within!r}"
            raise UserError(f"--add_tokens {path}: {decoded}. Leave the word out.")


def find_tokenizer(path: str | Path) -> PreTrainedTokenizerFast | None:
    """
    Return the tokenizer that lies beside weights, or `None` if there is none. An adapter without one has that of its
    base model, and MiniMind's weights have that of `model` beside their directory.

    Args:
        path (`str` or `Path`): a checkpoint directory, a file of weights, or a Hub id.

    Raises:
        `UserError`: if the tokenizer, or the base model of an adapter, cannot be read.
    """
    if is_gguf(path):
        return load_tokenizer(path)
    path, _ = split_hub_name(str(path))
    local = Path(path)
    directory = _directory_of(local)
    if directory.is_dir():
        if _has_tokenizer(directory):
            return load_tokenizer(directory)
        base = None if local.is_file() else _base_of_adapter(directory)
        return find_tokenizer(base) if base else None
    try:
        # NOTE: without this file, AutoTokenizer builds an empty tokenizer from the config's `model_type`, without an
        # error.
        hf_hub_download(path, "tokenizer.json")
    except LocalEntryNotFoundError:
        return None
    except EntryNotFoundError:
        return find_tokenizer(base) if (base := _base_of_adapter(path)) else None
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
        `UserError`: if an id is at or above `vocab_size`, or if eos or pad is missing.
    """
    missing = [kind for kind in ("eos", "pad") if tokenizer.special_tokens_map.get(f"{kind}_token") is None]
    if missing:
        tokens = ", ".join(f"{kind}_token" for kind in missing)
        raise UserError(f"The tokenizer {name} has no {tokens}. Set it in its tokenizer_config.json.")
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

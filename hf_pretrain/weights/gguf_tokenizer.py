"""Tokenizers in GGUF files, with llama.cpp's names of the ways to split text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from ..runtime.errors import UserError
from .gguf_file import read_gguf_file
from .package_models import find_gguf


@dataclass(frozen=True)
class TextSplit:
    """
    How a byte-level BPE splits text into words.

    Args:
        pre_tokenizer ([`~tokenizers.pre_tokenizers.PreTokenizer`]): the last step writes bytes as characters.
        normalizer ([`~tokenizers.normalizers.Normalizer`], *optional*): what is applied before. llama.cpp has none.
        ignore_merges (`bool`): whether a word that is in the vocabulary stays whole, whatever the merges say.
        adds_bos (`bool`): what llama.cpp does if a file does not say it.
    """

    pre_tokenizer: Any
    normalizer: Any = None
    ignore_merges: bool = False
    adds_bos: bool = False

    def apply(self, backend: Tokenizer) -> None:
        """Let a tokenizer split text in this way."""
        backend.pre_tokenizer, backend.decoder = self.pre_tokenizer, decoders.ByteLevel()
        if self.normalizer is not None:
            backend.normalizer = self.normalizer


def find_text_split(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the key of `TEXT_SPLITS` for a tokenizer. Raise `UserError` if there is none."""

    def splitting(backend: Tokenizer) -> Any:
        parts = json.loads(backend.to_str())
        steps = parts["pre_tokenizer"] or {}
        steps = [dict(step, trim_offsets=None) for step in steps.get("pretokenizers", [steps])]
        return steps, parts["normalizer"], parts["model"]["type"], parts["model"].get("ignore_merges", False)

    for name, split in TEXT_SPLITS.items():
        plain = Tokenizer(models.BPE(ignore_merges=split.ignore_merges))
        split.apply(plain)
        if splitting(tokenizer.backend_tokenizer) == splitting(plain):
            return name
    known = f"byte-level BPEs that split text as {', '.join(TEXT_SPLITS)} do"
    fix = "Convert to --format llama or qwen3, and that with llama.cpp's convert_hf_to_gguf.py"
    raise UserError(f"No GGUF with this tokenizer: only {known} are written. {fix}.")


def _by_expression(name: str) -> Any:
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
TEXT_SPLITS = {
    "gpt-2": TextSplit(_GPT_2),
    "smollm": TextSplit(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT_2])),
    "qwen2": TextSplit(_by_expression("qwen2"), normalizers.NFC()),
    "llama-bpe": TextSplit(_by_expression("llama-bpe"), ignore_merges=True, adds_bos=True),
    "tekken": TextSplit(_by_expression("tekken"), ignore_merges=True, adds_bos=True),
}


def read_gguf_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """
    Return the tokenizer in the GGUF file of this name: a byte-level BPE of a kind in `TEXT_SPLITS`, or SentencePiece.

    Raises:
        `UserError`: if the file holds no tokenizer, or one of another kind.
    """
    path = find_gguf(name)
    assert path is not None
    all_fields = read_gguf_file(path).fields
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in all_fields.items()}
    kind, split = fields.get("model"), TEXT_SPLITS.get(fields.get("pre", "gpt-2"))
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and split is None):
        found = (
            "no tokenizer" if kind in (None, "no_vocab") else f"a tokenizer of the kind {kind}, {fields.get('pre')}"
        )
        known = f"SentencePiece (llama) and, of gpt2, {', '.join(TEXT_SPLITS)} are read"
        raise UserError(f"{path} holds {found}: {known}. Pass another one, such as --tokenizer_name_or_path DIR.")
    tokens, types = fields["tokens"], fields.get("token_type") or [1] * len(fields["tokens"])
    # 5 is an unused id, such as those that pad the vocabulary.
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != 5}
    special: dict[str, Any] = {
        f"{ours}_token": tokens[fields[f"{theirs}_token_id"]]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{theirs}_token_id" in fields
    }
    if kind == "gpt2":
        assert split is not None
        merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
        split.apply(backend)
        adds_bos = split.adds_bos
    else:
        scores = dict(zip(tokens, fields["scores"], strict=True))
        control = {token for token, kind in zip(tokens, types, strict=True) if kind in (3, 4, 5)}
        merges = generate_merges(vocab, scores, skip_tokens=control)
        prefix = {"add_prefix_space": fields.get("add_space_prefix", True)}
        backend = LlamaTokenizer(vocab=vocab, merges=merges, **prefix).backend_tokenizer
        adds_bos = True
    # 3 is a control token, 4 one that a user has defined. The order keeps their ids.
    added = [AddedToken(t, normalized=False, special=types[i] == 3) for t, i in vocab.items() if types[i] in (3, 4)]
    backend.add_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=all_fields.get("tokenizer.chat_template"),
        add_bos_token="bos_token" in special and fields.get("add_bos_token", adds_bos),
        add_eos_token="eos_token" in special and fields.get("add_eos_token", False),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **special,
    )

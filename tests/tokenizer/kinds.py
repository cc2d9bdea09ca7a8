"""The matrix of tokenizers: toys of every kind that transformers loads, published ones, and templates of TRL."""

import copy
import json
import re
import shutil
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import mistral_common
import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.integrations.mistral import convert_tekken_tokenizer

from hf_pretrain.tokenizer.pretrained import load_tokenizer, save_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.models import FIXTURES


TEXT = 4 * (
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2) < 2 | 3 > 2 / 1)\n\nThe river runs under the bridge.\n\n"
    "- one café, 12 people\n- two \t tabs\n"
)
CONTROL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
LLAMA3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ByteLevel, Metaspace = pre_tokenizers.ByteLevel, pre_tokenizers.Metaspace
LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
PIECES = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
WORDS_OF_LLAMA = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(LLAMA3, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
)
BYTES = ByteLevel(add_prefix_space=False)
WORDS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), Metaspace()])


def byte_level(pre_tokenizer=None, normalizer=None, **settings):
    backend = Tokenizer(models.BPE(**settings))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer or BYTES, decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    backend.normalizer = normalizer
    return backend


def pieces(pre_tokenizer, normalizer=None):
    """Return a BPE over pieces with `▁` for a space, with the control tokens <s> and </s> in its vocabulary."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = Metaspace(split=False), PIECES
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    fields = json.loads(backend.to_str()) | {"added_tokens": []}
    backend = Tokenizer.from_str(json.dumps(fields))
    backend.pre_tokenizer, backend.normalizer = pre_tokenizer, normalizer
    return backend


def unigram(normalizer=None):
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder, backend.normalizer = WORDS, decoders.Metaspace(), normalizer
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"added_tokens": []}))


def llama(legacy):
    model = json.loads(pieces(None).to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return LlamaTokenizer(vocab=model["vocab"], merges=merges, legacy=legacy)


GEMMA = pre_tokenizers.Split(" ", "merged_with_previous")
# Each kind: its backend, and the settings of its control tokens.
KINDS = {
    "byte-level": (byte_level, {}),
    "add_prefix_space": (lambda: byte_level(ByteLevel(add_prefix_space=True)), {}),
    "Llama 3": (lambda: byte_level(WORDS_OF_LLAMA, ignore_merges=True), {}),
    "Qwen": (lambda: byte_level(WORDS_OF_LLAMA, normalizers.NFC()), {}),
    "SmolLM": (lambda: byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES])), {}),
    **{
        f"Metaspace {scheme}, split {split}": (partial(pieces, Metaspace(prepend_scheme=scheme, split=split)), {})
        for scheme, split in product(("first", "always", "never"), (True, False))
    },
    "legacy Prepend": (lambda: pieces(None, LEGACY), {}),
    "Phi-3": (lambda: pieces(None, LEGACY), {"rstrip": True}),
    "lstrip": (lambda: pieces(None, LEGACY), {"lstrip": True}),
    "lstrip and rstrip": (byte_level, {"lstrip": True, "rstrip": True}),
    "normalized": (lambda: pieces(None, LEGACY), {"normalized": True}),
    "normalized, NFKC": (lambda: byte_level(normalizer=normalizers.NFKC()), {"normalized": True}),
    "lower case": (lambda: byte_level(normalizer=normalizers.Lowercase()), {"normalized": True}),
    "T5": (unigram, {}),
    "Unigram, NFKC": (lambda: unigram(normalizers.NFKC()), {}),
    "Gemma": (lambda: pieces(GEMMA, normalizers.Replace(" ", "▁")), {}),
    "LlamaTokenizer": (lambda: llama(False), {}),
    "LlamaTokenizer, legacy": (lambda: llama(True), {}),
}
ANSWER = "{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
TEMPLATES = {
    "lines": "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.role == 'assistant' %}" + ANSWER + "{% else %}{{ message.content }}<|end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "no lines": "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}" + ANSWER
    + "{% else %}<|user|> {{ message.content }} <|assistant|>{% endif %}{% endfor %}",
    "words": "{{ bos_token }}{% for message in messages %}{{ message.role }}:\n\n{% if message.role == 'assistant' %}"
    + ANSWER + "{% else %}{{ message.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n\n{% endif %}",
}  # fmt: skip
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]SPACE{{ message.content }}SPACE"
    "[/INST]{% else %}{% generation %}SPACE{{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
TEMPLATES |= {f"Mistral, {name}": MISTRAL.replace("SPACE", space) for name, space in (("spaces", " "), ("none", ""))}
# As templates are published: without marks.
TEMPLATES |= {
    name: re.sub("{% (end)?generation %}", "", TEMPLATES[marked])
    for name, marked in (("unmarked", "lines"), ("Mistral, unmarked", "Mistral, spaces"))
}
# The two files of tekken are alike and slow to convert: one will do.
MISTRALS = ("mistral v1", "mistral v2", "mistral v3", "mistral v7", "tekken")


@cache
def load(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `KINDS` with the special tokens `CONTROL`, or a published one, loaded as users do."""
    if name == "ours":
        return base()
    if name in ("v1", "v3"):
        return load_tokenizer(FIXTURES / "tokenizers" / name)
    if name == "smollm2":
        return load_tokenizer("embedded:smollm2")
    if name in MISTRALS:
        return load_mistral(name)
    build, settings = KINDS[name]
    tokenizer = backend = build()
    if isinstance(backend, Tokenizer):
        backend.add_special_tokens([AddedToken(token, **{"normalized": False} | settings) for token in CONTROL])
        if name == "Gemma":
            backend.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "\n\n\n", "<b>", "</b>")])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    else:
        tokenizer.add_special_tokens({"additional_special_tokens": CONTROL[2:]})
    return tokenizer


def load_mistral(name: str) -> PreTrainedTokenizerFast:
    data = Path(mistral_common.__file__).parent / "data"
    with TemporaryDirectory() as directory:
        if name == "tekken":
            tokenizer = convert_tekken_tokenizer(str(data / "tekken_240718.json"))
        else:
            (file,) = data.glob(f"*.model.{name.removeprefix('mistral ')}")
            shutil.copy(file, f"{directory}/tokenizer.model")
            tokenizer = LlamaTokenizer.from_pretrained(directory)
        save_tokenizer(tokenizer, directory)
        return load_tokenizer(directory)


TRL = Path(trl.__file__).parent / "chat_templates"
SPECIAL = re.compile(r"<\|[^|<>\s]+\|?>|<｜[^｜<>\s]+｜>|<(?:start|end)_of_\w+>|<\w+\|>|\[gMASK\]|<sop>|</s>")


def trl_template(name: str) -> str:
    return (TRL / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def base() -> PreTrainedTokenizerFast:
    return train_tokenizer(["What is two and two? It is four, said the user."] * 4, vocab_size=400)


def with_template(template: str) -> PreTrainedTokenizerFast:
    """Return a toy tokenizer with a chat template, and the special tokens that the template writes."""
    tokenizer = copy.deepcopy(base())
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    tokenizer.chat_template = template
    return tokenizer

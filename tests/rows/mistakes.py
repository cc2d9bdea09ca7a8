"""Mistakes in the rows of a data set."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from hf_pretrain.data.conversations import read_conversation
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.collators import DataCollatorForPackedRows
from hf_pretrain.rows.data_arguments import PreferenceArguments
from hf_pretrain.rows.encoding import ConversationEncoder, encode_conversation
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.rows.preparation import load_rows
from hf_pretrain.stages.dpo import DPOTrainingArguments
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.mistakes import Mistake
from tests.toys import write_jsonl


V1 = Path(__file__).parents[1] / "fixtures/tokenizers/v1"
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}


@cache
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer(["two and two"], vocab_size=300)


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(trained())
    tokenizer.chat_template = template
    return tokenizer


def collate(row: dict, **settings: int) -> Callable[[], object]:
    return lambda: DataCollatorForPackedRows(pad_token_id=0, **settings)([row])


def pack(**how: object) -> Callable[[], object]:
    return lambda: prepare_rows(Dataset.from_dict({"text": ["a"]}), trained(), **how)


def encode_by_v1(message: dict) -> Callable[[], object]:
    """Return a function that renders a message with the template of MiniMind's first tokenizer."""

    def encode() -> None:
        tokenizer = load_tokenizer(V1)
        set_template(tokenizer)
        encode_conversation(tokenizer, [USER, message, ANSWER])

    return encode


def weigh_parts_of_answers():
    marks = "{% generation %}a{% endgeneration %}: {% generation %}b{% endgeneration %}"
    template = "{% for m in messages if m.role == 'assistant' %}" + marks + "{{ m.content }}{% endfor %}2+2?"
    text = read_conversation({"messages": [USER, {**ANSWER, "weight": 0.5}, USER, ANSWER]})
    ConversationEncoder()([text], with_template(template), max_length=100)


def render_a_fault():
    encode_conversation(with_template(trained().chat_template + "{{ messages[0].content % 1 }}"), [USER, ANSWER])


def load_too_long(kind: str) -> Callable[[Path], object]:
    """Return a function that loads a record without room for its answer."""

    def load(tmp_path: Path) -> None:
        record = {"prompt": "two " * 40, **({"completion": "4"} if kind == "conversations" else PREFERENCE)}
        names = [write_jsonl(tmp_path / "a.jsonl", [record])]
        args = DPOTrainingArguments(str(tmp_path), use_cpu=True, bf16=False, max_length=32)
        if kind == "preferences":
            load_rows(PreferenceArguments(names, validation_fraction=0), args, trained(), prepare=prepare_pairs)
        else:
            load_rows(ChatArguments(names, validation_fraction=0, max_length=32), args, trained())

    return load


ROW = {"input_ids": [1, 8, 2]}
PREFERENCE = {"chosen": "4", "rejected": "5"}
OTHERS = {"add": CALL, "5": {"role": "tool", "content": "5"}, "so": {**ANSWER, "reasoning_content": "so"}}
ROWS: dict[str, Callable[..., object]] = {
    "3 tokens is longer than max_length=2. Make rows shorter": collate(ROW | {"seq_lengths": [3]}, max_length=2),
    "do not sum to the row's 3 tokens": collate(ROW | {"seq_lengths": [2]}),
    r"lists of equal length.*'labels': \(2,\)": collate(ROW | {"labels": [1, 8]}),
    "max_length=4 is too short to learn from. Use at least 8": pack(max_length=4),
    "--packing wrapped would cut conversations apart. Use bfd or none": (
        pack(max_length=32, packing_strategy="wrapped", encoder=ConversationEncoder())
    ),
    "None of 1 conversations has an answer to train on within --max_length. Raise it": load_too_long("conversations"),
    "None of 1 preferences has an answer to train on within --max_length. Raise it": load_too_long("preferences"),
    "--enable_thinking contradict each other": lambda: ChatArguments(empty_think_ratio=0.2, enable_thinking=False),
    "--add_system_ratio 1.5 must be at least 0 and at most 1": lambda: ChatArguments(add_system_ratio=1.5),
    "has no chat template. Pass --chat_template minimind": lambda: set_template(with_template("")),
    "none.jinja cannot be read: .*No such file": lambda: set_template(with_template(""), "none.jinja"),
    **{f"leaves '{part}' out": encode_by_v1(message) for part, message in OTHERS.items()},
    "does not mark one text for each of 2 messages of the assistant": weigh_parts_of_answers,
    "cannot render the conversation that begins '2.2.': not all arguments": render_a_fault,
}
MISTAKES = [Mistake(says, make) for says, make in ROWS.items()]

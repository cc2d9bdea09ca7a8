"""
Train a tokenizer on the documents that a pretraining run would train on, and save it with its chat template.

    hf-pretrain tokenizer --dataset_name embedded --vocab_size 6400 --output_dir out/tokenizer

Pass the tokenizer to a run with `hf-pretrain pretrain --tokenizer_name_or_path out/tokenizer`. The recipe prints the
bytes per token on the validation set. With more bytes per token, the same text has fewer tokens. To share the
tokenizer, run `hf upload me/mine out/tokenizer`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from hf_pretrain.data.documents import load_documents
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.writing import LOCK_NAME, check_empty, written_whole
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.pretrained import save_tokenizer
from hf_pretrain.tokenizer.training import load_or_train_tokenizer
from hf_pretrain.training.parsing import parse_args


@dataclass
class TokenizerArguments:
    """The documents, the size of the vocabulary, and the directory of the tokenizer."""

    dataset_name: list[str] = field(
        default_factory=lambda: ["embedded"],
        metadata={"help": "One or more of embedded[:part], a path, glob or directory, a Hub id name:config@revision."},
    )
    text_column: str = field(default="text", metadata={"help": "Key or column that holds the text."})
    vocab_size: int = field(default=6400, metadata={"help": "Entries in total, special tokens included."})
    output_dir: str = field(default="out/tokenizer", metadata={"help": "Directory of the tokenizer."})
    streaming: bool = field(default=False, metadata={"help": "Train on the first documents of a stream."})
    validation_fraction: float = field(
        default=0.01, metadata={"help": "Share of the documents in the validation set."}
    )
    max_rejected_ratio: float = field(default=0.01, metadata={"help": "Largest share of bad lines."})


ARGUMENTS = (TokenizerArguments,)


def main(args: TokenizerArguments) -> None:
    check_empty(args.output_dir, "--output_dir")
    output_dir = Path(args.output_dir)
    train, validation = load_documents(
        args.dataset_name,
        text_column=args.text_column,
        streaming=args.streaming,
        validation_fraction=args.validation_fraction,
        max_rejected_ratio=args.max_rejected_ratio,
    )
    tokenizer = load_or_train_tokenizer(None, train, vocab_size=args.vocab_size)
    with written_whole(output_dir, lock=LOCK_NAME) as scratch:
        # Another process may have written here since the first check.
        check_empty(output_dir, "--output_dir")
        save_tokenizer(tokenizer, scratch)
    print(f"The tokenizer has {len(tokenizer)} entries and is in {output_dir}")

    # The tokenizer was not trained on these documents.
    texts = list(validation["text"])
    if texts:
        # bos and eos are tokens without text.
        num_tokens = sum(len(ids) - 2 for ids in encode_documents(texts, tokenizer))
        num_bytes = sum(len(text.encode()) for text in texts)
        print(f"{num_bytes / num_tokens:.3f} bytes per token on {len(texts)} validation documents")


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS))

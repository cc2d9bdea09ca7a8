"""
Train a tokenizer on the documents that a pretraining run would train on, and save it with its chat template.

    hf-pretrain tokenizer --dataset_name embedded --vocab_size 6400 --output_dir out/tokenizer

Pass the tokenizer to a run with `hf-pretrain pretrain --tokenizer_name_or_path out/tokenizer`. The recipe prints the
bytes per token on the validation set. With more bytes per token, the same text has fewer tokens. To share the
tokenizer, run `hf upload me/mine out/tokenizer`.
"""

from dataclasses import dataclass
from pathlib import Path

from hf_pretrain.data.documents import load_documents
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.flags import flag, same_flag
from hf_pretrain.runtime.parser import parse_flags
from hf_pretrain.runtime.writing import LOCK_NAME, check_empty, written_whole
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.pretrained import save_tokenizer
from hf_pretrain.tokenizer.training import load_or_train_tokenizer


@dataclass
class TokenizerArguments:
    """Documents and tokenizer."""

    dataset_name: list[str] = same_flag(DataArguments, "dataset_name")
    text_column: str = same_flag(DataArguments, "text_column")
    encoding: str = same_flag(DataArguments, "encoding")
    vocab_size: int = flag(6400, "Entries in total, special tokens included.")
    output_dir: str = flag("out/tokenizer", "Directory of the tokenizer.")
    streaming: bool = flag(False, "Train on the first documents of a stream.")
    validation_fraction: float = same_flag(
        DataArguments, "validation_fraction", "Share of the documents to measure on."
    )
    max_rejected_ratio: float = same_flag(DataArguments, "max_rejected_ratio", "Largest share of bad lines.")


ARGUMENTS = (TokenizerArguments,)


def main(args: TokenizerArguments) -> None:
    check_empty(args.output_dir, "--output_dir")
    output_dir = Path(args.output_dir)
    names = ("text_column", "encoding", "streaming", "validation_fraction", "max_rejected_ratio")
    train, validation = load_documents(args.dataset_name, Reading(**{name: vars(args)[name] for name in names}))
    tokenizer = load_or_train_tokenizer(train, vocab_size=args.vocab_size)
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
        main(*parse_flags(*ARGUMENTS))

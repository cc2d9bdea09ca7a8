"""
Train a tokenizer on the documents that a pretraining run would train on, and save it with its chat template.

    hf-pretrain tokenizer --dataset_name embedded --vocab_size 6400 --output_dir out/tokenizer

Pass the tokenizer to a run with `hf-pretrain pretrain --tokenizer_name_or_path out/tokenizer`. The recipe prints the
bytes per token on the validation set. With more bytes per token, the same text has fewer tokens. To share the
tokenizer, run `hf upload me/mine out/tokenizer`.
"""

import argparse
from pathlib import Path

from hf_pretrain.data.documents import load_documents
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.parser import RecipeParser
from hf_pretrain.runtime.writing import LOCK_NAME, check_empty, written_whole
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.pretrained import save_tokenizer
from hf_pretrain.tokenizer.training import load_or_train_tokenizer


def main(args: argparse.Namespace) -> None:
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


def make_parser() -> RecipeParser:
    parser = RecipeParser(description=__doc__)
    sources = "one or more of embedded[:part], a path, glob or directory, a Hub id name:config@revision"
    parser.add_argument("--dataset_name", nargs="+", default=["embedded"], help=sources)
    parser.add_argument("--text_column", default="text", help="key or column that holds the text")
    parser.add_argument("--encoding", default="utf-8", help="encoding of the files, e.g. gb18030")
    parser.add_argument("--vocab_size", type=int, default=6400, help="entries in total, special tokens included")
    parser.add_argument("--output_dir", default="out/tokenizer", help="directory of the tokenizer")
    parser.add_argument("--streaming", action="store_true", help="train on the first documents of a stream")
    parser.add_argument("--validation_fraction", type=float, default=0.01, help="share of the documents to measure on")
    parser.add_argument("--max_rejected_ratio", type=float, default=0.01, help="largest share of bad lines")
    return parser


if __name__ == "__main__":
    with one_line_errors():
        main(make_parser().parse_args())

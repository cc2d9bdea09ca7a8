"""Command-line arguments that name the data and determine how it becomes packed sequences."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast, TrainingArguments

from ..runtime.flags import check_flags, content_flag, flag, ignored_flag
from .collators import DataCollatorForPackedRows
from .documents import load_documents
from .encoding import ConversationEncoder
from .packing import PACKING_STRATEGIES, PackingReport, prepare_rows
from .sources import name_eval_sets


@dataclass
class ReadingArguments:
    """Names of the data, how they are read, and which part of them validates."""

    dataset_name: list[str] = content_flag(
        ["embedded"],
        "One or more of embedded[:part], a file, a glob, a directory, a Hub id "
        "(name:config[split]@revision), a file on the Hub (owner/name:file.jsonl), or an address (s3://...).",
        names="dataset",
        form="What to train: Training data",
    )
    eval_dataset_name: list[str] | None = flag(
        None,
        "One or more names of validation data, used whole. The run then trains on all of --dataset_name.",
        resume="evaluation",
        names="dataset",
        form="More about the data: Validation data",
    )
    validation_fraction: float = content_flag(
        0.01,
        "Share of documents for validation without --eval_dataset_name, chosen by a hash of the text or "
        "first question.",
        bounds="at least 0 and below 1",
    )
    max_rejected_ratio: float = ignored_flag(
        0.01, "Largest share of bad lines; rejected.jsonl lists them.", bounds="at least 0 and at most 1"
    )
    encoding: str = content_flag("utf-8", "Encoding of the files, e.g. gb18030.")
    columns: list[str] | None = content_flag(None, "Names of columns, OUR=THEIRS, e.g. prompt=question.")

    def __post_init__(self):
        # Reading and packing would fail, too, but only after the tokenizer is trained.
        check_flags(self)


@dataclass
class SourceArguments(ReadingArguments):
    """Data to train on: preferences, unless a subclass reads other records."""

    # Subclasses make flags of them.
    text_column = "text"
    chat_template = cast("str | None", None)
    streaming = False
    whole_files = False

    dataset_weights: list[float] | None = content_flag(
        None, "Sampling weight of each dataset. Without weights, the run concatenates them.", bounds="above 0"
    )
    train_fraction: float = content_flag(
        1.0,
        "Share of the training documents to use.",
        bounds="above 0 and at most 1",
        form="More about the data: Share of the training data",
    )
    num_proc: int | None = ignored_flag(
        None,
        "Number of processes that read and tokenize large data; by default one per core, up to 8.",
        bounds="at least 1",
    )

    @property
    def kind_name(self) -> str:
        """Name of the records in messages to users: the plural of their schema, or `text`."""
        return "preferences"

    def load_sets(
        self, training_args: TrainingArguments, *, keep_rejected: bool = True, is_evaluation: bool = False
    ) -> tuple[Dataset | IterableDataset, dict[str, Dataset]]:
        """
        Load the training set, shuffled if it is a stream, and the validation sets by name, by
        [`~data.documents.load_documents`]. A single validation set has the name "".

        Args:
            training_args ([`TrainingArguments`]): gives the seed and the directory of `rejected.jsonl`, which only the
                main process writes.
            keep_rejected (`bool`, defaults to `True`): list bad lines in `rejected.jsonl`.
            is_evaluation (`bool`, defaults to `False`): return an empty training set.

        Raises:
            `UserError`: in the cases of [`~data.documents.load_documents`].
        """
        # Every rank reads the data, but only one may write the file that lists the bad lines.
        directory = Path(training_args.output_dir) if keep_rejected and training_args.process_index == 0 else None
        reading: dict[str, Any] = {"schema": self.kind_name.removesuffix("s"), "text_column": self.text_column}
        reading |= {"encoding": self.encoding, "whole_files": self.whole_files, "columns": self.columns}
        reading |= {"num_proc": self.num_proc, "max_rejected_ratio": self.max_rejected_ratio}
        validation: dict[str, Any] = {}
        # An evaluation may take the training data, too.
        for label, name in name_eval_sets(self.eval_dataset_name, [] if is_evaluation else self.dataset_name).items():
            path = directory and directory / f"rejected-eval{label and '-'}{label}.jsonl"
            # Without a fraction for validation, the training set is the whole set.
            validation[label], _ = load_documents([name], validation_fraction=0.0, rejected_path=path, **reading)
        if validation and is_evaluation:
            return next(iter(validation.values())).select([]), validation
        reading |= {"weights": self.dataset_weights, "streaming": self.streaming, "is_evaluation": is_evaluation}
        reading |= {"train_fraction": self.train_fraction, "seed": training_args.seed}
        reading["validation_fraction"] = 0.0 if validation else self.validation_fraction
        path = directory and directory / "rejected.jsonl"
        train, split = load_documents(self.dataset_name, rejected_path=path, **reading)
        # Streams are shuffled within a buffer of 10,000 documents; a `Dataset` is shuffled by the Trainer's sampler.
        # An evaluation gets an empty training set, which is no stream.
        if isinstance(train, IterableDataset):
            train = train.shuffle(seed=training_args.seed, buffer_size=10_000)
        return train, validation or {"": split}


@dataclass
class DataArguments(SourceArguments):
    """Text to train on, and its packing into sequences."""

    streaming: bool = content_flag(False, "Read the data while training; needs --max_steps.")
    text_column: str = content_flag("text", "Column or JSON field that holds the text.")
    whole_files: bool = content_flag(False, "A .txt file is one document, as a .md file is.")
    max_length: int = flag(512, "Number of tokens per packed sequence.")
    packing: str = content_flag(
        "bfd",
        "How documents share packed sequences: bfd (best fit decreasing), wrapped (text only) or none.",
        choices=PACKING_STRATEGIES,
    )

    def make_collator(self, tokenizer: PreTrainedTokenizerFast) -> DataCollatorForPackedRows:
        """Return a collator that gives all packed sequences one length: torch.compile compiles anew for each other."""
        return DataCollatorForPackedRows(tokenizer.pad_token_id, None if self.packing == "none" else self.max_length)

    @property
    def kind_name(self) -> str:
        return "text"

    def encoder(self, seed: int | None = None) -> ConversationEncoder | None:
        """Return the encoder of conversations, with a seed for its draws; `None` for text."""
        return None

    def pack(
        self, documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerFast, *, seed: int | None = None
    ) -> tuple[Dataset | IterableDataset | None, PackingReport | None]:
        """
        Tokenize and pack documents by [`~data.packing.prepare_rows`].

        Args:
            documents ([`Dataset`] or [`IterableDataset`]): with the single column `text`.
            tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the run.
            seed (`int`, *optional*): seed of the draws per training record; a validation set has none.

        Returns:
            `tuple`: packed sequences and a report, as [`~data.packing.prepare_rows`] returns them; `None` and `None`
            if there are no documents.
        """
        if isinstance(documents, Dataset) and len(documents) == 0:
            return None, None
        return prepare_rows(
            documents,
            tokenizer,
            max_length=self.max_length,
            packing_strategy=self.packing,
            num_proc=self.num_proc,
            encoder=self.encoder(seed),
        )

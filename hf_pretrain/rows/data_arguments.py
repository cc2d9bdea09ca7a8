"""Command-line arguments that name the data and determine how it becomes packed sequences."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import cast

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast

from ..runtime.flags import check_flags, content_flag, flag, ignored_flag
from .collators import DataCollatorForPackedRows
from .packing import PACKING_STRATEGIES, PackingReport, prepare_rows
from .reading import Reading


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

    @property
    def kind(self) -> str:
        """Kind of the records: text, conversation, preference or task."""
        return "task"

    @property
    def kind_name(self) -> str:
        """Name of the records in messages to users."""
        return "text" if self.kind == "text" else f"{self.kind}s"

    def reading(self, seed: int) -> Reading:
        """Return what these flags say about the reading of data."""
        given = {field.name: vars(self)[field.name] for field in fields(Reading) if field.name in vars(self)}
        return Reading(**{**given, "kind": self.kind, "seed": seed})


@dataclass
class TrainingDataArguments(ReadingArguments):
    """Data to train on, and how much of it."""

    # A subclass makes a flag of it.
    chat_template = cast("str | None", None)

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


@dataclass
class PreferenceArguments(TrainingDataArguments):
    """Preferences to train on."""

    @property
    def kind(self) -> str:
        return "preference"


@dataclass
class DataArguments(TrainingDataArguments):
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
    def kind(self) -> str:
        return "text"

    def encoder(self, seed: int | None = None) -> Callable | None:
        """Return the encoder of conversations, with a seed for its draws; `None` for text."""
        return None

    def pack(
        self, documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerFast, *, seed: int | None = None
    ) -> tuple[Dataset | IterableDataset | None, PackingReport | None]:
        """
        Tokenize and pack documents by [`~rows.packing.prepare_rows`].

        Args:
            documents ([`Dataset`] or [`IterableDataset`]): with the single column `text`.
            tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the run.
            seed (`int`, *optional*): seed of the draws per training record; a validation set has none.

        Returns:
            `tuple`: packed sequences and a report, as [`~rows.packing.prepare_rows`] returns them; `None` and `None`
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

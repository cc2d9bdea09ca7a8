"""Command-line arguments that name the data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast, TrainingArguments

from .conversations import CONVERSATION_KEYS
from .encoding import ConversationEncoder, parse_span_weights
from .loading import load_documents
from .packing import PackingReport, prepare_rows


@dataclass
class SourceArguments:
    """Which data to train on."""

    dataset_name: list[str] = field(
        default_factory=lambda: ["embedded"],
        metadata={"help": "One or more of embedded[:part], a path, glob or directory, a Hub id name:config@revision."},
    )
    dataset_weights: list[float] | None = field(
        default=None, metadata={"help": "How often each dataset is drawn from; by default they are concatenated."}
    )
    validation_fraction: float = field(
        default=0.01, metadata={"help": "Share of the documents that is held out, chosen by a hash of their text."}
    )
    train_fraction: float = field(
        default=1.0, metadata={"help": "Share of the other documents to train on, chosen by the same hash."}
    )
    num_proc: int | None = field(
        default=None, metadata={"help": "Processes that read and tokenize large data; by default one a core, up to 8."}
    )
    max_rejected_ratio: float = field(
        default=0.01, metadata={"help": "Share of bad lines that a run tolerates; they go to rejected.jsonl."}
    )

    def load_documents(
        self, training_args: TrainingArguments, *, schema: str = "text", keep_rejected: bool = True, **reading: Any
    ) -> tuple[Dataset | IterableDataset, Dataset]:
        """
        Documents to train on and documents held out, as [`~data.loading.load_documents`] gives them and raises; the
        main process lists bad lines in `output_dir`.
        """
        is_main = training_args.process_index == 0
        return load_documents(
            self.dataset_name,
            schema=schema,
            weights=self.dataset_weights,
            validation_fraction=self.validation_fraction,
            train_fraction=self.train_fraction,
            seed=training_args.seed,
            num_proc=self.num_proc,
            max_rejected_ratio=self.max_rejected_ratio,
            rejected_path=Path(training_args.output_dir, "rejected.jsonl") if is_main and keep_rejected else None,
            **reading,
        )


@dataclass
class DataArguments(SourceArguments):
    """Which text to train on, and how it becomes rows."""

    streaming: bool = field(default=False, metadata={"help": "Read while training; needs --max_steps."})
    text_column: str = field(default="text", metadata={"help": "The column or JSON field that holds the text."})
    max_length: int = field(default=512, metadata={"help": "Tokens a row."})
    packing_strategy: str = field(
        default="bfd",
        metadata={
            "help": "How documents share packed sequences: bfd (best fit decreasing), wrapped (text only) or none.",
            "aliases": ["--packing"],
        },
    )

    @property
    def row_length(self) -> int | None:
        """Tokens of every packed row: one width, so one compiled graph. `None` where a row is one document."""
        return None if self.packing_strategy == "none" else self.max_length

    @property
    def schema(self) -> str:
        """What a record is, for [`~data.loading.load_documents`]."""
        return "text"

    @property
    def encoder(self) -> ConversationEncoder | None:
        """From conversations to ids and weights; `None` for text."""
        return None

    def load_documents(self, training_args: TrainingArguments, **reading: Any):
        """The same; a stream is shuffled."""
        own: dict[str, Any] = {"schema": self.schema, "text_column": self.text_column, "streaming": self.streaming}
        train, held_out = super().load_documents(training_args, **own | reading)
        return (train.shuffle(seed=training_args.seed, buffer_size=10_000) if self.streaming else train), held_out

    def prepare_rows(
        self, documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerFast
    ) -> tuple[Dataset | IterableDataset | None, PackingReport | None]:
        """Rows and what was counted, as [`~data.packing.prepare_rows`] gives them; `None` where there are no documents."""
        if isinstance(documents, Dataset) and len(documents) == 0:
            return None, None
        return prepare_rows(
            documents,
            tokenizer,
            max_length=self.max_length,
            packing_strategy=self.packing_strategy,
            num_proc=self.num_proc,
            encoder=self.encoder,
        )


@dataclass
class ChatArguments(DataArguments):
    """Which conversations to train on, and what of them. What is over `max_length` is cut off."""

    dataset_kind: str = field(
        default="auto", metadata={"help": f"What the records are: auto, {', '.join(CONVERSATION_KEYS)}; or text."}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "A Jinja file in place of the tokenizer's own template; or minimind."}
    )
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Given to the template: false puts an empty thought in front of each answer."}
    )
    train_on_inputs: bool = field(default=False, metadata={"help": "Train on what the assistant is given, too."})
    span_weights: str = field(
        default="",
        metadata={"help": "Weights within the answers: <think>=10 of the marks, think=0.5 of what is between them."},
    )
    preview: int = field(default=0, metadata={"help": "Print this many rows, what is trained on in colour, and stop."})

    def __post_init__(self):
        if self.dataset_kind not in ("auto", "text", *CONVERSATION_KEYS):
            raise ValueError(
                f"--dataset_kind {self.dataset_kind} is unknown; use auto, {', '.join(CONVERSATION_KEYS)} or text."
            )

    @property
    def schema(self) -> str:
        """The name of the reader in `SCHEMAS`."""
        kinds = {"auto": "conversation", "text": "text"}
        return kinds.get(self.dataset_kind) or f"conversation:{self.dataset_kind}"

    @property
    def kind_name(self) -> str:
        """What the records are, for people."""
        return "text" if self.dataset_kind == "text" else "conversations"

    @property
    def encoder(self) -> ConversationEncoder | None:
        """From conversations to ids and weights; `None` for text."""
        if self.dataset_kind == "text":
            return None
        kwargs = () if self.enable_thinking is None else (("enable_thinking", self.enable_thinking),)
        return ConversationEncoder(self.train_on_inputs, parse_span_weights(self.span_weights), kwargs)


__all__ = ["ChatArguments", "DataArguments", "SourceArguments"]

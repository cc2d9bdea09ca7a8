"""Turn names of datasets into packed sequences or pairs of answers, for every stage but reinforcement learning."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast, TrainingArguments

from ..runtime.errors import UserError
from ..tokenizer.chat_template import mark_template
from .collators import DataCollatorForPackedRows
from .data_arguments import DataArguments, SourceArguments
from .packing import PackingReport


@dataclass
class PreparedData:
    """
    The data of a run in the form that its trainer reads.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): the tokenizer of the run.
        report (`list[str]`): lines with the numbers of documents, tokens and rows, for the terminal and the model
            card.
        names (`list[str]`): names of the datasets.
        kind (`str`): `text`, `conversations`, `preferences` or `tasks`.
        train ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*): training rows; `None` in an
            evaluation.
        eval_sets (`dict[str, Dataset]`): validation rows by the names of the sets; a single set has the name "".
        eval_names (`list[str]`): names of the datasets of `--eval_dataset_name`.
        conversations ([`~datasets.Dataset`], *optional*): conversations or preferences of the first validation set, in
            the internal form; `None` for text and tasks.
        collator ([`~data.collators.DataCollatorForPackedRows`], *optional*): collates packed sequences; `None` for
            other rows.
        num_tokens (`int`, *optional*): tokens of the training rows; `None` for streams and other rows.
    """

    tokenizer: PreTrainedTokenizerFast
    report: list[str]
    names: list[str]
    kind: str = "text"
    train: Dataset | IterableDataset | None = None
    eval_sets: dict[str, Dataset] = field(default_factory=dict)
    eval_names: list[str] = field(default_factory=list)
    conversations: Dataset | None = None
    collator: DataCollatorForPackedRows | None = None
    num_tokens: int | None = None

    def __post_init__(self):
        self.eval_sets = {name: rows for name, rows in self.eval_sets.items() if rows is not None and len(rows)}
        self.conversations = self.conversations if self.eval_sets else None

    @property
    def first_eval(self) -> Dataset | None:
        """Rows of the first validation set, which chooses the best model; `None` without one."""
        return next(iter(self.eval_sets.values()), None)

    @property
    def eval(self) -> Dataset | dict[str, Dataset] | None:
        """Validation rows as Trainer takes them: a set, several by name, or `None`."""
        return self.eval_sets if len(self.eval_sets) > 1 else self.first_eval


def load_rows(
    data_args: SourceArguments,
    training_args: TrainingArguments,
    tokenizer: PreTrainedTokenizerFast | Callable[[Dataset | IterableDataset], PreTrainedTokenizerFast],
    *,
    is_evaluation: bool = False,
    keep_rejected: bool = True,
    prepare: Callable[..., tuple[Dataset, str | None]] | None = None,
) -> PreparedData:
    """
    Return documents as packed sequences, or preferences as pairs. The main process prepares them, and the other ranks
    read its cache.

    Args:
        data_args ([`~data.data_arguments.SourceArguments`]): the preferences; or with
            [`~data.data_arguments.DataArguments`], documents to pack. A chat template that does not mark assistant
            tokens gets the marks, unless the documents are texts.
        training_args ([`~training.training_arguments.LMTrainingArguments`]): gives the ranks, the seed, the directory
            of `rejected.jsonl` and, for preferences, `max_length`.
        tokenizer: the tokenizer, or a function that trains one on the training documents.
        is_evaluation (`bool`, defaults to `False`): prepare only the validation set.
        keep_rejected (`bool`, defaults to `True`): list bad lines in `rejected.jsonl`.
        prepare (`Callable`, *optional*): [`~data.preference_pairs.prepare_pairs`] or a like function, for preferences.

    Raises:
        `ValueError`: if no training row is left, and in the cases of [`~data.documents.load_documents`],
            [`~data.packing.prepare_rows`] or `prepare`, and [`~tokenizer.chat_template.mark_template`].
    """
    if data_args.kind_name != "text":
        # All ranks mark their tokenizer before the block, because the key of the cached rows depends on the template.
        mark_template(tokenizer, data_args.chat_template)

    def rows_of(documents: Dataset | IterableDataset, **draws: int) -> tuple[Any, Any]:
        if prepare is not None:
            return prepare(documents, tokenizer, max_length=training_args.max_length, num_proc=data_args.num_proc)
        assert isinstance(data_args, DataArguments)
        return data_args.prepare_rows(documents, tokenizer, **draws)

    with training_args.main_process_first(desc="preparing the data"):
        train_documents, eval_sets = data_args.load_documents(
            training_args, keep_rejected=keep_rejected, is_evaluation=is_evaluation
        )
        # Check the type: `callable` is no test, because a tokenizer can be called, too.
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            tokenizer = tokenizer(train_documents)
        train_rows, train_report = None, None
        if not is_evaluation:
            train_rows, train_report = rows_of(train_documents, seed=training_args.seed)
            if isinstance(train_rows, Dataset) and len(train_rows) == 0:
                raise UserError(
                    f"None of {len(train_documents)} {data_args.kind_name} has an answer to train on within "
                    "--max_length. Raise it, or correct the data."
                )
        validation = {name: rows_of(part) for name, part in eval_sets.items()}
    report = [f"Validation{name and ' '}{name}: {counts or 'nothing'}" for name, (_, counts) in validation.items()]
    if not is_evaluation:
        report.insert(0, f"Training: {train_report or 'streamed'}")
        # The plan of a dry run shows the same lines.
        if training_args.process_index == 0 and not training_args.dry_run:
            print("\n".join(report))
    collator = None
    if isinstance(data_args, DataArguments):
        # Give all sequences one length: torch.compile would compile again for each new length.
        collator = DataCollatorForPackedRows(tokenizer.pad_token_id, max_length=data_args.row_length)
    return PreparedData(
        tokenizer,
        report,
        data_args.dataset_name,
        data_args.kind_name,
        train_rows,
        {name: rows for name, (rows, _) in validation.items()},
        data_args.eval_dataset_name or [],
        conversations=None if data_args.kind_name == "text" else next(iter(eval_sets.values())),
        collator=collator,
        num_tokens=train_report.num_tokens if isinstance(train_report, PackingReport) else None,
    )

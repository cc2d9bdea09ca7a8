"""Turn names of datasets into packed sequences or pairs of answers, for every stage but reinforcement learning."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast, TrainingArguments
from transformers.utils import logging

from ..runtime.command_line import print_result
from ..runtime.errors import UserError
from ..runtime.named import load_named
from ..runtime.ranks import made_once_per_machine
from ..tokenizer.rendering import set_template
from .caching import encoding_key
from .collators import DataCollatorForPackedRows
from .data_arguments import DataArguments, TrainingDataArguments
from .manifest import write_rows_manifest
from .packing import PackingReport


logger = logging.get_logger(__name__)


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
        collator ([`~rows.collators.DataCollatorForPackedRows`], *optional*): collates packed sequences; `None` for
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


def end_preview(args: TrainingArguments, rows: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print as many rows as `--preview` says, and end the process; 0 does nothing."""
    if args.preview:
        if args.process_index == 0:
            format_preview = load_named("hf_pretrain.data.inspection:format_preview")
            print_result(format_preview(rows, tokenizer, num_rows=args.preview))
        raise SystemExit


def load_rows(
    data_args: TrainingDataArguments,
    training_args: TrainingArguments,
    tokenizer: PreTrainedTokenizerFast | Callable[[Dataset | IterableDataset], PreTrainedTokenizerFast],
    *,
    is_evaluation: bool = False,
    keep_rejected: bool = True,
    prepare: Callable[..., tuple[Dataset, str]] | None = None,
) -> PreparedData:
    """
    Return documents as packed sequences, or preferences as pairs. The main process of each machine prepares them, and
    the other ranks open its files. Each rank reads a stream by itself.

    Args:
        data_args ([`~rows.data_arguments.PreferenceArguments`] or [`~rows.data_arguments.DataArguments`]): describes
            preferences, or documents to pack.
        training_args ([`~training.training_arguments.LMTrainingArguments`]): gives the ranks, the seed, the directory
            of `rejected.jsonl` and, for preferences, `max_length`.
        tokenizer: the tokenizer, or a function that trains one on the training documents.
        is_evaluation (`bool`, defaults to `False`): prepare only the validation set.
        keep_rejected (`bool`, defaults to `True`): list bad lines in `rejected.jsonl`.
        prepare (`Callable`, *optional*): makes rows of preferences, such as [`~rows.preference_pairs.prepare_pairs`].

    Raises:
        `UserError`: if no training row is left, and in the cases of [`~data.documents.load_documents`],
            [`~rows.packing.prepare_rows`] or `prepare`, and [`~tokenizer.rendering.set_template`].
    """
    is_text, is_stream = data_args.kind == "text", data_args.reading(training_args.seed).streaming
    # All ranks set the template, because a rank that reads a stream renders with its own tokenizer.
    note = None if is_text else set_template(tokenizer, data_args.chat_template, training_args.date)
    options: Any = {"keep_rejected": keep_rejected, "is_evaluation": is_evaluation, "note": note}
    make = partial(_prepare_sets, data_args, training_args, tokenizer, prepare, **options)
    data = made_once_per_machine(training_args, make, is_shared=not is_stream)
    if not is_evaluation:
        # The plan of a dry run shows the same lines.
        if training_args.process_index == 0 and not training_args.dry_run:
            print("\n".join(data.report))
        end_preview(training_args, data.train, data.tokenizer)
    return data


def _prepare_sets(
    data_args: TrainingDataArguments,
    training_args: Any,
    tokenizer: PreTrainedTokenizerFast | Callable[[Dataset | IterableDataset], PreTrainedTokenizerFast],
    prepare: Callable[..., tuple[Dataset, str]] | None,
    *,
    keep_rejected: bool,
    is_evaluation: bool,
    note: str | None,
) -> PreparedData:
    """Prepare the rows of all sets with their manifests and their report, which holds a note about the template."""
    documents, eval_documents = _load_sets(data_args, training_args, keep_rejected, is_evaluation)
    # Check the type: `callable` is no test, because a tokenizer can be called, too.
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        tokenizer = tokenizer(documents)
    rows_of = partial(_make_rows, data_args, training_args, tokenizer, prepare)
    train, counts = (None, None) if is_evaluation else rows_of(documents, seed=training_args.seed)
    evals = {name: rows_of(part) for name, part in eval_documents.items()}
    for rows, found in [(train, counts), *evals.values()]:
        if isinstance(rows, Dataset):
            about = {"kind": data_args.kind_name, "tokenizer": encoding_key(tokenizer), "report": str(found)}
            write_rows_manifest(rows, **about)
    report = [f"Validation{name and ' '}{name}: {found or 'nothing'}" for name, (_, found) in evals.items()]
    if not is_evaluation:
        _check_rows(train, documents, eval_documents, data_args)
        worst = _find_worst(data_args, documents, tokenizer) if training_args.process_index == 0 else []
        report = [f"Training: {counts or 'streamed'}", *report, *([] if note is None else [note]), *worst]
    return PreparedData(
        tokenizer,
        report,
        data_args.dataset_name,
        data_args.kind_name,
        train,
        {name: rows for name, (rows, _) in evals.items()},
        data_args.eval_dataset_name or [],
        conversations=None if data_args.kind == "text" else next(iter(eval_documents.values())),
        collator=data_args.make_collator(tokenizer) if isinstance(data_args, DataArguments) else None,
        num_tokens=counts.num_tokens if isinstance(counts, PackingReport) else None,
    )


def _load_sets(
    data_args: TrainingDataArguments, args: Any, keep_rejected: bool, is_evaluation: bool
) -> tuple[Any, Any]:
    """Return the documents for training, and the documents for validation by the names of the sets."""
    # Every rank reads the data, but only one may list the bad lines. A dry run and a preview have no directory.
    is_listed = keep_rejected and not (args.process_index or args.dry_run or args.preview)
    where = {"directory": Path(args.output_dir) if is_listed else None, "is_evaluation": is_evaluation}
    names, reading = (data_args.dataset_name, data_args.eval_dataset_name), data_args.reading(args.seed)
    return load_named("hf_pretrain.data.documents:load_sets")(*names, reading, **where)


def _make_rows(
    data_args: TrainingDataArguments, training_args: Any, tokenizer: Any, prepare: Any, documents: Any, **draws: int
) -> tuple[Any, Any]:
    """Return packed sequences with their report, or pairs with theirs."""
    if isinstance(data_args, DataArguments):
        return data_args.pack(documents, tokenizer, **draws)
    return prepare(documents, tokenizer, max_length=training_args.max_length, num_proc=data_args.num_proc)


def _find_worst(data_args: TrainingDataArguments, documents: Any, tokenizer: Any) -> list[str]:
    if isinstance(data_args, DataArguments) and isinstance(documents, Dataset):
        if data_args.kind == "conversation":
            find_worst = load_named("hf_pretrain.data.audit:find_worst")
            encoder: Any = data_args.encoder()
            variables = dict(encoder.chat_template_kwargs)
            return find_worst(documents, tokenizer, max_length=data_args.max_length, variables=variables)
    return []


def _check_rows(
    train: Any, documents: Any, eval_documents: dict[str, Dataset], data_args: TrainingDataArguments
) -> None:
    """Refuse documents that leave no training rows, and warn if there are none for validation."""
    if isinstance(train, Dataset) and len(train) == 0:
        kind = data_args.kind_name
        raise UserError(f"None of {len(documents)} {kind} has an answer to train on within --max_length. Raise it.")
    if data_args.validation_fraction and not any(map(len, eval_documents.values())):
        logger.warning(
            "No document is for validation. Raise --validation_fraction, separate texts by blank lines, or pass "
            "--eval_dataset_name."
        )

"""Turn names of datasets into packed sequences, for every stage that trains on tokens and for evaluation."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast, TrainingArguments
from transformers.utils import logging

from ..tokenizer.chat_template import mark_template
from .arguments import ChatArguments, DataArguments
from .loading import MAX_REPEATS


logger = logging.get_logger(__name__)


@dataclass
class PackedRows:
    """
    Packed sequences, with their tokenizer and a report.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): the tokenizer that made the tokens.
        report (`list[str]`): lines with the numbers of documents, tokens and rows, for the terminal and the model
            card.
        train ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*): training rows of
            [`~data.packing.prepare_rows`]; `None` in an evaluation.
        eval ([`~datasets.Dataset`], *optional*): validation rows; `None` without a validation set.
        conversations ([`~datasets.Dataset`], *optional*): the conversations of the validation rows; `None` for text.
    """

    tokenizer: PreTrainedTokenizerFast
    report: list[str]
    train: Dataset | IterableDataset | None = None
    eval: Dataset | None = None
    conversations: Dataset | None = None


def load_rows(
    data_args: DataArguments,
    training_args: TrainingArguments,
    tokenizer: PreTrainedTokenizerFast | Callable[[Dataset | IterableDataset], PreTrainedTokenizerFast],
    *,
    is_evaluation: bool = False,
    keep_rejected: bool = True,
) -> PackedRows:
    """
    Return documents as packed sequences. The main process prepares them, and the other ranks read its cache.

    Args:
        data_args ([`~data.arguments.DataArguments`]): the data. With [`~data.arguments.ChatArguments`], the rows have
            loss weights, and a chat template that does not mark assistant tokens gets the marks.
        training_args ([`~training.arguments.LMTrainingArguments`]): gives the ranks, the seed and the directory of
            `rejected.jsonl`.
        tokenizer: the tokenizer, or a function that trains one on the training documents.
        is_evaluation (`bool`, defaults to `False`): prepare only the validation set.
        keep_rejected (`bool`, defaults to `True`): list bad lines in `rejected.jsonl`.

    Raises:
        `ValueError`: in the cases of [`~data.loading.load_documents`], [`~data.packing.prepare_rows`] and
            [`~tokenizer.chat_template.mark_template`].
    """
    if isinstance(data_args, ChatArguments) and data_args.encoder is not None:
        # All ranks mark their tokenizer before the block, because the key of the cached rows depends on the template.
        mark_template(tokenizer, data_args.chat_template)
    repeats: dict[str, float] = {}
    with training_args.main_process_first(desc="preparing the data"):
        train_documents, eval_documents = data_args.load_documents(
            training_args, keep_rejected=keep_rejected, repeats=repeats, is_evaluation=is_evaluation
        )
        # Check the type: `callable` is no test, because a tokenizer can be called, too.
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            tokenizer = tokenizer(train_documents)
        train_rows, train_report = None, None
        if not is_evaluation:
            train_rows, train_report = data_args.prepare_rows(train_documents, tokenizer)
        eval_rows, eval_report = data_args.prepare_rows(eval_documents, tokenizer)
    report = [f"Validation: {eval_report or 'nothing'}"]
    if train_report is not None:
        times = describe_repeats(repeats, train_report.num_rows, training_args)
        report.insert(0, f"Training: {train_report}{times}")
    elif not is_evaluation:
        unknown = ", so it is unknown how often the run reads each dataset" if data_args.dataset_weights else ""
        report.insert(0, f"Training: streamed{unknown}")
    # The plan of a dry run shows the same lines.
    if training_args.process_index == 0 and not is_evaluation and not getattr(training_args, "dry_run", False):
        print("\n".join(report))
    has_answers = eval_rows is not None and data_args.encoder is not None
    return PackedRows(tokenizer, report, train_rows, eval_rows, eval_documents if has_answers else None)


def describe_repeats(repeats: dict[str, float], num_rows: int, training_args: TrainingArguments) -> str:
    """
    Return how often a run reads each dataset of a mixture, and warn above `MAX_REPEATS` times; "" without a mixture.

    Args:
        repeats (`dict[str, float]`): how often one pass reads each dataset, from [`~data.loading.load_documents`].
        num_rows (`int`): rows of one pass.
        training_args ([`~training.arguments.LMTrainingArguments`]): holds `--num_train_epochs`, or `--max_steps`
            and the batch size.
    """
    if not repeats:
        return ""
    num_passes = training_args.num_train_epochs
    if training_args.max_steps > 0:
        # Tensor-parallel ranks share their rows.
        num_ranks = training_args.world_size // training_args.tp_size
        batch_size = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps
        rows_per_step = batch_size * num_ranks
        # Padding rows fill the last step of a pass.
        num_passes = training_args.max_steps / math.ceil(num_rows / rows_per_step)
    times = {name: num_passes * number for name, number in repeats.items()}
    often = [f"{name} {number:.1f} times" for name, number in times.items() if number > MAX_REPEATS]
    if often:
        logger.warning(
            f"The run reads {', '.join(often)}. A model learns little from text that it reads more than {MAX_REPEATS} "
            "times (https://huggingface.co/papers/2305.16264). Lower the weight in --dataset_weights, train for fewer "
            "steps, or add data."
        )
    listed = ", ".join(f"{name} {number:.1f} times" for name, number in times.items())
    return f"; the run reads {listed}"


__all__ = ["PackedRows", "describe_repeats", "load_rows"]

"""
Compare two models on the same examples (`evaluate --against`): documents of the validation set, tasks, and questions.

`against.json` and `against.html` hold the figures of model A (`--model_name_or_path`) and model B (`--against`), with
the paired difference of each (`paired.py`), and the examples that differ most. An example is a `dict` with its `key`,
its `text`, the `answer` of the model, and `figures`: pairs of total and weight by their names.
"""

import dataclasses
import json
import math
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets

from ..data.documents import load_sets
from ..inference.terminal_chat import is_base_model
from ..loading.model import load_model
from ..loading.model_arguments import ModelArguments
from ..reports.page import environment
from ..rows.packing import split_long
from ..rows.preparation import PreparedData
from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.names import public_name
from ..runtime.writing import written_whole
from ..tokenizer.control_tokens import encode_documents
from ..tokenizer.rendering import set_template
from ..training.evaluation_arguments import EvalQuestionArguments
from ..training.masked_loss_trainer import MaskedLossTrainer
from ..training.settling import overriding
from .evaluation import EvaluationArguments, ValidationArguments, make_trainer, run_tasks
from .paired import ROUNDING, judge, paired_difference, seed_noise


LOSS, BITS, LOOPS = "loss in nats per token", "bits per byte", "answers that loop"
# Examples of each figure in the two files, and characters of each text.
NUM_SHOWN = 20
MAX_CHARACTERS = 1000
# These arguments describe model A alone.
_OF_FIRST = ("tokenizer_name_or_path", "config_overrides", "add_tokens", "inference_rope_scaling")


def compare_models(
    trainer: MaskedLossTrainer,
    rows: PreparedData,
    tasks: dict[str, list[dict[str, Any]]],
    model_args: ModelArguments,
    data_args: ValidationArguments,
    args: EvaluationArguments,
    question_args: EvalQuestionArguments,
) -> str:
    """
    Compare a model with the one of `--against`, and return the result as text. All ranks must call this function; the
    first one writes the files.

    Args:
        trainer ([`~training.masked_loss_trainer.MaskedLossTrainer`]): the trainer that has evaluated model A.
        rows ([`~rows.preparation.PreparedData`]): the validation set of model A.
        tasks (`dict`): the examples of model A in each task, as [`~evaluation.evaluation.run_tasks`] gives them.
        model_args, data_args, args, question_args: the arguments of the evaluation.

    Raises:
        `UserError`: if the models have no two examples in common.
    """
    announce("evaluating the second model")
    second, others = _load_second(rows, model_args, data_args, args)
    sides = [
        {"validation": _measure_documents(each, data_args, args) if rows.eval is not None else []}
        | _ask_questions(each, question_args, data_args.enable_thinking)
        | examples
        for each, examples in ((trainer, tasks), (second, others))
    ]
    _choose_unit(*(side["validation"] for side in sides))
    seeds = seed_noise((each.model.config for each in (trainer, second)), data_args.kind)
    figures = [
        record for task in sides[0] for record in compare(task, sides[0][task], sides[1].get(task, []), seeds=seeds)
    ]
    if not figures:
        raise UserError(f"--against {args.against}: the models have no two examples in common. Add data or tasks.")
    names = {"A": public_name(str(model_args.model_name_or_path)), "B": public_name(args.against)}
    content = {"models": names, "figures": figures}
    if args.process_index == 0:
        _write(content, args.output_dir)
    return f"{_format(content)}\n\nPage      {Path(args.output_dir, 'against.html')}"


def _load_second(
    rows: PreparedData, model_args: ModelArguments, data_args: ValidationArguments, args: EvaluationArguments
) -> tuple[MaskedLossTrainer, dict[str, list[dict[str, Any]]]]:
    """Return a trainer of the model of `--against`, and the examples of its tasks."""
    model_args = dataclasses.replace(model_args, model_name_or_path=args.against, **dict.fromkeys(_OF_FIRST))
    tokenizer = model_args.load_tokenizer()
    if data_args.kind != "text":
        set_template(tokenizer, data_args.chat_template, args.date)
    model, is_chat = load_model(model_args, tokenizer), args.apply_chat_template
    trainer = make_trainer(model, args, rows, tokenizer)
    if is_chat is None:
        is_chat = not is_base_model(args.against, model, tokenizer)
    results = run_tasks(args, trainer.model.eval(), tokenizer, is_chat=is_chat) if args.tasks else {}
    return trainer, {task: result["examples"] for task, result in results.items() if "examples" in result}


def _measure_documents(
    trainer: MaskedLossTrainer, data_args: ValidationArguments, args: EvaluationArguments
) -> list[dict[str, Any]]:
    """Return the documents of the validation set with the losses of a model, their `ids`, and whether they `fit`."""
    names, reading = (data_args.dataset_name, data_args.eval_dataset_name), data_args.reading(args.seed)
    texts = concatenate_datasets([*load_sets(*names, reading, is_evaluation=True)[1].values()])["text"][:]
    tokenizer, encoder = trainer.processing_class, data_args.encoder()
    if encoder is None:
        encoded: dict[str, Any] = {"input_ids": encode_documents(texts, tokenizer)}
    else:
        encoded = encoder(texts, tokenizer, max_length=data_args.max_length)
    lengths = np.array([*map(len, encoded["input_ids"])])
    starts = np.cumsum(lengths) - lengths
    # A text that is longer than a row is measured in pieces, as in training.
    pieces = list(zip(*split_long(starts, lengths, data_args.max_length), strict=True))
    columns = {name: [*chain.from_iterable(encoded[name])] for name in ("input_ids", "loss_mask") if name in encoded}
    rows = [{name: column[start : start + n] for name, column in columns.items()} for start, n in pieces]
    # A batch of one row gives the sums of this row.
    with overriding(trainer.args, per_device_eval_batch_size=1):
        trainer.evaluate(Dataset.from_list(rows))
    gathered = trainer.accelerator.gather(torch.stack(trainer.evaluation.sums))
    # (num_ranks * num_batches, 3): ranks take the rows in turn, and rows of weight zero fill up the last batch.
    ordered = gathered.reshape(trainer.args.world_size, -1, 3).transpose(0, 1).reshape(-1, 3)[: len(rows)]
    # (num_documents, 3): the sums of w * CE, of w and of bytes
    sums = np.zeros((len(texts), 3))
    places = np.searchsorted(starts, [start for start, _ in pieces], side="right") - 1
    np.add.at(sums, places, ordered.double().cpu().numpy())
    cut = encoded.get("num_tokens_cut", [0] * len(texts))
    return [
        {
            **{"key": n, "text": _show(texts[n]), "answer": "", "ids": encoded["input_ids"][n], "fits": not cut[n]},
            "figures": {LOSS: (nats, weight), BITS: (nats / math.log(2), num_bytes)},
        }
        for n, (nats, weight, num_bytes) in enumerate(sums.tolist())
        if weight and num_bytes
    ]


def _show(text: str) -> str:
    """Return a document as text; of a conversation, its messages."""
    try:
        return "\n".join(f"{message['role']}: {message['content']}" for message in json.loads(text)["messages"])
    except (ValueError, KeyError, TypeError):
        return text


def _choose_unit(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """
    Leave the loss per token, if both models have the same tokens, or else bits per byte. Then leave out conversations
    of which one model sees only the beginning.
    """
    is_same = [each["ids"] for each in first] == [each["ids"] for each in second]
    for each in (*first, *second):
        del each["figures"][BITS if is_same else LOSS]
        if not (is_same or each["fits"]):
            each["figures"] = {}


def _ask_questions(
    trainer: MaskedLossTrainer, question_args: EvalQuestionArguments, enable_thinking: bool | None
) -> dict[str, list[dict[str, Any]]]:
    """Return the questions of `--eval_questions` and `--general_questions` with a model's answers."""
    examples: dict[str, list[dict[str, Any]]] = {}
    for questions in question_args.callbacks(trainer.processing_class, enable_thinking):
        questions.ask(trainer.model)
        (_, answers), *_ = questions.answers
        for n, (answer, is_right) in enumerate(zip(answers, questions.are_right(answers), strict=True)):
            ids = trainer.processing_class(answer, add_special_tokens=False)["input_ids"]
            grams = list(zip(*(ids[start:] for start in range(4)), strict=False))
            # More than half of the 4-grams occurred earlier in the answer.
            loops = 2 * len(set(grams)) < len(grams)
            figures = {"answers right": (float(is_right), 1.0), LOOPS: (float(loops), 1.0)}
            record = questions.prompts[n][0]
            example = {"key": n, "text": str(record.get("prompt") or record.get("messages"))}
            examples.setdefault(questions.title.lower(), []).append(example | {"answer": answer, "figures": figures})
    return examples


def compare(
    task: str, first: list[dict[str, Any]], second: list[dict[str, Any]], *, seeds: tuple[float, str] | None
) -> list[dict[str, Any]]:
    """
    Return a record of each figure that two models have on two examples or more. `chance` is the accuracy of a guess.
    """
    records, others = [], {each["key"]: each for each in second}
    both = [(each, others[each["key"]]) for each in first if each["key"] in others]
    for name in dict.fromkeys(chain.from_iterable(each["figures"] for each in first)):
        pairs = [pair for pair in both if all(name in each["figures"] for each in pair)]
        if len(pairs) < 2:
            continue
        # (num_examples, 2, 2) -> (2, num_examples) for the totals and for the weights
        pairs_of_sums = np.array([[each["figures"][name] for each in pair] for pair in pairs])
        totals, weights = pairs_of_sums.transpose(2, 1, 0)
        difference, values = paired_difference(totals, weights), totals / weights
        apart = np.abs(np.subtract(*values))
        order = [n for n in np.argsort(-apart, kind="stable").tolist() if apart[n] > ROUNDING][:NUM_SHOWN]
        chances = [each["chance"] for each, _ in pairs if "chance" in each and name.startswith("acc")]
        is_loss = name in (LOSS, LOOPS) or name.startswith(BITS)
        verdict = judge(difference, lower_is_better=is_loss, seeds=seeds if name == LOSS else None)
        record = {"figure": f"{task}: {name}", "chance": fmean(chances) if chances else None, "verdict": verdict}
        record["examples"] = [
            {
                "text": pairs[n][0]["text"][:MAX_CHARACTERS],
                "figures": values[:, n].tolist(),
                "answers": [each["answer"][:MAX_CHARACTERS] for each in pairs[n]],
            }
            for n in order
        ]
        records.append(difference._asdict() | record)
    return records


def _format(content: dict[str, Any]) -> str:
    """Return a comparison as text for the terminal."""
    lines = [f"{letter}         {name}" for letter, name in content["models"].items()]
    for each in content["figures"]:
        guess = "" if each["chance"] is None else f"; a guess {each['chance']:.4f}"
        lines += [
            f"\n{each['figure']}, {each['num_examples']:,} examples{guess}",
            f"  A {each['first']:.4f}, B {each['second']:.4f}, A - B {each['first'] - each['second']:+.4f} "
            f"(95 % interval {each['low']:+.4f} to {each['high']:+.4f})\n  {each['verdict']}",
        ]
    lines += ["\nOf equal models, one figure in twenty seems better by chance."] * (len(content["figures"]) > 9)
    return "\n".join(lines)


def _write(content: dict[str, Any], directory: str | Path) -> None:
    """Write `against.json` and `against.html` into a directory."""
    page = environment.get_template("evaluation/against.html.jinja").render(content)
    with written_whole(directory) as scratch:
        for ending, text in (("json", json.dumps(content, indent=2, ensure_ascii=False) + "\n"), ("html", page)):
            # A model's answer may hold half of a surrogate pair, which UTF-8 cannot write.
            (scratch / f"against.{ending}").write_text(text, encoding="utf-8", errors="replace")

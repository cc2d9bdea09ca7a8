"""
Compare two models on the same examples (`evaluate --against`): documents of the validation set, tasks, and questions.

`against.json` and `against.html` hold the figures of model A (`--model_name_or_path`) and model B (`--against`), with
the paired difference of each (`paired.py`), and the examples that differ most.
"""

import dataclasses
import json
import math
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets

from ..data.documents import load_sets
from ..inference.samples import GREEDY, MAX_TOKENS, NUM_ANSWERS, choose_questions, generate
from ..inference.terminal_chat import is_base_model
from ..loading.model import load_model
from ..loading.model_arguments import ModelArguments
from ..reports.page import environment
from ..rows.packing import split_long
from ..rows.preparation import PreparedData
from ..run_directory.metrics import NATS
from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.names import public_name
from ..runtime.writing import written_whole
from ..tokenizer.control_tokens import encode_documents
from ..tokenizer.rendering import set_template
from ..training.evaluation_arguments import EvalQuestionArguments
from ..training.masked_loss_trainer import MaskedLossTrainer
from .evaluation import EvaluationArguments, ValidationArguments, make_trainer, run_tasks
from .paired import ROUNDING, find_preset, judge, paired_difference, seed_noise


NAME = "against"
# Examples of each figure in the two files, and characters of each text.
NUM_SHOWN = 20
MAX_CHARACTERS = 1000
# These arguments describe model A alone.
_OF_FIRST = ("tokenizer_name_or_path", "config_overrides", "add_tokens", "inference_rope_scaling")


class Example(NamedTuple):
    """The figure of one model on one example, `total / weight`, and the texts to show: the example and the answer."""

    text: str
    total: float
    weight: float = 1.0
    answer: str = ""


class Figure(NamedTuple):
    """A figure of one model: the ratio of the sums over its examples, which both models name by the same keys."""

    name: str
    examples: dict[Any, Example]
    unit: str = ""
    lower_is_better: bool = False
    chance: float | None = None


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
    Compare a model with the one of `--against`, and return the result as a table. All ranks must call this function;
    the first one writes the files.

    Args:
        trainer ([`~training.masked_loss_trainer.MaskedLossTrainer`]): the trainer that has evaluated model A.
        rows ([`~rows.preparation.PreparedData`]): the validation set of model A.
        tasks (`dict`): the examples of model A in each task, as [`~evaluation.evaluation.run_tasks`] gives them.
        model_args, data_args, args, question_args: the arguments of the evaluation.

    Raises:
        `UserError`: if the models have fewer than two examples in common.
    """
    names = model_args.model_name_or_path, args.against
    announce("evaluating the second model")
    model_args = dataclasses.replace(model_args, model_name_or_path=args.against, **dict.fromkeys(_OF_FIRST))
    tokenizer = model_args.load_tokenizer()
    if data_args.kind != "text":
        set_template(tokenizer, data_args.chat_template, args.date)
    model = load_model(model_args, tokenizer)
    trainers = trainer, make_trainer(model, args, rows, tokenizer)
    asked = args.apply_chat_template
    is_chat = not is_base_model(args.against, model, tokenizer) if asked is None else asked
    results = run_tasks(args, trainers[1].model.eval(), tokenizer, is_chat=is_chat) if args.tasks else {}
    both_tasks = tasks, {task: result["examples"] for task, result in results.items() if "examples" in result}
    found = [
        [*task_figures(examples), *_ask_questions(each, rows, data_args, question_args)]
        for each, examples in zip(trainers, both_tasks, strict=True)
    ]
    others = {figure.name: figure for figure in found[1]}
    pairs = [(figure, others[figure.name]) for figure in found[0] if figure.name in others]
    if rows.eval is not None:
        pairs.insert(0, _measure_documents(trainers, data_args, args))
    presets = {find_preset(each.model.config) for each in trainers}
    seeds = seed_noise(presets.pop()) if len(presets) == 1 and data_args.kind == "text" else None
    records = [compare(*pair, seeds=seeds if pair[0].unit == NATS else None) for pair in pairs]
    if not any(records):
        raise UserError(f"--against {args.against}: the models have no two examples in common. Add data or tasks.")
    content = {"models": dict(zip("AB", map(public_name, names), strict=True)), "figures": [*filter(None, records)]}
    if args.process_index == 0:
        write_comparison(content, args.output_dir)
    return f"{format_comparison(content)}\n\nPage      {Path(args.output_dir, NAME)}.html"


def _measure_documents(
    trainers: tuple[MaskedLossTrainer, MaskedLossTrainer], data_args: ValidationArguments, args: EvaluationArguments
) -> tuple[Figure, Figure]:
    """
    Return the loss of two models on each document of the validation set: in nats per token if both have the same
    tokens, else in bits per byte. Then it leaves out conversations of which one model sees only the beginning.
    """
    reading = data_args.reading(args.seed)
    _, sets = load_sets(data_args.dataset_name, data_args.eval_dataset_name, reading, is_evaluation=True)
    texts = concatenate_datasets([*sets.values()])["text"][:]
    measured = [_measure(each, texts, data_args) for each in trainers]
    is_same = measured[0][0] == measured[1][0]
    weights = np.stack([sums[:, 1 if is_same else 2] for _, sums in measured])
    kept = (weights > 0).all(axis=0) & (is_same | (sum(sums[:, 3] for _, sums in measured) == 0))
    name, unit, scale = ("validation loss", NATS, 1.0) if is_same else ("bits per byte", "", 1 / math.log(2))
    first, second = (
        {
            number: Example(_show(texts[number]), sums[number, 0] * scale, weight[number])
            for number in np.flatnonzero(kept).tolist()
        }
        for (_, sums), weight in zip(measured, weights, strict=True)
    )
    return Figure(name, first, unit, True), Figure(name, second, unit, True)


def _measure(
    trainer: MaskedLossTrainer, texts: list[str], data_args: ValidationArguments
) -> tuple[list[list[int]], np.ndarray]:
    """
    Return the token ids of documents, and an array of shape `(num_documents, 4)`: for each document the sum of the
    weighted cross-entropy in nats, the sum of the weights, the bytes, and the number of tokens that are cut off.
    """
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
    rows = [
        {name: column[start : start + length] for name, column in columns.items()} | {"seq_lengths": [length]}
        for start, length in pieces
    ]
    # The trainer has a copy of the arguments. A batch of one row gives the sums of this row.
    trainer.args.per_device_eval_batch_size = 1
    trainer.evaluate(Dataset.from_list(rows))
    gathered = trainer.accelerator.gather(torch.stack(trainer.evaluation.sums))
    # (num_ranks * num_batches, 3): ranks take the rows in turn, and rows of weight zero fill up the last batch.
    ordered = gathered.reshape(trainer.args.world_size, -1, 3).transpose(0, 1).reshape(-1, 3)[: len(rows)]
    sums = np.zeros((len(texts), 4))
    place = np.searchsorted(starts, [start for start, _ in pieces], side="right") - 1
    np.add.at(sums[:, :3], place, ordered.double().cpu().numpy())
    sums[:, 3] = encoded.get("num_tokens_cut", 0)
    return encoded["input_ids"], sums


def _show(text: str) -> str:
    """Return a document as text; of a conversation, its messages."""
    try:
        return "\n".join(f"{message['role']}: {message['content']}" for message in json.loads(text)["messages"])
    except (ValueError, KeyError, TypeError):
        return text


def task_figures(tasks: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    """Return the figures of one model in tasks. `chance` is the accuracy of a guess among the choices."""
    figures = []
    for task, examples in tasks.items():
        chances = [example["chance"] for example in examples if "chance" in example]
        for name in dict.fromkeys(name for example in examples for name in example["figures"]):
            found = {
                each["key"]: Example(each["text"], *each["figures"][name], answer=each["answer"])
                for each in examples
                if name in each["figures"]
            }
            chance = fmean(chances) if chances and name.startswith("acc") else None
            figures.append(Figure(f"{task} {name}", found, lower_is_better="bits" in name, chance=chance))
    return figures


def _ask_questions(
    trainer: MaskedLossTrainer,
    rows: PreparedData,
    data_args: ValidationArguments,
    question_args: EvalQuestionArguments,
) -> list[Figure]:
    """Return the figures of a model's answers to `--eval_questions`, or to questions of the validation set."""
    model, tokenizer = trainer.model, trainer.processing_class
    figures, right = [], None
    if asked := question_args.callbacks(tokenizer, data_args.enable_thinking):
        asked[0].ask(model)
        texts = [str(record.get("prompt") or record.get("messages")) for record, _ in asked[0].prompts]
        answers = asked[0].answers[-1][1]
        right = asked[0].are_right(answers)
    elif rows.conversations is not None:
        questions = choose_questions(tokenizer, rows.conversations, NUM_ANSWERS)
        texts = [text for text, _ in questions]
        ids = generate(model, tokenizer, [prompt for _, prompt in questions], max_new_tokens=MAX_TOKENS, **GREEDY)
        answers = [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
    else:
        return []
    both = list(zip(texts, answers, strict=True))
    if right is not None:
        examples = {n: Example(*(text, float(right[n])), answer=answer) for n, (text, answer) in enumerate(both)}
        figures.append(Figure("questions answered right", examples))
    looping = {
        n: Example(text, float(_loops(tokenizer(answer, add_special_tokens=False)["input_ids"])), answer=answer)
        for n, (text, answer) in enumerate(both)
    }
    return [*figures, Figure("answers that loop", looping, lower_is_better=True)]


def _loops(ids: list[int]) -> bool:
    """Return whether more than half of the 4-grams of an answer occurred earlier in it."""
    grams = list(zip(*(ids[start:] for start in range(4)), strict=False))
    return 2 * len(set(grams)) < len(grams)


def compare(first: Figure, second: Figure, *, seeds: tuple[float, str] | None) -> dict[str, Any] | None:
    """Return the record of a figure of both models; `None` if they have fewer than two examples in common."""
    pairs = [(example, second.examples[key]) for key, example in first.examples.items() if key in second.examples]
    if len(pairs) < 2:
        return None
    totals, weights = (
        np.array([[vars_of(example) for example in side] for side in zip(*pairs, strict=True)])
        for vars_of in (attrgetter("total"), attrgetter("weight"))
    )
    difference = paired_difference(totals, weights)
    figures = totals / weights
    apart = np.abs(np.subtract(*figures))
    order = [number for number in np.argsort(-apart, kind="stable").tolist() if apart[number] > ROUNDING]
    return {
        "figure": first.name,
        "unit": first.unit,
        "chance": first.chance,
        **difference._asdict(),
        "verdict": judge(difference, lower_is_better=first.lower_is_better, seeds=seeds),
        "examples": [
            {
                "text": pairs[number][0].text[:MAX_CHARACTERS],
                "figures": figures[:, number].tolist(),
                "answers": [example.answer[:MAX_CHARACTERS] for example in pairs[number]],
            }
            for number in order[:NUM_SHOWN]
        ],
    }


def format_comparison(content: dict[str, Any]) -> str:
    """Return a comparison as text for the terminal."""
    lines = [f"{letter}         {name}" for letter, name in content["models"].items()]
    for record in content["figures"]:
        unit = f" ({record['unit']})" if record["unit"] else ""
        guess = "" if record["chance"] is None else f"; a guess {record['chance']:.4f}"
        value = record["first"] - record["second"]
        lines += [
            "",
            f"{record['figure']}{unit}, {record['num_examples']:,} examples{guess}",
            f"  A {record['first']:.4f}, B {record['second']:.4f}, A - B {value:+.4f} "
            f"(95 % interval {record['low']:+.4f} to {record['high']:+.4f})",
            f"  {record['verdict']}",
        ]
    return "\n".join(lines)


def write_comparison(content: dict[str, Any], directory: str | Path) -> None:
    """Write `against.json` and `against.html` into a directory."""
    page = environment.get_template("evaluation/against.html.jinja").render(content)
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with written_whole(directory) as scratch:
        for name, each in ((f"{NAME}.json", text), (f"{NAME}.html", page)):
            # A model's answer may hold half of a surrogate pair, which UTF-8 cannot write.
            (scratch / name).write_text(each, encoding="utf-8", errors="replace")

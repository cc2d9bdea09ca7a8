"""
Tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym), named `reasoning_gym:<family>`, and
their verifiers.

The column `reasoning_gym` of a task holds its `family`, `level`, `seed`, `size` and `index`. From these, the package
makes the same task again, in every process.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache, lru_cache
from io import StringIO
from typing import Any

from ..rows.reading import Reading
from ..runtime.command_line import announce
from ..runtime.errors import UserError, needing_extra
from ..runtime.names import check_word
from .documents import hashes_are_between
from .formats import BadRecord
from .rejected import RejectedLines
from .reward_tasks import TASK_COLUMNS


with needing_extra("reasoning_gym", "Tasks of reasoning_gym need the package reasoning-gym"):
    from reasoning_gym.factory import CURRICULA, DATASETS

# Families that a run cannot use, by what they do.
UNFIT = {
    "mixes other families": {"composite"},
    "makes other tasks in each process, so no run could resume": {
        *("codeio", "isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication"),
        *("ransom_note", "word_ladder"),
    },
    "has a verifier that runs the answers of the model as Python code": {
        *("intermediate_integration", "n_queens", "simple_integration", "string_insertion"),
    },
}
# The verifiers of these families do so, too, but a right answer needs only numbers, brackets and operators. Powers and
# repeated lists could take all memory.
RUNS_ANSWERS = {"binary_matrix", "countdown", "puzzle24", "spiral_matrix"}
HARMLESS = re.compile(r"(?s)(?!.*\*\*)[\d\s()+*/.-]*|[\d\s,\[\]-]*")
# So often the level may rise in a run, because the tasks are made and checked before it begins.
MAX_RISES = 10


@cache
def _make_family(family: str, level: int | None, seed: int, size: int) -> Any:
    dataset, config = DATASETS[family]
    settings = {"seed": seed, "size": size}
    if level is None:
        return dataset(config=config(**settings))
    curriculum = CURRICULA[family]()
    curriculum.set_global_level(level)
    return dataset(config=curriculum.generate_configuration(settings))


@lru_cache(maxsize=4096)
def _make_entry(index: int, **place: Any) -> tuple[Any, dict[str, Any]]:
    """Return a family with its verifier, and the entry of one of its tasks."""
    try:
        # `bf` prints a dot for each task.
        with redirect_stdout(StringIO()):
            return (family := _make_family(**place)), family[index]
    except Exception as error:
        raise UserError(f"reasoning-gym fails to make {place}: {error}. Choose another level or family.") from error


def score_answer(answer: str, place: dict[str, Any]) -> float:
    """
    Return the value, 0 to 1, that the verifier of a task gives to an answer: the text in the last pair of tags
    `<answer>` and `</answer>`, as reasoning-gym's own system prompts ask, or all of it without tags.

    Raises:
        `UserError`: if the verifier also fails on the right answer.
    """
    answer = [answer, *re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)][-1].strip()
    if place["family"] in RUNS_ANSWERS and not HARMLESS.fullmatch(answer):
        return 0.0
    family, entry = _make_entry(**place)
    try:
        return float(family.score_answer(answer, entry))
    except Exception as error:
        # Some verifiers raise for an answer that they cannot parse. One that refuses its own answer, too, is broken.
        try:
            family.score_answer(entry["answer"], entry)
        except Exception:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"The verifier of {place['family']} fails on every answer: {reason}.") from error
        return 0.0


def _find_levels(name: str, level: int | None, raises: bool) -> list[int | None]:
    """Return the levels of the tasks of a family. Raise `UserError` if there is none, or a run cannot use it."""
    family = name.removeprefix("reasoning_gym:")
    for reason in (reason for reason, families in UNFIT.items() if family in families):
        raise UserError(f"{name} {reason}. Name another family.")
    check_word(
        "--dataset_name", name, [f"reasoning_gym:{each}" for each in DATASETS.keys() - set().union(*UNFIT.values())]
    )
    attributes = CURRICULA[family]().attributes.values() if family in CURRICULA else ()
    num_levels = max((len(each.levels) for each in attributes), default=0)
    if level is not None and level >= num_levels:
        known = f"the levels 0 to {num_levels - 1}" if num_levels else "no levels"
        raise UserError(f"--task_level {level}: {name} has {known}. Choose another level or family.")
    return [level, *(range(level + 1, min(num_levels, level + 1 + MAX_RISES)) if raises else ())]


def load_gym_tasks(
    name: str,
    reading: Reading,
    rejected: RejectedLines,
    finish: Callable[[dict[str, Any]], dict[str, Any]],
    num_tasks: int,
    level: int | None,
    raises: bool,
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """
    Yield the tasks of one family, finished, each with the text whose hash decides the split. If the level may rise,
    their column `harder` holds a task of each higher level, as JSON. The arguments are those of
    [`~data.reward_tasks.load_tasks`].

    Raises:
        `UserError`: if there is no such family or level, or a run cannot use it.
    """
    levels, family = _find_levels(name, level, raises), name.removeprefix("reasoning_gym:")
    announce(f"making tasks of {name}")
    # The package adds the index to the seed: neighbouring seeds would give nearly the same tasks.
    seeds = [random.Random(f"{reading.seed} {family} {level}").getrandbits(31) for level in levels]
    for index in range(num_tasks):
        rows: list[dict[str, Any]] = []
        for level, seed in zip(levels, seeds, strict=True):
            place = {"family": family, "level": level, "seed": seed, "size": num_tasks, "index": index}
            _, entry = _make_entry(**place)
            prompt, solution = [{"role": "user", "content": entry["question"]}], [entry["answer"] or ""]
            row = TASK_COLUMNS | {"prompt": prompt, "solution": solution, "task": name, "reasoning_gym": place}
            # A training task does not become what the split holds out at a higher level: it stays the easier one.
            is_held_out = any(hashes_are_between([json.dumps(prompt)], [None], 0.0, reading.validation_fraction))
            try:
                rows.append(rows[-1] if rows and is_held_out else finish(row))
            except BadRecord as error:
                # Nor does it become one that is too long.
                if not rows:
                    rejected.add(name, index, error.reason)
                    break
                rows.append(rows[-1])
        rejected.num_lines += 1
        if rows:
            task, *harder = rows
            text = json.dumps(task["prompt"])
            yield task | ({"harder": [json.dumps(each) for each in harder]} if raises else {}), [text]

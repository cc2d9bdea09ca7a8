"""The tasks of reasoning-gym: the same in every process, with the answers that their verifiers take."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest

from hf_pretrain.data.formats import BadRecord
from hf_pretrain.data.reasoning_gym_tasks import DATASETS, RUNS_ANSWERS, UNFIT, score_answer
from hf_pretrain.data.reward_tasks import load_tasks
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.rewards import reasoning_gym_reward
from tests.toys import write_jsonl


FAMILIES = (
    "basic_arithmetic leg_counting chain_sum gcd spell_backward countdown number_sorting word_sorting mini_sudoku "
    "family_relationships syllogism binary_matrix caesar_cipher time_intervals acre"
).split()
# Prints the tasks of families, from the last to the first.
PROGRAM = """
import json, sys
from hf_pretrain.data.reward_tasks import load_tasks
from hf_pretrain.rows.reading import Reading
reading = Reading(kind="task", seed=3, validation_fraction=0.0)
print(json.dumps({name: load_tasks([name], reading, num_tasks=3)[0]["prompt"][:] for name in reversed(sys.argv[1:])}))
"""


def load(*families: str, seed: int = 1, fraction: float = 0.0, **options):
    reading = Reading(kind="task", seed=seed, validation_fraction=fraction)
    return load_tasks([f"reasoning_gym:{family}" for family in families], reading, **options)


def test_the_verifier_of_each_family_takes_its_own_answers():
    tasks, _ = load(*FAMILIES, num_tasks=4)
    assert len(tasks) == 4 * len(FAMILIES)
    for text in ("{}", "<think>Is it <answer>no</answer>?</think>It is <answer>7</answer>, or <answer> {} </answer>."):
        answers = [text.format(solution[0]) for solution in tasks["solution"]]
        assert reasoning_gym_reward(answers, reasoning_gym=tasks["reasoning_gym"]) == [1.0] * len(tasks)
    assert max(reasoning_gym_reward(["?"] * len(tasks), reasoning_gym=tasks["reasoning_gym"])) < 0.1
    assert reasoning_gym_reward(["7"], reasoning_gym=[None]) == [None]


def test_a_seed_gives_the_same_tasks_in_every_process_and_other_seeds_others():
    names = [f"reasoning_gym:{family}" for family in FAMILIES]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", PROGRAM, *names], env=environment, capture_output=True, check=True)
    elsewhere = json.loads(found.stdout)
    for family, name in zip(FAMILIES, names, strict=True):
        assert load(family, seed=3, num_tasks=3)[0]["prompt"][:] == elsewhere[name]
    prompts, others = (
        [prompt[0]["content"] for prompt in load("leg_counting", seed=seed)[0]["prompt"]] for seed in (3, 4)
    )
    assert len(prompts) == 2000 and len({*prompts} & {*others}) < 20


def test_no_harder_task_of_the_training_is_held_out():
    # Two numbers of one digit leave few tasks, which higher levels contain, too.
    train, held_out = load("basic_arithmetic", fraction=0.2, level=0, raises=True, num_tasks=300)
    harder = [json.loads(task) for rows in train["harder"] for task in rows]
    assert {task["reasoning_gym"]["level"] for task in harder} == {*range(5)} and len(held_out) > 30
    texts = {prompt[0]["content"] for prompt in held_out["prompt"]}
    assert not texts & {task["prompt"][0]["content"] for task in harder}


def test_a_harder_task_that_is_too_long_leaves_the_easier_one():
    def check(task):
        if len(task["prompt"][0]["content"]) > 2500:
            raise BadRecord("it is too long")

    options = {"level": 0, "num_tasks": 20, "check": check}
    train, _ = load("number_sorting", raises=True, **options)
    assert train["prompt"][:] == load("number_sorting", **options)[0]["prompt"][:]
    for rows in train["harder"]:
        lengths = [len(json.loads(row)["prompt"][0]["content"]) for row in rows]
        assert len(rows) > 3 and max(lengths) <= 2500


def test_a_file_whose_name_begins_alike_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "reasoning_gym_mine.jsonl", [{"prompt": "How many?", "solution": "2"}])
    tasks, _ = load_tasks(["reasoning_gym_mine.jsonl"], Reading(kind="task", validation_fraction=0.0))
    assert tasks["solution"][:] == ["2"]


def test_answers_are_not_run_as_code(tmp_path):
    unfit = set[str]().union(*UNFIT.values())
    for family in {*DATASETS} - unfit - RUNS_ANSWERS:
        source = inspect.getsource(inspect.getmodule(DATASETS[family][0]))
        assert not re.search(r"\b(eval|exec|parse_expr|sympify)\((answer|predicted|user)", source), family
    for family in RUNS_ANSWERS:
        tasks, _ = load(family, num_tasks=1)
        path = tmp_path / family
        for answer in (f"[open({str(path)!r}, 'w')]", "9**9**9**9", "[0] * 9999999999", "(0,) * 9999999999"):
            assert score_answer(answer, tasks[0]["reasoning_gym"]) == 0.0
        assert not path.exists()


@pytest.mark.parametrize(
    ("family", "answer"),
    [("prime_factorization", "abc"), ("coin_flip", "9" * 400), ("boxnet", "5"), ("game_of_life", "{}")],
)
def test_an_answer_that_breaks_a_verifier_is_wrong(family, answer):
    tasks, _ = load(family, num_tasks=1)
    assert score_answer(answer, tasks[0]["reasoning_gym"]) == 0.0


def test_a_broken_verifier_is_no_wrong_answer(monkeypatch):
    def fail(self, answer, entry):
        raise ImportError("No module named sympy")

    tasks, _ = load("gcd", num_tasks=1)
    monkeypatch.setattr(DATASETS["gcd"][0], "score_answer", fail)
    with pytest.raises(UserError):
        score_answer("7", tasks[0]["reasoning_gym"])


def test_a_run_without_these_tasks_does_not_import_the_package():
    code = "import sys, recipes.grpo; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Each number on a command line is checked before anything is read, by what its flag states."""

from pathlib import Path

import pytest

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.flags import _LIBRARIES
from hf_pretrain.runtime.parser import recipe_parser


RECIPES = {path.stem: recipe_parser(path) for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))}
NEEDED = {
    "data": ["inspect", "a.jsonl"],
    "generate": ["--input", "a.jsonl", "--output", "b.jsonl"],
    "convert": ["--from", "a", "--to", "b"],
    "compare": ["a"],
}


def numeric_flags(recipe):
    return {action.dest: action.type for action in RECIPES[recipe]._actions if action.type in (int, float)}


def refusal(recipe, *words):
    with pytest.raises(UserError) as mistake:
        RECIPES[recipe].parse_args([*NEEDED.get(recipe, []), *words])
    return str(mistake.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_flag_takes_a_number_that_is_not_finite(recipe):
    for name, kind in numeric_flags(recipe).items():
        for value in ("nan", "inf", "-inf") if kind is float else (str(10**23),):
            assert refusal(recipe, f"--{name}={value}").startswith(f"--{name} {value} must be "), name


def test_the_table_of_libraries_names_flags_that_exist():
    known = set().union(*(recipe.flags for recipe in RECIPES.values()))
    assert {name for name, _, _ in _LIBRARIES if "*" not in name} <= known
    numeric = set().union(*map(numeric_flags, RECIPES))
    stated = {name for recipe in RECIPES.values() for name, about in recipe.flags.items() if "bounds" in about}
    assert stated <= numeric


@pytest.mark.parametrize(
    ("recipe", "flag", "value", "words"),
    [
        ("from_scratch", "minutes", "-1.0", "above 0"),
        ("generate", "batch_size", "-1", "at least 1"),
        ("chat", "temperature", "-0.5", "at least 0"),
        ("chat", "top_p", "0.0", "above 0 and at most 1"),
        ("pretrain", "adam_beta1", "1.0", "at least 0 and below 1"),
        ("pretrain", "seed", "4294967296", "at least 0 and at most 4294967295"),
        ("pretrain", "dataset_weights", "-1.0", "above 0"),
        ("dpo", "label_smoothing", "5.0", "at least 0 and at most 0.5"),
        ("data", "max_length", "7", "at least 8"),
    ],
)
def test_a_number_out_of_bounds_is_named(recipe, flag, value, words):
    assert refusal(recipe, f"--{flag}={value}").startswith(f"--{flag} {value} must be {words}. ")


@pytest.mark.parametrize("value", ["0.0", "0.5", "1.0"])
def test_bounds_themselves_are_allowed(value):
    assert RECIPES["sft"].parse_args([f"--empty_think_ratio={value}"]).empty_think_ratio == float(value)

"""Each number on a command line is checked before anything is read, by what its flag states."""

import pytest

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.flags import _LIBRARIES
from tests.invariants.launching import ROOT
from tests.runtime.mistakes import NEEDED, parser_of


RECIPES = {path.stem: parser_of(path.stem) for path in sorted((ROOT / "recipes").glob("*.py"))}


def numeric_flags(recipe):
    return {action.dest: action.type for action in RECIPES[recipe]._actions if action.type in (int, float)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_flag_takes_a_number_that_is_not_finite(recipe):
    for name, kind in numeric_flags(recipe).items():
        for value in ("nan", "inf", "-inf") if kind is float else (str(10**23),):
            with pytest.raises(UserError) as mistake:
                RECIPES[recipe].parse_args([*NEEDED.get(recipe, []), f"--{name}={value}"])
            assert str(mistake.value).startswith(f"--{name} {value} must be "), name


def test_the_table_of_libraries_names_flags_that_exist():
    known = set().union(*(recipe.flags for recipe in RECIPES.values()))
    assert {name for name, _, _ in _LIBRARIES if "*" not in name} <= known
    numeric = set().union(*map(numeric_flags, RECIPES))
    stated = {name for recipe in RECIPES.values() for name, about in recipe.flags.items() if "bounds" in about}
    assert stated <= numeric


@pytest.mark.parametrize("value", ["0.0", "0.5", "1.0"])
def test_bounds_themselves_are_allowed(value):
    assert RECIPES["sft"].parse_args([f"--empty_think_ratio={value}"]).empty_think_ratio == float(value)

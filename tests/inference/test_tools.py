"""The calculator, which a model may call."""

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_pretrain_cli
from hf_pretrain.inference.tools import calculator, load_object


NUMBERS = st.integers(0, 99).map(str) | st.floats(0, 99).map(repr) | st.just("math.pi")
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda parts: (
        st.tuples(parts, st.sampled_from("+-*"), parts).map(" ".join).map("({})".format)
        | parts.map("-{}".format)
        | parts.map("math.atan({})".format)
    ),
    max_leaves=6,
)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(EXPRESSIONS)
def test_the_calculator_equals_python(expression):
    """MiniMind's calculator evaluates an expression with Python, without built-in functions and with `math`."""
    assert calculator(expression) == str(eval(expression, {"__builtins__": {}, "math": math}))


def test_the_calculator_reads_the_signs_of_models_and_does_nothing_else():
    for expression, value in (("12 * (3 + 4) / -2", "-42.0"), ("2**64 % 1000", "616"), ("math.log(8, 2)", "3.0")):
        assert calculator(expression) == value
    assert calculator("（2^10 − 24）÷ 10") == "100.0"
    for expression in ("__import__('os')", "9 ** 9 ** 9", "'a' * 3", "1 +", "math.factorial(9**9)", "abs(-3)", "1,2"):
        with pytest.raises((ValueError, SyntaxError)):
            calculator(expression)


def test_a_file_of_the_user_wins_against_a_recipe_of_its_name(tmp_path, monkeypatch):
    """Python puts the directory of the recipe that runs first."""
    (tmp_path / "reward.py").write_text("def mine(completions, **columns):\n    return [1.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(hf_pretrain_cli.RECIPES), *sys.path])
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    assert load_object("reward:mine", flag="--rewards")(["a", "b"]) == [1.0, 1.0]
    sys.modules.pop("reward")

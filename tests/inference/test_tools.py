"""The calculator, which a model may call."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pretrain.inference.tools import calculator


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

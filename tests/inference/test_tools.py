"""The calculator, which a model may call."""

import math

import pytest

from hf_pretrain.inference.tools import calculator


def test_the_calculator_equals_python_and_does_nothing_else():
    """MiniMind's calculator evaluates an expression with Python, without built-in functions and with `math`."""
    for expression in ("12 * (3 + 4) / -2", "2**64 % 1000", "math.pi * 2**2", "math.log(8, 2)"):
        assert calculator(expression) == str(eval(expression, {"__builtins__": {}, "math": math}))
    assert calculator("（2^10 − 24）÷ 10") == "100.0"
    for expression in ("__import__('os')", "9 ** 9 ** 9", "'a' * 3", "1 +", "math.factorial(9**9)", "abs(-3)", "1,2"):
        with pytest.raises((ValueError, SyntaxError)):
            calculator(expression)

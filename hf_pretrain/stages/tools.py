"""
Tools that a model may call while it answers: a calculator, and functions of the user.

A tool is a function with type hints and a docstring in Google's style. transformers makes its JSON schema from them,
so the docstring is part of the prompt. `examples/agent_tools.py` holds the tools of MiniMind's agent stage.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from ..runtime.errors import UserError
from .rewards import load_object


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
# Names of the module `math` in an expression. The size of their results is bounded, unlike that of `factorial`.
_MATH = (
    *("pi", "e", "sqrt", "cbrt", "exp", "log", "log2", "log10", "pow", "hypot", "fabs", "floor", "ceil", "trunc"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "degrees", "radians"),
)
# Python integers have no limit. Without this one, a model could fill the memory with 9**9**9.
MAX_BITS = 4096
# Operators as models write them.
_SPELLINGS = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-", "（": "(", "）": ")"})


# The model reads this docstring as the description of the tool, so it describes the tool instead of commanding it.
def calculator(expression: str) -> str:
    """
    Calculates the value of an expression.

    Args:
        expression: Numbers, + - * / % ** and parentheses, such as 12 * (3 + 4).

    Returns:
        The value.
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                numbers = value(left), value(right)
                if isinstance(op, ast.Pow) and _is_too_large(*numbers):
                    raise UserError(f"{expression!r} is too large to calculate.")
                return _OPERATORS[type(op)](*numbers)
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _MATH:
                return getattr(math, name)
            case ast.Call(func=ast.Attribute() as function, args=arguments, keywords=[]):
                return value(function)(*map(value, arguments))
        raise UserError(
            f"{expression!r} holds something else than numbers, + - * / % **, parentheses and functions such as "
            "math.sqrt. Write numbers without thousands separators."
        )

    # Use `ast` instead of `eval`: the expression comes from a model, and may be any Python code.
    return str(value(ast.parse(expression.translate(_SPELLINGS).strip(), mode="eval")))


def _is_too_large(base: Any, exponent: Any) -> bool:
    """Return whether a power of integers has more than `MAX_BITS` bits. Python itself refuses too large floats."""
    return isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS


def load_tools(names: list[str] | None) -> list[Callable[..., Any]] | None:
    """
    Return tools by name: `calculator`, or `module.path:name` of a function or a list of functions.

    Raises:
        `ValueError`: in the cases of [`~stages.rewards.load_object`].
    """
    if names is None:
        return None
    loaded: list[Callable[..., Any]] = []
    for name in names:
        if name == "calculator":
            loaded.append(calculator)
            continue
        found = load_object(name, flag="--tools", known=["calculator"], allows_lists=True)
        loaded += found if isinstance(found, list) else [found]
    return loaded


__all__ = ["calculator", "load_tools"]

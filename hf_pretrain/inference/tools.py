"""
Tools that a model may call while it answers: a calculator, and functions of the user; their calls; and the import of
user code.

A tool is a function with type hints and a docstring in Google's style. transformers makes its JSON schema from them,
so the docstring is part of the prompt. `examples/agent_tools.py` holds the tools of MiniMind's agent stage.
"""

import ast
import importlib
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import get_json_schema

import hf_pretrain_cli

from ..runtime.errors import UserError
from ..runtime.names import check_word
from ..runtime.signals import UserCodeExit, guard_user_code, running_user_code
from .tool_process import load_functions


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
# Answers to one question that may call tools, as in MiniMind's chat page.
MAX_TOOL_ROUNDS = 16
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
    Return tools by name: `calculator`, the functions of a file such as `tools.py`, or `module.path:name` of a function
    or a list of functions, which run in this process.
    """
    if names is None:
        return None
    loaded: list[Callable[..., Any]] = []
    for name in names:
        if name.endswith(".py"):
            loaded += _load_file(name)
            continue
        found = calculator if name == "calculator" else load_object(name, flag="--tools", known=["calculator"])
        loaded += found if isinstance(found, list) else [found]
    return loaded


def _load_file(path: str) -> list[Callable[..., Any]]:
    try:
        functions = load_functions(path)
        # A tool needs type hints and a docstring, which transformers demands.
        described = [get_json_schema(each) for each in functions]
    # The file is the user's, so anything may happen.
    except (Exception, SystemExit) as error:
        raise UserError(f"--tools {path}: {type(error).__name__}: {error}") from error
    if not described:
        raise UserError(f"--tools {path} defines no function without a leading underscore.")
    return functions


def offer_tools(name: str | None) -> tuple[list[dict[str, Any]] | None, dict[str, Callable[..., Any]]]:
    """
    Return the JSON schemas of the tools that [`load_tools`] finds by a name, and the functions that run them, by name.
    """
    functions = load_tools([name] if name else None) or []
    return [get_json_schema(each) for each in functions] or None, {each.__name__: each for each in functions}


def call_tool(functions: dict[str, Callable[..., Any]], call: dict[str, Any]) -> str:
    """Return the result of a tool call as text. An error becomes the result, as in TRL, and the model reads it."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        if name not in functions:
            raise UserError(f"There is no tool {name!r}, only {', '.join(functions)}.")
        result = functions[name](**(json.loads(arguments) if isinstance(arguments, str) else arguments))
    # The function is the user's, and the arguments are the model's, so anything may happen.
    except (Exception, UserCodeExit) as error:
        result = {"error": str(error)}
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def read_schemas(text: str) -> list[dict[str, Any]]:
    """
    Return tool schemas from JSON, each as `{"type": "function", "function": {"name": ..., "parameters": ...}}`.

    Raises:
        `UserError`: if the text holds anything else.
    """
    try:
        schemas = json.loads(text)
        if not isinstance(schemas, list):
            raise TypeError
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in schemas]
        # Raises if a name is no text.
        "".join(tool["function"]["name"] for tool in tools)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(
            'Tools must be a JSON list such as [{"type": "function", "function": {"name": ..., "parameters": ...}}], '
            f"not {text[:100]!r}."
        ) from None
    return tools


def load_object(name: str, *, flag: str, known: Iterable[str] = ()) -> Any:
    """
    Import and return the function, class or list that `module.path:name` names.

    Args:
        name (`str`): what the user typed.
        flag (`str`): the flag, for messages.
        known (`Iterable[str]`): the names without a module path, for messages.
    """
    module_name, colon, object_name = name.partition(":")
    # A leading dot would be relative to a package.
    if not colon or module_name.startswith(".") or not module_name:
        check_word(flag, name, [*known, "module.path:function"])
    # Python puts the directory of the script first, where a user's `reward.py` would be the recipe of this name.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != hf_pretrain_cli.RECIPES.resolve()]
    # It does not add the current directory. Append it, so that a user's file cannot shadow an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with running_user_code(f"{flag} {name}: the import of {module_name}"):
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"{flag} {name}: the module {module_name} cannot be imported from the current directory or the "
            f"environment ({error})."
        ) from error
    found = vars(module).get(object_name)
    if not callable(found) and not isinstance(found, list):
        raise UserError(f"{flag} {name}: {module_name} has no function {object_name!r}.")
    if isinstance(found, list):
        return [guard_user_code(each, f"{flag} {name}") for each in found]
    # TRL recognises reward models by their class.
    return found if isinstance(found, nn.Module) else guard_user_code(found, f"{flag} {name}")

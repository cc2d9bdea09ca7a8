"""
Four tools for `--tools examples/tools.py`: a calculator, a unit converter, a calendar and a table look-up.

Copy this file as a start for your own tools. Each public function is a tool, and transformers makes the description
that the model reads from its type hints and its docstring in Google's style. The functions run in a process of their
own. An error, and a call that takes too long, become a result that the model reads.
"""

import datetime
import re


_METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0, "inch": 0.0254, "foot": 0.3048, "mile": 1609.344}
_GRAMS = {"g": 1.0, "kg": 1000.0, "ounce": 28.349523125, "pound": 453.59237}
_STOCK = {
    "apples": 12, "bags": 64, "balls": 19, "bells": 18, "books": 25, "bottles": 144, "boxes": 57, "brushes": 22,
    "candles": 90, "chairs": 8, "coats": 13, "cups": 31, "eggs": 36, "forks": 75, "hats": 28, "keys": 46, "lamps": 3,
    "maps": 17, "nuts": 7, "pears": 40, "pens": 210, "plates": 33, "rings": 5, "shoes": 82,
}  # fmt: skip


def calculate(expression: str) -> str:
    """
    Calculates the value of an expression.

    Args:
        expression: Numbers, + - * / % ** and parentheses.
    """
    if not re.fullmatch(r"[\d\s.+*/%()-]+", expression):
        raise ValueError("Write numbers, + - * / % ** and parentheses only.")
    # Without letters there are no names to look up. A power that never ends is ended by the time limit of a call.
    return f"{eval(expression):.10g}"


def convert_units(value: float, source: str, target: str) -> str:
    """
    Converts a length or a weight.

    Args:
        value: The number of source units.
        source: A unit such as mm, km, inch, mile, kg, ounce.
        target: A unit of the same kind.
    """
    for units in (_METRES, _GRAMS):
        if source in units and target in units:
            return f"{value * units[source] / units[target]:.6g}"
    raise ValueError(f"There is no way from {source} to {target}.")


def calendar(date: str, days: int) -> str:
    """
    Counts days from a date.

    Args:
        date: A date such as 2026-03-31.
        days: Days to add, 0 for the date itself.
    """
    day = datetime.date.fromisoformat(date) + datetime.timedelta(days=days)
    return f"{day:%A}, {day}"


def stock(item: str) -> str:
    """
    Looks up how many pieces are in stock.

    Args:
        item: The kind of goods, in the plural.
    """
    if item not in _STOCK:
        raise ValueError(f"There are no goods of the name {item}.")
    return str(_STOCK[item])

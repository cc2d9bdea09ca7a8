"""
Tools that a model may call while it answers: a calculator, and the six tools of MiniMind's agent stage. Those answer
from the fictitious data that the targets (`gt`) of its `agent_rl.jsonl` were written for
(https://github.com/jingyaogong/minimind, Apache-2.0).

A tool is a function with type hints and a docstring in Google's style, from which transformers makes its JSON schema.
So the docstrings of the tools are part of the prompt and must not be reworded.
"""

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from .rewards import load_function


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
# Python integers have no limit: without this, a model could fill the memory with 9**9**9.
MAX_EXPONENT = 64
# Operators as models write them.
_SPELLINGS = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-", "（": "(", "）": ")"})


def calculator(expression: str) -> str:
    """
    Calculates the value of an expression.

    Args:
        expression: Numbers, + - * / % ** and parentheses, such as 12 * (3 + 4).

    Returns:
        The value.
    """

    def value(node: ast.AST) -> float:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                numbers = value(left), value(right)
                if isinstance(op, ast.Pow) and (abs(numbers[1]) > MAX_EXPONENT or abs(numbers[0]) > 1e6):
                    raise ValueError(f"{expression!r} is too large to calculate.")
                return _OPERATORS[type(op)](*numbers)
        raise ValueError(f"{expression!r} holds something else than numbers, + - * / % ** and parentheses.")

    # ast and not eval: the expression comes from a model, and may be any Python code.
    return str(value(ast.parse(expression.translate(_SPELLINGS).strip(), mode="eval")))


_UNITS = {
    ("km", "miles"): 0.621371, ("miles", "km"): 1.60934, ("kg", "pounds"): 2.20462, ("pounds", "kg"): 0.453592,
    ("meters", "feet"): 3.28084, ("feet", "meters"): 0.3048,
    ("celsius", "fahrenheit"): 1.8, ("fahrenheit", "celsius"): 0.5556,
}  # fmt: skip
_WEATHER = {
    "北京": ("28°C", "晴"), "上海": ("15°C", "多云"), "广州": ("32°C", "闷热"), "深圳": ("30°C", "晴"),
    "杭州": ("22°C", "阴"), "成都": ("18°C", "小雨"), "武汉": ("25°C", "多云"), "南京": ("20°C", "晴"),
    "西安": ("16°C", "大风"), "重庆": ("26°C", "阴"), "Tokyo": ("12°C", "晴"), "New York": ("8°C", "多云"),
    "London": ("5°C", "小雨"), "Paris": ("10°C", "阴"), "Sydney": ("25°C", "晴朗"),
}  # fmt: skip
_TIMES = {
    "Asia/Shanghai": "14:30:00", "America/New_York": "01:30:00", "Europe/London": "06:30:00",
    "Asia/Tokyo": "15:30:00", "Europe/Paris": "07:30:00", "Australia/Sydney": "17:30:00",
}  # fmt: skip
_RATES = {
    ("USD", "CNY"): 7.21, ("EUR", "CNY"): 7.85, ("GBP", "CNY"): 9.12, ("JPY", "CNY"): 0.048,
    ("USD", "EUR"): 0.92, ("USD", "GBP"): 0.79, ("CNY", "JPY"): 20.83, ("AUD", "CNY"): 4.72,
}  # fmt: skip
_TRANSLATIONS = {
    ("你好世界", "english"): "Hello World", ("Good morning", "chinese"): "早上好",
    ("今天天气真好", "english"): "The weather is nice today", ("I love programming", "chinese"): "我喜欢编程",
    ("机器学习很有趣", "english"): "Machine learning is interesting", ("Happy birthday", "chinese"): "生日快乐",
}  # fmt: skip


def _answer(**fields: Any) -> str:
    """Return the fields as JSON text."""
    return json.dumps(fields, ensure_ascii=False)


def calculate_math(expression: str) -> str:
    """
    计算数学表达式

    Args:
        expression: 数学表达式

    Returns:
        结果
    """
    return _answer(result=calculator(expression))


def unit_converter(value: float, from_unit: str, to_unit: str) -> str:
    """
    单位换算

    Args:
        value: 数值
        from_unit: 原单位
        to_unit: 目标单位

    Returns:
        结果
    """
    return _answer(result=round(float(value) * _UNITS.get((from_unit.lower(), to_unit.lower()), 1), 4))


def get_current_weather(location: str) -> str:
    """
    获取天气

    Args:
        location: 城市

    Returns:
        天气
    """
    temperature, condition = _WEATHER.get(location, ("22°C", "晴"))
    return _answer(city=location, temperature=temperature, humidity="65%", condition=condition)


def get_current_time(timezone: str = "Asia/Shanghai") -> str:
    """
    获取时间

    Args:
        timezone: 时区

    Returns:
        时间
    """
    return _answer(datetime=f"2025-03-07 {_TIMES.get(timezone, '14:30:00')}", timezone=timezone)


def get_exchange_rate(from_currency: str, to_currency: str) -> str:
    """
    查询汇率

    Args:
        from_currency: 原货币
        to_currency: 目标货币

    Returns:
        汇率
    """
    rate = _RATES.get((from_currency, to_currency), 1.0)
    return json.dumps({"from": from_currency, "to": to_currency, "rate": rate})


def translate_text(text: str, target_language: str) -> str:
    """
    翻译文本

    Args:
        text: 文本
        target_language: 目标语言

    Returns:
        译文
    """
    return _answer(translated_text=_TRANSLATIONS.get((text, target_language), text))


MINIMIND_TOOLS: list[Callable[..., str]] = [
    calculate_math,
    unit_converter,
    get_current_weather,
    get_current_time,
    get_exchange_rate,
    translate_text,
]
TOOLS: dict[str, list[Callable[..., str]]] = {"calculator": [calculator], "minimind": MINIMIND_TOOLS}


def load_tools(names: list[str] | None) -> list[Callable[..., Any]] | None:
    """
    Return tools by name: `calculator`, `minimind` (its six tools), or `module.path:function`.

    Raises:
        `ValueError`: as [`~stages.rewards.load_function`] does.
    """
    if names is None:
        return None
    loaded: list[Callable[..., Any]] = []
    for name in names:
        loaded += TOOLS[name] if name in TOOLS else [load_function(name, flag="--tools", known=TOOLS)]
    return loaded


__all__ = ["MINIMIND_TOOLS", "TOOLS", "calculator", "load_tools"]

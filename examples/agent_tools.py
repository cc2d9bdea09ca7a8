"""
The six tools of MiniMind's agent stage, for `recipes/grpo.py --tools examples.agent_tools:TOOLS`.

The tools answer from fictitious data, for which MiniMind wrote the targets (`gt`) of its `agent_rl.jsonl`
(https://github.com/jingyaogong/minimind, Apache-2.0). Copy this file as a start for your own tools. A tool is a
function with type hints and a docstring in Google's style, and transformers makes its JSON schema from them. So the
docstrings are part of the prompt. Do not reword these docstrings, because MiniMind wrote the data with them.
"""

import json
from collections.abc import Callable
from typing import Any

from hf_pretrain.inference.tools import calculator


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


TOOLS: list[Callable[..., str]] = [
    calculate_math,
    unit_converter,
    get_current_weather,
    get_current_time,
    get_exchange_rate,
    translate_text,
]

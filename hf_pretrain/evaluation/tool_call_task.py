"""
The task `tool_call` of `recipes/evaluate.py`: questions in Chinese and English that need one of eight tools, or two.

`tool_call_cases.json` holds the tools, and for each question the expected calls, their fictitious results and what the
answer must state. A question counts if the model makes exactly the expected calls and then states the results.
"""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

from ..inference.terminal_chat import Chat
from ..inference.tools import calculator
from ..runtime.errors import UserError
from ..runtime.json_files import read_json


TASK = "tool_call"
# The flags of `recipes/evaluate.py` that the task reads.
OPTIONS = ("tool_cases", "limit", "temperature", "top_p", "max_new_tokens")
_CASES = Path(__file__).with_name("tool_call_cases.json")


def evaluate_tool_calls(
    model: Any, tokenizer: Any, *, tool_cases: str | None = None, limit: float | None = None, **sampling: float
) -> dict[str, Any]:
    """
    Ask the questions. The chat template, or the server of the model, decides about reasoning.

    Args:
        model ([`PreTrainedModel`] or [`~inference.served_model.ServedModel`]): the model, in eval mode.
        tokenizer ([`PreTrainedTokenizerFast`]): its tokenizer, with a chat template and a response template;
            `None` for a served model.
        tool_cases (`str`, *optional*): a file of other tools and questions, in the form of `tool_call_cases.json`.
        limit (`float`, *optional*): the number of questions; below 1, their share.
        sampling: as for [`~inference.terminal_chat.Chat`]; by default greedy decoding of 256 tokens, without the
            model's own repetition penalty, which a served model may keep: answers repeat numbers of the question.

    Returns:
        `dict`: as [`~evaluation.lm_eval_tasks.evaluate_tasks`] returns for one task, and `failures`, which holds the
            `question`, the `problem` and the model's `answer` of each question that does not count; and `examples`, as
            [`~evaluation.lm_eval_tasks.task_examples`] returns them.
    """
    if tokenizer is not None and tokenizer.response_template is None:
        raise UserError("--tasks tool_call: without a response_template, no tool call can be recognised.")
    content = read_json(Path(tool_cases or _CASES))
    if not content.get("tools") or not (cases := content.get("cases")):
        raise UserError(f"--tool_cases {tool_cases}: it needs `tools` and `cases`, as {_CASES} has them.")
    if limit is not None:
        cases = cases[: math.ceil(limit * len(cases) if limit < 1 else limit)]
    # A server may refuse a field that OpenAI's API lacks.
    own = {} if tokenizer is None else {"repetition_penalty": 1.0}
    sampling = {"temperature": 0, "max_new_tokens": 256} | own | sampling
    failures, examples, num_called = [], [], 0
    for number, case in enumerate(cases):
        tools = [tool for tool in content["tools"] if tool["function"]["name"] in case["tools"]]
        # One call too many decides.
        chat = Chat(model, tokenizer, sampling, tools=tools, num_rounds=len(case["calls"]) + 1)
        problem, is_called, answer = _ask(chat, case)
        num_called += is_called
        if problem:
            failures.append({"question": case["question"], "problem": problem, "answer": answer})
        figures = {"score": (float(not problem), 1.0), "right calls": (float(is_called), 1.0)}
        shown = f"{answer}\n({problem})" if problem else answer
        examples.append({"key": number, "text": case["question"], "answer": shown, "figures": figures})
    scores = {"score": 1 - len(failures) / len(cases), "right calls": num_called / len(cases)}
    metrics = {name: {"value": value, "stderr": None} for name, value in scores.items()}
    facts = {"num_fewshot": 0, "num_examples": len(cases), "group": None, "sampling": sampling}
    return facts | {"metrics": metrics, "failures": failures, "examples": examples}


def _ask(chat: Chat, case: dict[str, Any]) -> tuple[str, bool, str]:
    """Return the first problem of the answer to a question, whether all calls are right, and the answer."""
    expected, wrong = list(case["calls"]), []

    def tool(name: str, /, **arguments: Any) -> Any:
        for call in expected:
            if call["name"] == name and _fits(arguments, call["arguments"]):
                expected.remove(call)
                return call["result"]
        wrong.append(f"calls {name} {json.dumps(arguments, ensure_ascii=False)}")
        raise UserError("This call is wrong.")

    chat.functions = {name: partial(tool, name) for name in case["tools"]}
    chat.say(case["question"])
    answer = ""
    try:
        answer = chat.respond(lambda text: None)["content"]
    except ConnectionError:
        # The server does not answer, which is no fault of the model.
        raise
    except UserError as error:
        # The conversation has more tokens than the model has positions.
        wrong.append(str(error))
    num_calls = sum(len(message.get("tool_calls", [])) for message in chat.history)
    if num_calls > len(case["calls"]) - len(expected) + len(wrong):
        # Such a call reaches no function.
        wrong.append("calls a tool that was not offered, or without a JSON object of arguments")
    missing = [f"does not call {call['name']}" for call in expected]
    unsaid = [f"does not state {text}" for text in case["states"] if not _holds(answer, text)]
    return next(iter([*wrong, *missing, *unsaid]), ""), not (wrong or missing), answer


def _holds(answer: str, text: str) -> bool:
    """Return whether an answer holds a text, whatever its case. 120 does not hold 12."""
    whole = rf"((?<!\d)|(?=\D)){re.escape(text)}((?!\d)|(?<=\D))"
    return re.search(whole, answer, re.IGNORECASE) is not None


def _fits(arguments: dict[str, Any], expected: dict[str, list[Any]]) -> bool:
    """Return whether a call has exactly the expected arguments, each with one of its accepted values."""
    return arguments.keys() == expected.keys() and all(
        _value(arguments[name]) in map(_value, accepted) for name, accepted in expected.items()
    )


def _value(value: Any) -> Any:
    """Return an argument for comparison: an expression by its value, other texts without case."""
    try:
        return round(float(calculator(str(value))), 6)
    except (ValueError, SyntaxError, ArithmeticError, TypeError, RecursionError):
        return str(value).strip().casefold()


def format_failures(result: dict[str, Any]) -> str:
    """Return the questions that do not count as a table."""
    lines = ["", f"{len(result['failures'])} of {result['num_examples']} questions of {TASK} failed:"]
    for each in result["failures"]:
        answer = " ".join(each["answer"].split())
        lines += [each["question"], f"    {each['problem']}", f"    answer: {answer:.80}"]
    return "\n".join(lines)

"""
The functions of a user's Python file as tools, in a process of their own with limits of time and output.

This file is also the program of that process, which therefore imports nothing but what the user's file imports.
"""

import faulthandler
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any


# A call that takes longer is ended, and the next one finds a new process.
MAX_SECONDS = 10.0
# Longer results would fill the context of a small model.
MAX_CHARACTERS = 4000


class ToolError(Exception):
    """A tool has failed. The model reads the message."""


def load_functions(path: str) -> list[Callable[..., Any]]:
    """
    Return the public functions that a Python file defines, in its order. One process runs all of them. A function of
    `completions` is a reward, and no tool.
    """
    module, process = _import_file(path), ToolProcess(path)
    own = [each for each in vars(module).values() if inspect.isfunction(each) and each.__module__ == module.__name__]
    public = [each for each in own if not each.__name__.startswith("_")]
    tools = [each for each in public if "completions" not in inspect.signature(each).parameters]
    return [_in_process(each, process) for each in tools]


def _in_process(function: Callable[..., Any], process: "ToolProcess") -> Callable[..., Any]:
    @wraps(function)
    def tool(*args: Any, **kwargs: Any) -> str:
        return process.call(function.__name__, inspect.signature(function).bind(*args, **kwargs).arguments)

    return tool


def _import_file(path: str) -> ModuleType:
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(f"tools_of_{name}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # The file may import its neighbours.
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


class ToolProcess:
    """
    A process that runs the functions of a file. It ends with this one.

    Args:
        path (`str`): the file.
    """

    def __init__(self, path: str):
        self.path = path
        self._process: subprocess.Popen[str] | None = None
        # The page of `chat` answers in threads.
        self._lock = threading.Lock()

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """
        Return the result of a function as text.

        Raises:
            `ToolError`: if the function fails, takes longer than `MAX_SECONDS`, or ends its process.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                command = [sys.executable, __file__, self.path, str(MAX_SECONDS)]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
                )
            begin = time.monotonic()
            try:
                print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
                line = self._process.stdout.readline()  # type: ignore[union-attr]
            except OSError:
                line = ""
            if not line:
                self._process.wait()
                is_late = time.monotonic() - begin >= MAX_SECONDS
                cause = f"took longer than {MAX_SECONDS:g} seconds" if is_late else "ended its process"
                raise ToolError(f"{name} {cause}.")
        is_right, text = json.loads(line)
        if not is_right:
            raise ToolError(text)
        return text


def _serve(path: str, seconds: float) -> None:
    """Answer lines `[name, arguments]` by lines `[whether it succeeded, text]`, until the input ends."""
    # What the functions print is no result. Ctrl-C is for the run, at whose end the input ends.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The directory of this file is no place for the user's imports.
    del sys.path[0]
    module = _import_file(path)
    for line in sys.stdin.buffer:
        name, arguments = json.loads(line)
        # Unlike a thread of Python, it ends a computation that never returns to the interpreter.
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            result, is_right = getattr(module, name)(**arguments), True
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except (Exception, SystemExit) as error:
            text, is_right = f"{type(error).__name__}: {error}", False
        faulthandler.cancel_dump_traceback_later()
        cut = f" ... ({len(text) - MAX_CHARACTERS:,} more characters)" if len(text) > MAX_CHARACTERS else ""
        print(json.dumps([is_right, text[:MAX_CHARACTERS] + cut]), file=results, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]))

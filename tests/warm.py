"""
A Python process that has imported the libraries, and forks the processes of tests: `python -m tests.warm`.

Importing torch, transformers and the package takes six seconds of CPU time, and training a toy model two. A test whose
subject is a recipe, not its launcher, starts it here. Such a process is as with `python RECIPE` in its arguments,
environment, working directory, output and exit status, but its charts are empty.

A library may read a variable of the environment while it is imported, so a process needs a parent with the same
environment (`can_fork`). The first process with an unusual environment starts from scratch, the second one starts a
parent. Each worker of pytest has its own parents, such as one for most tests and one for the clients of the Hub.
"""

import atexit
import io
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
# Variables that no library reads while it is imported. A forked process reads PYTHONPATH itself.
HARMLESS = {"PYTEST_CURRENT_TEST", "PYTHONPATH", "DOUBLE_GRADIENT", "PLANT_SPIKE", "POISON", "COLUMNS"}
HARMLESS |= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CROSS_RANK", "CROSS_SIZE"}
HARMLESS |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
# Their imports are those of most runs.
RECIPES = ("pretrain", "sft", "distill", "dpo", "reward", "grpo", "evaluate")
# What runs import only when they need it.
LIBRARIES = (
    "datasets.packaged_modules.generator.generator",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "scipy.io",
    "torch._dynamo",
    "torch.distributed.fsdp",
)
# Each parent takes about 500 MB.
MAX_PARENTS = 3


class WarmParent:
    """The process that forks, seen from the tests."""

    def __init__(self, environment: dict[str, str]):
        self.environment = environment
        words = [sys.executable, "-m", "tests.warm"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(words, cwd=ROOT, env=environment, **pipes, text=True, bufsize=1)
        atexit.register(self._process.kill)

    def can_fork(self, environment: dict[str, str]) -> bool:
        """Whether a forked process would see the same libraries as one that starts from scratch."""
        names = self.environment.keys() | environment.keys()
        return all(self.environment.get(name) == environment.get(name) for name in names - HARMLESS)

    def run(
        self, commands: list[list[str]], environments: list[dict[str, str]], *, cwd: str | Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """
        Run some commands (`SCRIPT ...` or `-c CODE ...`, without `python`), one process each, with all that they print
        in one text.

        Raises:
            `subprocess.TimeoutExpired`: if one takes longer than `timeout` seconds. All of them are killed first.
        """
        with tempfile.NamedTemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            jobs = [
                {"argv": argv, "env": env, "cwd": str(cwd), "output": output.name}
                for argv, env in zip(commands, environments, strict=True)
            ]
            self._process.stdin.write(json.dumps({"jobs": jobs, "timeout": timeout}) + "\n")
            answer = json.loads(self._process.stdout.readline())
            output.seek(0)
            text = output.read()
        if answer["timed_out"]:
            raise subprocess.TimeoutExpired(commands[0], timeout, output=text)
        # As launchers do: the first failure is the failure of the whole. The other ranks are ended because of it.
        statuses = [os.waitstatus_to_exitcode(status) for status in answer["statuses"]]
        return subprocess.CompletedProcess(commands[0], next(filter(None, statuses), 0), text)


_parents: list[WarmParent] = []
_seen: set[frozenset[tuple[str, str]]] = set()


def find_parent(environment: dict[str, str]) -> WarmParent | None:
    """Return a parent with this environment; `None` if it is new and not the first: most unusual ones come once."""
    for parent in _parents:
        if parent.can_fork(environment):
            return parent
    fixed = frozenset(pair for pair in environment.items() if pair[0] not in HARMLESS)
    if (_parents and fixed not in _seen) or len(_parents) == MAX_PARENTS:
        _seen.add(fixed)
        return None
    _parents.append(WarmParent(dict(fixed)))
    return _parents[-1]


def serve() -> dict[str, Any] | None:
    """Fork what the tests ask for. Return the job to a child, and `None` to the parent when no test is left to ask."""
    for line in sys.stdin:
        request = json.loads(line)
        children: dict[int, int | None] = {}
        for job in request["jobs"]:
            if (pid := os.fork()) == 0:
                return job
            children[pid] = None
        timed_out = not _wait(children, time.monotonic() + request["timeout"])
        print(json.dumps({"statuses": list(children.values()), "timed_out": timed_out}), flush=True)
    return None


def _wait(children: dict[int, int | None], deadline: float) -> bool:
    """Wait for all children, and end the others when one fails. Return `False` if they had to be killed."""
    is_in_time = True
    while None in children.values():
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            # In the order in which they end.
            del children[pid]
            children[pid] = status
        left = [child for child, status in children.items() if status is None]
        if time.monotonic() > deadline:
            is_in_time = False
            for child in left:
                os.kill(child, signal.SIGKILL)
        elif pid in children and status != 0:
            for child in left:
                os.kill(child, signal.SIGTERM)
        if not pid:
            select.select([], [], [], 0.01)
    return is_in_time


def draw_nothing(figure: Any, file: Any, **options: Any) -> None:
    """Stand in for `Figure.savefig`: the charts of a run take as long as the training of a toy model."""
    if isinstance(file, io.StringIO):
        file.write("<svg></svg>")
    else:
        Path(file).write_bytes(b"\x89PNG")


def become(job: dict[str, Any]) -> None:
    """Turn a forked child into what `python SCRIPT ...` or `python -c CODE ...` is."""
    os.setsid()
    os.chdir(job["cwd"])
    output = os.open(job["output"], os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(job["env"])
    sys.path[1:1] = filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = job["argv"]
    if sys.argv[0] == "-c":
        code = compile(sys.argv.pop(1), "<string>", "exec")
        sys.path[0] = ""
        exec(code, {"__name__": "__main__"})
    else:
        # `python -m` put the working directory there, and `python SCRIPT` has the script's.
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # The answers to the tests go to stdout, and DeepSpeed's logger writes there.
    with redirect_stdout(sys.stderr):
        for name in LIBRARIES:
            import_module(name)
        for name in RECIPES:
            runpy.run_path(str(ROOT / f"recipes/{name}.py"))
        import_module("matplotlib.figure").Figure.savefig = draw_nothing
    if (found := serve()) is not None:
        become(found)

"""
Work on large data part by part, each in a process of its own and cached: a run that is killed does not do again what was
done, and memory does not grow with the data, whose pages stay mapped only as long as a part is worked on.
"""

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import datasets
from datasets import Dataset
from tqdm.auto import tqdm

from ..runtime.command_line import is_mistake


# Documents that are packed together: enough to fill rows, few enough to hold in memory. Parts are multiples of it, so
# that rows do not depend on them.
GROUP_SIZE = 10_000
PART_SIZE = 100_000
MAX_PROCESSES = 8

T = TypeVar("T")


def digest(*values: object) -> str:
    """A digest of values that print all that they are."""
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()


def describe_code(package: Path) -> str:
    """A digest of the code that makes rows of data, and the versions of the libraries that it does so with."""
    files = [*sorted((package / "data").glob("*.py")), *sorted((package / "tokenizer").glob("*.py"))]
    versions = [(name, version(name)) for name in ("datasets", "tokenizers", "transformers")]
    return digest([file.read_bytes() for file in files], versions)


CODE = describe_code(Path(__file__).parent.parent)


def cache_key(*values: object) -> str:
    """A key for the cache, of values that print all that they are: other code gives other keys."""
    return digest(CODE, *values)


def cut(dataset: Dataset) -> list[Dataset]:
    """
    The parts of a dataset: as many as are worked on at once, of whole groups and at most `PART_SIZE` rows each; a single
    one if it is empty.
    """
    num_groups = math.ceil(len(dataset) / GROUP_SIZE)
    size = min(PART_SIZE, max(1, math.ceil(num_groups / MAX_PROCESSES)) * GROUP_SIZE)
    starts = range(0, max(len(dataset), 1), size)
    return [dataset.select(range(start, min(start + size, len(dataset)))) for start in starts]


def work_on(parts: list[Any], function: Callable[[Any], T], *, num_proc: int | None, desc: str) -> list[T]:
    """
    `function` of each part, in order. A single part is worked on here; several are in other processes, with one
    progress bar.

    Args:
        parts (`list`): what can be pickled; a [`~datasets.Dataset`] is, by the path of its files.
        function (`Callable`): from a part to its result, both cached and small to pickle.
        num_proc (`int`, *optional*): processes; by default one for each core, up to 8.
        desc (`str`): what the progress bar says.

    Raises:
        What `function` raises; `concurrent.futures.process.BrokenProcessPool` if a process is killed.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    num_proc = min(num_proc or min(os.cpu_count() or 1, MAX_PROCESSES), len(parts))
    # Windows starts each process anew.
    context = get_context("fork" if hasattr(os, "fork") else "spawn")
    with ProcessPoolExecutor(num_proc, context, _begin_worker, (os.getpid(),)) as executor:
        outcomes = executor.map(partial(_try, function), parts)
        bar = tqdm(outcomes, desc=desc, total=len(parts), unit="part", disable=datasets.are_progress_bars_disabled())
        results = []
        for result, mistake in bar:
            if mistake is not None:
                raise mistake
            results.append(result)
        return results


def _try(function: Callable[[Any], T], part: Any) -> tuple[T | None, Exception | None]:
    """
    The result of `function`, or the user's mistake that it met: raised here, such an exception would come back with the
    traceback of this process, and pass for a bug (`command_line.is_mistake`).
    """
    try:
        return function(part), None
    except Exception as error:
        if not is_mistake(error):
            raise
        return None, error


def _begin_worker(parent: int) -> None:
    """Makes a worker quiet, and end when its parent is killed: it would wait for work for ever."""
    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


__all__ = ["GROUP_SIZE", "MAX_PROCESSES", "PART_SIZE", "cache_key", "cut", "digest", "work_on"]

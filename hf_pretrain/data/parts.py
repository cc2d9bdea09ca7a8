"""
Work on large data part by part, in worker processes, with a cache entry per part.

A run that is killed does not repeat finished parts. Memory does not grow with the data, since the pages of a part stay
mapped only while it is worked on.
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


# Number of documents that are packed together: enough to fill rows, few enough to hold in memory. The size of a part
# is a multiple of it, so that the rows do not depend on how the data are cut into parts.
GROUP_SIZE = 10_000
PART_SIZE = 100_000
MAX_PROCESSES = 8

T = TypeVar("T")


def digest(*values: object) -> str:
    """Return a digest of values whose `repr` shows all that they are."""
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()


def describe_code(package: Path) -> str:
    """Return a digest of the code that prepares data and of the library versions that it runs with."""
    # Comments count as well: an unneeded preparation costs minutes, an unnoticed change gives wrong rows.
    files = [*sorted((package / "data").glob("*.py")), *sorted((package / "tokenizer").glob("*.py"))]
    versions = [(name, version(name)) for name in ("datasets", "tokenizers", "transformers")]
    return digest([file.read_bytes() for file in files], versions)


# Computed at import, so that an edit of these files during a run does not change its cache keys.
CODE = describe_code(Path(__file__).parent.parent)


def cache_key(*values: object) -> str:
    """Return a cache key for values whose `repr` shows all that they are. Other code gives other keys."""
    return digest(CODE, *values)


def cut_into_parts(dataset: Dataset) -> list[Dataset]:
    """
    Cut a dataset into parts of whole groups, at most `PART_SIZE` rows each and about one per process.

    An empty dataset gives a single empty part.
    """
    # As many parts as processes where the data are small, parts of `PART_SIZE` where they are large.
    num_groups = math.ceil(len(dataset) / GROUP_SIZE)
    size = min(PART_SIZE, max(1, math.ceil(num_groups / MAX_PROCESSES)) * GROUP_SIZE)
    starts = range(0, max(len(dataset), 1), size)
    return [dataset.select(range(start, min(start + size, len(dataset)))) for start in starts]


def map_parts(parts: list[Any], function: Callable[[Any], T], *, num_proc: int | None, desc: str) -> list[T]:
    """
    Apply `function` to each part and return the results in order.

    A single part is worked on in this process, several in worker processes with one progress bar.

    Args:
        parts (`list`): values that can be pickled. A [`~datasets.Dataset`] is pickled as the paths of its files.
        function (`Callable`): maps a part to its result; both should be small to pickle.
        num_proc (`int`, *optional*): number of processes; by default one per core, up to 8.
        desc (`str`): text of the progress bar.

    Raises:
        Whatever `function` raises; `concurrent.futures.process.BrokenProcessPool` if a process is killed.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    num_proc = min(num_proc or min(os.cpu_count() or 1, MAX_PROCESSES), len(parts))
    # A forked process starts at once; Windows can only start a new interpreter.
    context = get_context("fork" if hasattr(os, "fork") else "spawn")
    with ProcessPoolExecutor(num_proc, context, _begin_worker, (os.getpid(),)) as executor:
        outcomes = executor.map(partial(_try, function), parts)
        bar = tqdm(outcomes, desc=desc, total=len(parts), unit="part", disable=datasets.are_progress_bars_disabled())
        results = []
        for result, mistake in bar:
            # Raised here by this package, so that the user gets one line and no traceback.
            if mistake is not None:
                raise mistake
            results.append(result)
        return results


def _try(function: Callable[[Any], T], part: Any) -> tuple[T | None, Exception | None]:
    """
    Return the result of `function`, or the user's mistake that it raised.

    An exception that crosses the process boundary carries the traceback of the worker as text and would pass for a bug
    (`command_line.is_mistake`). Returned as a value, it can be raised again in the main process.
    """
    try:
        return function(part), None
    except Exception as error:
        if not is_mistake(error):
            raise
        return None, error


def _begin_worker(parent: int) -> None:
    """Silence a worker process, and end it when its parent is killed: it would wait for work forever."""
    datasets.disable_progress_bars()
    # NOTE: the threads of `tokenizers` do not survive a fork, and each worker has one core anyway.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def watch() -> None:
        # An orphan gets another parent. Python has no portable signal for it.
        while os.getppid() == parent:
            time.sleep(1)
        # `sys.exit` in a thread would end the thread alone.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


__all__ = ["GROUP_SIZE", "MAX_PROCESSES", "PART_SIZE", "cache_key", "cut_into_parts", "digest", "map_parts"]

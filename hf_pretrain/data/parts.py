"""
Work on large data part by part, in worker processes, with a cache entry per part.

After a kill, a new run does not repeat finished parts. Memory does not grow with the data, because the pages of a part
stay mapped only while a process works on it.
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

from ..runtime.activity import announce, progress
from ..runtime.errors import UserError


# Number of documents to pack together: enough to fill rows, few enough to hold in memory. The size of a part is a
# multiple of it, so that the rows do not depend on the cuts between parts.
GROUP_SIZE = 10_000
PART_SIZE = 100_000
MAX_PROCESSES = 8

T = TypeVar("T")
T_part = TypeVar("T_part")


def digest(*values: object) -> str:
    """Return a digest of values. Their `repr` must show everything that distinguishes them."""
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()


def describe_code(package: Path) -> str:
    """Return a digest of the code that prepares data and of the library versions that it runs with."""
    # A changed comment also changes the digest: to prepare data again costs minutes, to miss a change of the code
    # gives wrong rows.
    files = [*sorted((package / "data").glob("*.py")), *sorted((package / "tokenizer").glob("*.py"))]
    versions = [(name, version(name)) for name in ("datasets", "tokenizers", "transformers")]
    return digest([file.read_bytes() for file in files], versions)


# Computed at import, so that an edit of these files during a run does not change its cache keys.
CODE = describe_code(Path(__file__).parent.parent)


def cache_key(*values: object) -> str:
    """Return a cache key for values, as [`digest`] takes them. The key also changes with the code of this package."""
    return digest(CODE, *values)


def cut_into_parts(dataset: Dataset) -> list[Dataset]:
    """
    Cut a dataset into parts of whole groups, at most `PART_SIZE` rows each and about one per process.

    An empty dataset gives a single empty part.
    """
    # Small data give about one part per process, large data give parts of `PART_SIZE`.
    num_groups = math.ceil(len(dataset) / GROUP_SIZE)
    size = min(PART_SIZE, max(1, math.ceil(num_groups / MAX_PROCESSES)) * GROUP_SIZE)
    starts = range(0, max(len(dataset), 1), size)
    return [dataset.select(range(start, min(start + size, len(dataset)))) for start in starts]


def is_cached(dataset: Dataset, *keys: str) -> bool:
    """Return whether `datasets` has the results of `map` or `filter` with these fingerprints in its cache."""
    files = dataset.cache_files
    if not datasets.is_caching_enabled() or not files:
        return False
    # NOTE: `datasets` names the file after the fingerprint, and puts it beside the first file of the dataset.
    return all(Path(files[0]["filename"]).with_name(f"cache-{key}.arrow").exists() for key in keys)


def map_parts(
    parts: list[T_part],
    function: Callable[[T_part], T],
    *,
    num_proc: int | None,
    desc: str,
    finds_result: Callable[[T_part], bool] = lambda part: False,
) -> list[T]:
    """
    Apply `function` to each part and return the results in order.

    This process works on a single part itself, and on a few parts whose results are in the cache. Otherwise, the parts
    go to worker processes.

    Args:
        parts (`list`): values that can be pickled. A [`~datasets.Dataset`] is pickled as the paths of its files.
        function (`Callable`): maps a part to its result; both should be small to pickle.
        num_proc (`int`, *optional*): number of processes; by default one per core, up to 8.
        desc (`str`): the work as a participle, for the display ([`~runtime.activity`]).
        finds_result (`Callable`, *optional*): returns whether `function` finds the result of a part in the cache.

    Raises:
        The error that `function` raises; `concurrent.futures.process.BrokenProcessPool` if a process is killed.
    """
    # To start processes takes longer than to open a few cached results. The results of many parts are opened by
    # workers, because the pages that are read stay mapped.
    if len(parts) == 1 or (len(parts) <= MAX_PROCESSES and all(map(finds_result, parts))):
        announce(desc)
        return [function(part) for part in parts]
    num_proc = min(num_proc or min(os.cpu_count() or 1, MAX_PROCESSES), len(parts))
    # A forked process starts at once; Windows can only start a new interpreter.
    context = get_context("fork" if hasattr(os, "fork") else "spawn")
    with (
        progress(desc, len(parts)) as bar,
        ProcessPoolExecutor(num_proc, context, _begin_worker, (os.getpid(),)) as executor,
    ):
        outcomes = executor.map(partial(_try, function), parts)
        results = []
        for result, mistake in outcomes:
            # Raise the mistake here, in this package and this process: the user then sees one line and no traceback.
            if mistake is not None:
                raise mistake
            results.append(result)
            bar.update()
        return results


def _try(function: Callable[[Any], T], part: Any) -> tuple[T | None, Exception | None]:
    """
    Return the result of `function`, or the user's mistake that it raised.

    The main process can raise a returned exception again, without the traceback of the worker in its text.
    """
    try:
        return function(part), None
    except UserError as error:
        return None, error


def _begin_worker(parent: int) -> None:
    """Silence a worker process, and end it when its parent is killed; otherwise it would wait for work forever."""
    datasets.disable_progress_bars()
    # NOTE: the threads of `tokenizers` do not survive a fork, and each worker has one core anyway.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def watch() -> None:
        # The operating system gives an orphan another parent. No portable signal reports that, so poll.
        while os.getppid() == parent:
            time.sleep(1)
        # `sys.exit` in a thread would end only that thread.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


__all__ = [
    "GROUP_SIZE",
    "MAX_PROCESSES",
    "PART_SIZE",
    "cache_key",
    "cut_into_parts",
    "digest",
    "is_cached",
    "map_parts",
]

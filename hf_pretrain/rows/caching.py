"""Keys of the cache of prepared data, and the number of processes that prepare them."""

import hashlib
import math
import os
import sys
import threading
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedTokenizerFast


# Number of documents to pack together: enough to fill rows, few enough to hold in memory.
GROUP_SIZE = 10_000
MAX_PROCESSES = 8


def digest(*values: object) -> str:
    """Return a digest of values. Their `repr` must show everything that distinguishes them."""
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()


# Digest of the code that prepares data and of the versions of its libraries. A changed comment also changes it: to
# prepare data again costs minutes, to miss a change of the code gives wrong rows. It is computed at import, so that an
# edit of these files during a run does not change its cache keys.
_FOLDERS = [Path(__file__).parents[1] / name for name in ("data", "rows", "tokenizer")]
_FILES = [path for folder in _FOLDERS for path in sorted(folder.glob("*.py"))]
_VERSIONS = [(name, version(name)) for name in ("datasets", "tokenizers", "transformers")]
CODE = digest([path.read_bytes() for path in _FILES], _VERSIONS)


def cache_key(*values: object) -> str:
    """
    Return a cache key for values, as [`digest`] takes them. The key also changes with the code of this package.

    NOTE: `datasets` would hash pickled functions, and that hash does not show changes in the functions that they call.
    """
    return digest(CODE, *values)


def encoding_key(tokenizer: PreTrainedTokenizerFast, *values: object) -> str:
    """
    Return a digest of a tokenizer and of the other values that decide which tokens a document gets.

    NOTE: `datasets` would hash the pickled tokenizer, whose state depends on earlier calls, and miss its cache.
    """
    # The backend's JSON does not name bos and eos, which documents and chat templates contain.
    return digest(tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, *values)


def count_processes(num_rows: int, num_proc: int | None) -> int | None:
    """Return the number of processes for `num_proc` of `map`: one per group, and by default one per core, up to 8."""
    num_processes = min(num_proc or min(os.cpu_count() or 1, MAX_PROCESSES), math.ceil(num_rows / GROUP_SIZE))
    if num_processes <= 1:
        return None
    # NOTE: the threads of `tokenizers` do not survive a fork, and each process has one core anyway.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.platform != "win32":
        _end_workers_with_this_process()
    return num_processes


@cache
def _end_workers_with_this_process() -> None:
    """
    Let forked processes end when this one is killed.

    NOTE: the workers of `datasets`, and the process that holds their queue, would wait for work forever.
    """

    parents: list[int] = []

    def watch(parent: int) -> None:
        # The operating system gives an orphan another parent. No portable signal reports that, so poll.
        while os.getppid() == parent:
            time.sleep(1)
        # `sys.exit` in a thread would end only that thread.
        os._exit(1)

    os.register_at_fork(
        # Before the fork: the parent may be killed before its child asks for it.
        before=lambda: parents.append(os.getpid()),
        # A child that forks itself adds to its own copy of the list.
        after_in_child=lambda: threading.Thread(target=watch, args=(parents[-1],), daemon=True).start(),
    )

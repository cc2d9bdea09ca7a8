"""Let the first process of each machine work while the others wait, without a time limit."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from transformers.utils import logging

from .errors import UserError


logger = logging.get_logger(__name__)

# Seconds between two polls of a waiting process, and between two lines that tell the user about it.
POLL_SECONDS = 0.2
TELL_SECONDS = 60.0
_DONE, _FAILED = b"done", b"failed"
# All ranks enter the blocks in the same order, so equal numbers name the same block on every rank.
_numbers = count()


@contextmanager
def first_process_first(rank: int, local_rank: int, *, desc: str) -> Iterator[None]:
    """
    Run the block in the first process of this machine, then in the others. All ranks must call this function.

    NOTE: `main_process_first` of transformers waits in a collective, which fails after `--ddp_timeout`.

    Args:
        rank (`int`): the number of this process among all.
        local_rank (`int`): the number of this process on its machine.
        desc (`str`): the work of the first process as a participle, such as `preparing the data`. The others print it
            every minute.

    Raises:
        `ValueError`: on the waiting processes, if the first process failed or died.
    """
    # The rank of this machine's first process: ranks are numbered machine by machine.
    first = rank - local_rank
    # torchrun keeps one store across its restarts, with the keys of earlier attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"first_process_first/{attempt}/{first}/{next(_numbers)}"
    store = _get_default_store()
    if rank != first:
        _wait(store, key, first, desc)
        yield
        return
    # With the id, the others notice if this process dies.
    store.set(f"{key}/pid", str(os.getpid()))
    outcome = _FAILED
    try:
        yield
        outcome = _DONE
    finally:
        store.set(key, outcome)


def _wait(store: dist.Store, key: str, first: int, desc: str) -> None:
    """Wait until the first process has finished; raise `ValueError` if it failed or died."""
    begin = told = time.monotonic()
    was_seen = False
    while (outcome := _read(store, key, first, desc)) is None:
        time.sleep(POLL_SECONDS)
        pid = _read(store, f"{key}/pid", first, desc)
        # In another container, the id may name no process that is visible here. So only a process that was visible
        # before counts as dead.
        is_there = pid is not None and psutil.pid_exists(int(pid))
        # Read the outcome once more: the process may have finished and ended since the last read.
        if was_seen and not is_there and _read(store, key, first, desc) is None:
            raise UserError(f"Rank {first} died while it was {desc}. Start again; finished parts are kept.")
        was_seen = is_there
        # One line per minute, so that a long preparation does not look like a hang.
        if time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            logger.warning(f"Waiting for rank {first}, which has been {desc} for {(told - begin) / 60:.0f} minutes.")
    if outcome == _FAILED:
        raise UserError(f"Rank {first} failed while it was {desc}. See the message of that rank.")


def _read(store: dist.Store, key: str, first: int, desc: str) -> bytes | None:
    """Return the value of a key, or `None` if it has none yet, without blocking."""
    try:
        return store.get(key) if store.check([key]) else None
    except RuntimeError as error:
        # The process that held the store has ended.
        raise UserError(f"Rank {first} cannot be reached any more. It was {desc} ({error}).") from error


__all__ = ["first_process_first"]

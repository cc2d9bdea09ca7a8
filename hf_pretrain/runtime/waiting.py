"""The main process of each machine works first, and the others wait for it however long that takes."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from transformers.utils import logging


logger = logging.get_logger(__name__)

POLL_SECONDS = 0.2
TELL_SECONDS = 60.0
_DONE, _FAILED = b"done", b"failed"
_numbers = count()


@contextmanager
def first_process_first(rank: int, local_rank: int, *, desc: str) -> Iterator[None]:
    """
    Lets the first process of this machine through, and the others once it has left the block. All call it alike.

    NOTE: transformers' own `main_process_first` waits in a collective, which gives up after `--ddp_timeout`.

    Args:
        desc (`str`): what the first process does, for the line that the others print each minute.

    Raises:
        `ValueError`: on those that wait, if the first process failed or died.
    """
    first = rank - local_rank
    # torchrun keeps one store over its restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"first_process_first/{attempt}/{first}/{next(_numbers)}"
    store = _get_default_store()
    if rank != first:
        _wait(store, key, first, desc)
        yield
        return
    store.set(f"{key}/pid", str(os.getpid()))
    outcome = _FAILED
    try:
        yield
        outcome = _DONE
    finally:
        store.set(key, outcome)


def _wait(store: dist.Store, key: str, first: int, desc: str) -> None:
    begin = told = time.monotonic()
    was_seen = False
    while (outcome := _read(store, key, first, desc)) is None:
        time.sleep(POLL_SECONDS)
        pid = _read(store, f"{key}/pid", first, desc)
        # In another container the process may have a number that means nothing here.
        is_there = pid is not None and psutil.pid_exists(int(pid))
        if was_seen and not is_there and _read(store, key, first, desc) is None:
            raise ValueError(f"Rank {first} died while it was {desc}. Start again; what it finished is kept.")
        was_seen = is_there
        if time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            logger.warning(f"Waiting for rank {first}, which has been {desc} for {(told - begin) / 60:.0f} minutes.")
    if outcome == _FAILED:
        raise ValueError(f"Rank {first} failed while it was {desc}. Its own message says why.")


def _read(store: dist.Store, key: str, first: int, desc: str) -> bytes | None:
    """What stands in the store, without waiting for it."""
    try:
        return store.get(key) if store.check([key]) else None
    except RuntimeError as error:
        # The store is gone with the process that held it.
        raise ValueError(f"Rank {first} cannot be reached any more, which was {desc} ({error}).") from error


__all__ = ["first_process_first"]

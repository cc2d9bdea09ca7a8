"""Faster imports of large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """
    Pause the garbage collector while modules are imported, and exempt what they created from later collections.

    torch and transformers create about a million objects that live until the process ends. The collector would search
    all of them again and again: a quarter of the time until a run begins.
    """
    was_enabled = gc.isenabled()
    # Only objects that are still in use are exempted.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()

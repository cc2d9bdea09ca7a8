"""Faster imports of large libraries, and settings that they read only when they are imported."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import Any

from .help_cache import STARTED_AS


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


def hide_interrupts() -> None:
    """
    Print no traceback after Ctrl-C if `hf-pretrain` has started this process, and end it by SIGINT. Call this before
    slow imports, in which Ctrl-C may come as well.
    """
    if STARTED_AS not in os.environ:
        return
    show_error, is_interrupted = sys.excepthook, False

    def show_other_errors(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = issubclass(kind, KeyboardInterrupt)
        if not is_interrupted:
            show_error(kind, error, traceback)

    def end() -> None:
        if is_interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    sys.excepthook = show_other_errors
    # NOTE: Python does so itself, unless a library executes code while the interpreter ends, as `torch._dynamo` does;
    # then the exit status is 1. The function that is registered first runs last.
    atexit.register(end)


def limit_spinning() -> None:
    """
    Let idle threads of an operator on the CPU sleep soon, unless the user set `OMP_WAIT_POLICY` or
    `GOMP_SPINCOUNT`. Call this before torch is imported.

    NOTE: GNU OpenMP's threads wait for the others in a loop of 300,000 turns by default, which takes the cores from
    other processes. On two cores, three runs of the preset `tiny` at once trained at 360 to 2,110 tokens per second
    with the default, and at 1,780 to 2,250 with 10,000 turns. A run alone trains as fast with both (7,550 tokens per
    second). Threads that sleep at once (`OMP_WAIT_POLICY=passive`) cost it 15%.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


@contextmanager
def scipy_deferred() -> Iterator[None]:
    """
    Let the modules that are imported within the block import `linear_sum_assignment` of scipy on its first call.

    NOTE: where scipy is installed, transformers imports it with every model, for the losses of object detection. This
    takes a quarter of a second.
    """
    name = "scipy.optimize"
    spec = None if name in sys.modules or find_spec("scipy") is None else find_spec(name)
    if spec is None:
        yield
        return
    stand_in = ModuleType(name)

    def remove() -> None:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]

    def import_real_module(attribute: str) -> Any:
        # Python's import system asks for names such as `__file__`.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        # Any other name comes from the real module, which replaces the stand-in.
        remove()
        return getattr(import_module(name), attribute)

    # With a path, submodules can be imported.
    own = {"__path__": spec.submodule_search_locations, "__getattr__": import_real_module}
    vars(stand_in).update(own, linear_sum_assignment=_linear_sum_assignment)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        remove()


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(*args, **kwargs)

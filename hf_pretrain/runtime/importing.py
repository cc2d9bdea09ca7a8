"""Faster imports of large libraries."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


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

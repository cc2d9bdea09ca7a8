"""Objects that a module names by a string and does not import, so that a run loads only the parts that it uses."""

from pkgutil import resolve_name
from typing import Any


def load_named(name: str) -> Any:
    """Import and return the object that a name says, such as `hf_pretrain.hub.pushing:push_folder`."""
    return resolve_name(name)

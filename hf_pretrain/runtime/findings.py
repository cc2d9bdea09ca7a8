"""The result of a check of `hf-pretrain doctor`."""

from dataclasses import dataclass


OK, NOTE, BAD = "ok", "note", "bad"


@dataclass
class Finding:
    """
    The result of a check.

    Args:
        name (`str`): what was checked.
        status (`str`): `ok`; `note` for something that limits what this machine can do; `bad` for a defect.
        message (`str`): what was found.
        advice (`str`): what to do about it; empty if nothing.
    """

    name: str
    status: str
    message: str
    advice: str = ""


__all__ = ["BAD", "NOTE", "OK", "Finding"]

"""Read JSON files."""

import json
from pathlib import Path
from typing import Any

from .errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise `UserError` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a JSON file that can be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return content

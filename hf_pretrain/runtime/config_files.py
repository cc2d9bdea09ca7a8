"""Read the YAML files of `--config`."""

from pathlib import Path
from typing import Any

import yaml

from .errors import UserError


class ConfigLoader(yaml.SafeLoader):
    """YAML loader that refuses a key that stands twice. PyYAML silently takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_config(path: str | Path) -> dict[str, Any]:
    """
    Return the keys and values of a YAML file. Its key `extends` may name another file, relative to this one, whose
    values are the defaults.

    Raises:
        `UserError`: if a file cannot be read, is not YAML, or holds no mapping.
    """
    path = Path(path)
    try:
        # PyYAML recognises UTF-16 in bytes.
        content = yaml.load(path.read_bytes(), Loader=ConfigLoader)
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}. Name a YAML file.") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must hold `key: value` lines, such as `learning_rate: 1e-3`.")
    parent = content.pop("extends", None)
    return content if parent is None else read_config(path.parent / parent) | content

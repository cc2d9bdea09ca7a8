"""
Checkpoint directories on disk: the manifest that makes damage visible, and functions that find, verify and rotate
checkpoints. `training` writes them.
"""

from .directory import find_newest_run, newest_checkpoint
from .manifest import find_damage, read_manifest, write_manifest


__all__ = ["find_damage", "find_newest_run", "newest_checkpoint", "read_manifest", "write_manifest"]

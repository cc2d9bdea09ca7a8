"""
Checkpoints on disk: the manifest that makes damage visible, functions that find, verify and rotate checkpoints, and
the writer that gives them their names once they are complete. `training` decides when to write.
"""

from .directory import find_newest_run, newest_checkpoint
from .manifest import find_damage, read_manifest, write_manifest
from .writer import CheckpointWriter


__all__ = [
    "CheckpointWriter",
    "find_damage",
    "find_newest_run",
    "newest_checkpoint",
    "read_manifest",
    "write_manifest",
]

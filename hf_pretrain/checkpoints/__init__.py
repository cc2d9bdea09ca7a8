"""
Checkpoints on disk: a manifest that shows damage, functions that find, verify and rotate checkpoints, and a writer
that gives a checkpoint its name only once it is complete. `training` decides when to write.
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

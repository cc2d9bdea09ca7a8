"""Remove the locks that killed processes leave in the directories where torch builds DeepSpeed's kernels."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from transformers.utils import logging

from .processes import num_local_processes


logger = logging.get_logger(__name__)


def remove_stale_build_locks() -> None:
    """
    Remove the lock files that killed runs of this user left in torch's build directories.

    NOTE: torch builds DeepSpeed's kernels under a lock file, and waits without a limit until the file is gone. The
    process that builds keeps the file open, so a lock file that no process has open is stale. The first process of the
    run checks this before the other processes can start a build. A run on several machines leaves all lock files
    alone, because it cannot see builds on other machines that share the directory.
    """
    # The import takes half a second, and only runs under DeepSpeed need it.
    from torch.utils.cpp_extension import get_default_build_root

    is_one_machine = int(os.environ.get("WORLD_SIZE", 1)) == num_local_processes()
    if sys.platform != "linux" or os.environ.get("LOCAL_RANK", "0") != "0" or not is_one_machine:
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    # The directory of a kernel lies in a directory for the Python and CUDA version, or in TORCH_EXTENSIONS_DIR itself.
    locks = [path for pattern in ("*/lock", "*/*/lock") for path in root.glob(pattern)]
    mine = []
    for path in locks:
        # A build that ends now removes its lock.
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                mine.append(path)
    if not mine:
        return
    held: set[Path] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            held |= {Path(file.path) for file in process.open_files()}
    for path in mine:
        if path.resolve() not in held:
            path.unlink(missing_ok=True)
            logger.warning(f"Removed {path}, which a killed run left while it built a kernel of DeepSpeed.")


__all__ = ["remove_stale_build_locks"]

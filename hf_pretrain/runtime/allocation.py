"""Let the memory allocator keep freed blocks between steps."""

import ctypes
import os
import platform


# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
# With one of these, the user has configured the same parameters.
_VARIABLES = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
# The heap grows by this many bytes at once. Pages that are never touched take no memory.
_TOP_PAD_BYTES = 256 << 20


def keep_freed_blocks() -> None:
    """
    Let glibc keep freed memory in the process. A training step on a CPU is then up to 1.2 times as fast.

    By default, glibc returns large blocks to the system as soon as they are freed. The next step gets them back page
    by page, each after a page fault, and the system fills each page with zeros. Do nothing without glibc, and if the
    environment configures the allocator.
    """
    if any(name in os.environ for name in _VARIABLES) or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    # Give large blocks a place in the heap instead of a mapping of their own, and never shrink the heap.
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
    libc.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)

"""A rank watches its launcher."""

import subprocess
import sys

import pytest

from tests.toys import needs_posix


# The process that is started dies, so another process adopts its child, a rank, before the watch begins.
ORPHAN = """
import os, sys, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
from hf_pretrain.runtime.signals import watch_launcher
watch_launcher("torchrun")
time.sleep(500)
print("The rank went on.")
"""


@pytest.mark.slow
@needs_posix
def test_a_rank_whose_launcher_is_gone_before_the_watch_begins_ends():
    # The rank holds the pipe, so this waits for its end.
    result = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=400)
    assert "The launcher (torchrun) is gone. This rank stops" in result.stderr and not result.stdout

"""The share of its time that a process waits for a core."""

import subprocess
import sys

import pytest


# A process and `num_others` others on one core.
SHARE_ONE_CORE = """
import os, subprocess, sys, time
from hf_pretrain.runtime.core_waits import CoreWaits

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
loop = "import time; end = time.monotonic() + 60\\nwhile time.monotonic() < end: pass"
others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(int(sys.argv[1]))]
waits, end = CoreWaits(), time.monotonic() + 3
while time.monotonic() < end:
    pass
print(waits.measure())
for other in others:
    other.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the waits")
def test_a_process_waits_for_the_core_that_others_use():
    """Three processes share the core. Processes of other tests may take a part, too, and only raise the share."""
    command = [sys.executable, "-c", SHARE_ONE_CORE, "2"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 0.5 < float(output.splitlines()[-1]) < 1

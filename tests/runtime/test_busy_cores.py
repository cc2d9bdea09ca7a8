"""Other processes that take the cores from a run."""

import os
import subprocess
import sys
import time

import pytest

from hf_pretrain.runtime.busy_cores import OtherProcesses, share_of_others


def test_idle_cores_are_taken_by_nobody():
    # Two cores for ten seconds: the run used 6 core seconds and others 10, and then 4 were idle.
    assert share_of_others(20, 0, 6) == pytest.approx(0.7)
    assert share_of_others(20, 1, 6) == pytest.approx(0.65)
    assert share_of_others(20, 4, 6) == 0
    # The clocks of processes are coarser than that of the machine.
    assert share_of_others(20, 0, 20.1) == 0 and share_of_others(0, 0, 0) == share_of_others(0.4, 0, 0) == 0


def test_busy_processes_are_seen():
    def spin(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    # Their parent exits at once, so that they are no children of this process.
    code = "import os\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\nwhile 1: pass"
    pids = []
    try:
        for _ in range(2 * (os.cpu_count() or 1)):
            with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
                pids.append(int(parent.stdout.readline()))
        others = OtherProcesses()
        spin(2)
        assert others.measure() > 0.3
    finally:
        for pid in pids:
            os.kill(pid, 9)

"""The cores that other programs use, and the choice of the number of threads."""

import re
import subprocess
import sys

import pytest
import torch

from hf_pretrain.runtime import cores


# A process that may use one core, on which another one is busy.
SHARE_ONE_CORE = """
import os, subprocess, sys, time
import torch
from hf_pretrain.runtime.cores import CoreLoad, choose_threads

os.environ.pop("OMP_NUM_THREADS", None)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
load, end = CoreLoad(), time.monotonic() + 1
while time.monotonic() < end:
    pass
print(load.measure())
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
time.sleep(0.5)
torch.set_num_threads(2)
print(choose_threads())
print(torch.get_num_threads())
other.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds a process to a core")
def test_a_busy_core_gets_no_thread():
    """Processes of other tests may use the core, too."""
    command = [sys.executable, "-c", SHARE_ONE_CORE]
    quiet, choice, threads = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    # The core was busy, but the process itself used it as far as others left it.
    assert float(quiet) < 0.95
    assert re.fullmatch(r"1 of 2 threads, because other programs use (0\.[5-9]|1\.0) of 1 cores", choice)
    assert threads == "1"


@pytest.mark.parametrize(("others", "free"), [(0.0, 4), (0.4, 4), (1.2, 3), (9.0, 1)])
def test_the_cores_that_others_leave(monkeypatch, others, free):
    monkeypatch.setattr(cores, "num_cores", lambda: 4)
    assert cores.free_cores(others) == free


def test_the_number_of_a_user_wins_and_a_resumed_run_keeps_its_own(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        # The tests run with OMP_NUM_THREADS=1.
        assert cores.choose_threads(kept=2) == "" and torch.get_num_threads() == 3
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert cores.choose_threads(kept=2) == "2 of 3 threads, as before" and torch.get_num_threads() == 2
        # A machine with fewer cores than the first one.
        assert cores.choose_threads(kept=8) == "" and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

"""A run on a CPU starts one thread per core that other programs leave free."""

import re
import subprocess
import sys

import pytest
import torch

from hf_pretrain.runtime import cpu


# A process that may use one core, on which another one is busy.
SHARE_ONE_CORE = """
import os, subprocess, sys
import torch
from hf_pretrain.runtime.cpu import choose_threads

os.environ.pop("OMP_NUM_THREADS", None)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
torch.set_num_threads(2)
print(choose_threads())
print(torch.get_num_threads())
other.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds a process to a core")
def test_a_busy_core_gets_no_thread():
    command = [sys.executable, "-c", SHARE_ONE_CORE]
    choice, threads = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.fullmatch(r"1 of 2 threads, because other programs use (0\.[5-9]|1\.0) of 1 cores", choice)
    assert threads == "1"


def test_the_number_of_a_user_wins_and_a_resumed_run_keeps_its_own(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        # The tests run with OMP_NUM_THREADS=1.
        assert cpu.choose_threads(kept=2) == "" and torch.get_num_threads() == 3
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setattr(cpu, "_measure_load", lambda: (1.2, 2))
        assert cpu.choose_threads().startswith("1 of 3 threads, because") and torch.get_num_threads() == 1
        torch.set_num_threads(3)
        assert cpu.choose_threads(kept=2) == "2 of 3 threads, as before" and torch.get_num_threads() == 2
        # A machine with fewer cores than the first one.
        assert cpu.choose_threads(kept=8) == "" and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

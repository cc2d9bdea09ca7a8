"""What the first process of a machine makes for the others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.invariants.launching import ROOT


# Each of two ranks writes what it got in each case, and how often it made something itself.
RANK = """
import json, socket, sys, time
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
from hf_pretrain.runtime.ranks import made_once_per_machine

store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
store.set_timeout(timedelta(seconds=300))
# On a busy machine, one process imports torch long before the other.
store.set(f"ready {rank}", "")
store.wait(["ready 0", "ready 1"])
dist.init_process_group("gloo", store=store, world_size=2, rank=rank, timeout=timedelta(seconds=8))

def try_case(case):
    args, calls = SimpleNamespace(world_size=2, local_process_index=0 if case == "two machines" else rank), []
    socket.gethostname = lambda: f"host {rank}" if "machines" in case else "host"

    def make():
        calls.append(rank)
        # Longer than the collectives of the run may take.
        time.sleep(10 if case == "slow" else 0)
        if case == "failure":
            raise ValueError(f"rank {rank} failed")
        return f"rank {rank}"

    try:
        return made_once_per_machine(args, make, is_shared=case != "stream"), len(calls)
    except ValueError as error:
        return str(error), len(calls)

cases = ("one machine", "slow", "two machines", "no first process on two machines", "stream", "failure")
print(json.dumps({case: try_case(case) for case in cases}))
dist.barrier()
"""


@pytest.mark.slow
def test_the_first_process_of_each_machine_makes_it(tmp_path: Path):
    words = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    processes = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True, cwd=ROOT) for rank in (0, 1)]
    first, second = (json.loads(process.communicate(timeout=500)[0].splitlines()[-1]) for process in processes)
    shared = {case: ["rank 0", 1] for case in ("one machine", "slow")}
    alone = dict.fromkeys(["two machines", "no first process on two machines", "stream"], ["rank 0", 1])
    assert first == {**shared, **alone, "failure": ["rank 0 failed", 1]}
    # On the same machine, the second rank makes nothing.
    shared = {case: ["rank 0", 0] for case in shared}
    assert second == {**shared, **dict.fromkeys(alone, ["rank 1", 1]), "failure": ["rank 1 failed", 1]}

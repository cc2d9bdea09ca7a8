"""The table of `make parallel`: one toy under every launcher and kind of parallelism."""

import json
import subprocess
import sys

import pytest

from benchmarks.parallel import WAYS
from tests.invariants.launching import ROOT, cpu_environment


@pytest.mark.slow
@pytest.mark.distributed
def test_all_kinds_of_parallelism_equal_one_process(tmp_path):
    path = tmp_path / "parallel.json"
    command = [sys.executable, "-m", "benchmarks.parallel", "--output", str(path)]
    result = subprocess.run(command, cwd=ROOT, env=cpu_environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    assert list(rows) == list(WAYS)
    for name, row in rows.items():
        assert row["loss_difference"] < 1e-5 and row["weight_difference"] < 1e-5, row
        assert (row["sent_bytes"] > 0) == (row["num_processes"] > 1), row
        assert f"\n{name} " in result.stdout
    # Losses that do not change would be equal everywhere.
    losses = rows["python"]["losses"]
    assert len(losses) == 6 and losses[0] - losses[-1] > 0.01
    held = {name: row["held_bytes"] for name, row in rows.items()}
    assert held["FSDP2"] < held["DDP"] and held["PP, 1F1B"] < held["python, 4 micro-batches"]

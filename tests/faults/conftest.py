"""
Reference runs for every fault test, and the table of survived faults.

`FAULTS_JSON=faults.json` writes the table to a file, and `N=300` sets the number of kills at random moments.
"""

import hashlib
import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from filelock import FileLock

from tests.faults.driving import STEPS, command, final_bits, make_workspace, run


@pytest.fixture(scope="session")
def workspace(tmp_path_factory, worker_id):
    """Return one directory for all workers of pytest-xdist, so that each reference run trains only once."""
    base = tmp_path_factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / "faults"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.mkdir()
            make_workspace(path)
    return path


@pytest.fixture(scope="session")
def reference(workspace):
    """Return a function from a launcher and arguments to the output directory of an undisturbed run."""

    def get(launcher: str = "python", *arguments: str) -> Path:
        key = hashlib.sha256(repr((launcher, *arguments)).encode()).hexdigest()[:16]
        output_dir = workspace / f"reference-{key}"
        with FileLock(f"{output_dir}.lock"):
            if not output_dir.exists():
                words = command(workspace, output_dir, "--save_total_limit", "9", *arguments, launcher=launcher)
                result = run(words)
                assert result.returncode == 0, result.stdout[-4000:]
        return output_dir

    return get


@pytest.fixture
def record(request):
    """Return a function that counts the trials of a fault, and how many of them the run survived."""

    def add(fault: str, survived: bool, trials: int = 1) -> None:
        request.node.user_properties.append(("fault", [fault, survived, trials]))

    return add


@pytest.fixture
def ends_like(workspace, reference, record):
    """
    Return a function that resumes the run in a directory, checks that it ends with the same bits as the reference
    run, including checkpoint and log, and returns the output of the run.
    """

    def check(fault: str, output_dir: Path, launcher: str = "python", *arguments: str, trials: int = 1) -> str:
        words = command(workspace, output_dir, "--save_total_limit", "9", *arguments, launcher=launcher)
        result = run([*words, "--resume_from_checkpoint", "auto"])
        expected = final_bits(reference(launcher, *arguments))
        survived = result.returncode == 0 and final_bits(output_dir) == expected
        survived &= max(path.name for path in output_dir.glob("checkpoint-*")) == f"checkpoint-{STEPS}"
        record(fault, survived, trials)
        assert survived, result.stdout[-4000:]
        assert not list(output_dir.glob(".saving*"))
        return result.stdout

    return check


def pytest_terminal_summary(terminalreporter):
    table: dict[str, dict[str, int]] = defaultdict(lambda: {"trials": 0, "survived": 0, "lost": 0})
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    for report in reports:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "fault":
                fault, survived, trials = value
                table[fault]["trials"] += trials
                table[fault]["survived" if survived else "lost"] += trials
    if not table:
        return
    width = max(map(len, table))
    terminalreporter.write_line(f"{'fault':{width}}  trials  survived  lost")
    for fault, counts in sorted(table.items()):
        terminalreporter.write_line(
            f"{fault:{width}}  {counts['trials']:6}  {counts['survived']:8}  {counts['lost']:4}"
        )
    if "FAULTS_JSON" in os.environ:
        Path(os.environ["FAULTS_JSON"]).write_text(
            json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )

"""A run whose output cannot be written: its reader has gone, its terminal is closed, its disk is full."""

import fcntl
import os
import pty
import shlex
import signal
import subprocess
import termios

import psutil
import pytest

from tests.faults.driving import command, kill_all, mostly_faults, ranks
from tests.invariants.launching import process_options


pytestmark = [pytest.mark.slow, pytest.mark.distributed]


# Launcher, signal and status.
STOPS = [("python", signal.SIGINT, 130), ("torchrun", signal.SIGINT, 1), ("python", signal.SIGHUP, 129)]


@pytest.mark.parametrize("case", mostly_faults([*STOPS, ("deepspeed", signal.SIGINT, -signal.SIGINT)], *STOPS))
def test_a_run_that_is_stopped_without_output_saves_a_checkpoint(case, workspace, tmp_path):
    """
    Ctrl-C ends the tee of `2>&1 | tee run.log` before the run. A terminal that is closed sends SIGHUP, and fails each
    write with another error.
    """
    launcher, number, status = case
    output_dir, options = tmp_path / "run", process_options()
    if number == signal.SIGHUP:
        terminal, slave = pty.openpty()
        options |= dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        options["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    arguments = ["--max_steps", "20000", "--save_steps", "20000"]
    words = command(workspace, output_dir, *arguments, launcher=launcher)
    process = subprocess.Popen(words, start_new_session=True, **options)
    try:
        output = process.stdout
        if output is None:
            os.close(slave)
            output = os.fdopen(terminal)
        assert any("step 2/" in line for line in output)
        output.close()
        started = ranks(process)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        assert process.wait(timeout=400) == status
        # The runner of deepspeed ends before its ranks.
        psutil.wait_procs(started, timeout=400)
    finally:
        kill_all([*ranks(process), process])
    assert list(output_dir.glob("checkpoint-*"))
    assert "stopped" in (output_dir / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("launcher", mostly_faults(["python", "torchrun"], "python"))
@pytest.mark.parametrize("streams", [">/dev/full 2>&1", ">&- 2>&-"])
def test_a_run_that_nobody_reads_ends_as_usual(launcher, streams, workspace, tmp_path):
    words = command(workspace, tmp_path / "run", launcher=launcher)
    line = f"exec {shlex.join(words)} {streams}"
    assert subprocess.run(["sh", "-c", line], timeout=300, **process_options()).returncode == 0
    assert (tmp_path / "run/model.safetensors").is_file()

"""Signals, dying ranks and hanging ranks, under the real launchers."""

import html
import json
import os
import re
import signal
import time
from contextlib import suppress

import psutil
import pytest

from hf_pretrain.checkpoints.manifest import find_damage
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.writing import LOCK_NAME, release_lock, take_lock
from tests.faults.driving import (
    Stopwatch,
    command,
    final_bits,
    mostly_faults,
    ranks,
    run,
    run_poisoned,
    start,
    steps_of,
    wait_for,
    zero,
)
from tests.toys import write_jsonl


LONG = ["--max_steps", "20000", "--save_steps", "20"]
FLAGS = {"torchrun": [], "deepspeed": zero(2), "accelerate:ddp": ["--use_cpu"]}

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture
def harm(workspace, tmp_path):
    """
    Return a function that starts a run, applies an action to it and its ranks after its first checkpoint, and waits.
    The function returns the launcher's status, the output, the seconds of a [`Stopwatch`] and the checkpoints.
    """

    def act(action, launcher: str, *arguments: str):
        output_dir = tmp_path / "run"
        watch = Stopwatch()
        with start(command(workspace, output_dir, *LONG, *arguments, launcher=launcher)) as process:
            wait_for(lambda: list(output_dir.glob("checkpoint-*")), process)
            found = ranks(process)
            watch.begin()
            action(process, found)
            output, _ = process.communicate(timeout=500)
            seconds = watch.seconds()
        return process.returncode, output, seconds, steps_of(output_dir)

    return act


def to_one(number):
    return lambda process, found: found[-1].send_signal(number)


def to_group(number):
    return lambda process, found: os.killpg(process.pid, number)


def to_launcher(number):
    return lambda process, found: process.send_signal(number)


def to_all_with_skew(process, found):
    """Signal each rank at another moment, most often during accumulation."""
    found[1].send_signal(signal.SIGTERM)
    time.sleep(0.2)
    # The rank may have ended meanwhile.
    with suppress(psutil.NoSuchProcess):
        found[0].send_signal(signal.SIGTERM)


# These workers live as long as the run.
WORKERS = ["--dataloader_num_workers", "2", "--dataloader_persistent_workers", "true"]
# How launchers end: torchrun with 1 and the statuses of its ranks, deepspeed's runner by the signal itself.
SIGNALS = {
    "SIGTERM": ("python", [], to_one(signal.SIGTERM), 143),
    "SIGINT": ("python", [], to_one(signal.SIGINT), 130),
    "SIGHUP": ("python", [], to_one(signal.SIGHUP), 129),
    "SIGUSR1, loader workers too": ("python", WORKERS, to_group(signal.SIGUSR1), 138),
    "SIGTERM, loader workers too": ("python", WORKERS, to_group(signal.SIGTERM), 143),
    "SIGTERM to torchrun": ("torchrun", [], to_launcher(signal.SIGTERM), 1),
    "SIGINT to torchrun's group": ("torchrun", [], to_group(signal.SIGINT), 1),
    "SIGTERM to deepspeed's group": ("deepspeed", zero(2), to_group(signal.SIGTERM), -15),
}


@pytest.mark.parametrize("name", mostly_faults(SIGNALS, "SIGTERM"))
def test_a_signal_stops_at_a_step_with_a_checkpoint(name, harm):
    launcher, arguments, action, status = SIGNALS[name]
    returncode, output, seconds, steps = harm(action, launcher, *arguments)
    assert returncode == status and "Stopped by SIG" in output and seconds < 10, (returncode, seconds, output[-3000:])
    assert f"after step {steps[-1]}" in output


def test_ranks_stop_together_and_the_command_on_the_page_resumes_with_all(harm, tmp_path):
    returncode, output, seconds, steps = harm(to_all_with_skew, "torchrun")
    assert returncode == 1 and output.count("exitcode  : 143") == 2 and seconds < 10, (seconds, output[-3000:])
    assert f"Stopped by SIGTERM after step {steps[-1]}" in output
    page = html.unescape((tmp_path / "run/report.html").read_text(encoding="utf-8"))
    assert re.search(r": after step \d+: SIGTERM", page)
    (pasted,) = re.findall(r"<pre>(.* --resume_from_checkpoint auto)</pre>", page)
    # The shell that the user pastes it into knows nothing of the launcher.
    with start(["bash", "-c", f"unset LOCAL_SIZE OMP_NUM_THREADS; {pasted}"]) as process:
        wait_for(lambda: (tmp_path / "run/run.json").read_text().count('"recipe"') == 2, process)
    launches = json.loads((tmp_path / "run/run.json").read_text())
    assert [launch["launch"].split(" on ")[0] for launch in launches] == ["2 process(es)"] * 2
    assert launches[1]["resumed_from"] and launches[1]["launcher"] == "torchrun"


def test_after_a_signal_during_preparation_the_run_can_start_again(workspace, tmp_path):
    """The run has nothing to save and ends at once. The same command starts it again."""
    texts = [f"document {number} of " + "seven quiet birds " * 20 for number in range(8_000)]
    words = command(workspace, tmp_path / "run", "--max_steps", "2")
    words[words.index("--dataset_name") + 1] = write_jsonl(tmp_path / "a.jsonl", texts)

    def is_preparing() -> bool:
        """Return whether a cache file exists. `rglob` would fail when the run renames a directory meanwhile."""
        return any(name.endswith(".arrow") for *_, names in os.walk(tmp_path / "cache") for name in names)

    with start(words, HF_HOME=str(tmp_path / "cache")) as process:
        wait_for(is_preparing, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=500)
    assert process.returncode == -signal.SIGTERM and "step 1/2" not in output, output[-3000:]
    result = run(words, HF_HOME=str(tmp_path / "cache"))
    assert result.returncode == 0 and not find_damage(tmp_path / "run/checkpoint-2"), result.stdout[-3000:]


# At once, before the ranks have imported anything, or while they import.
@pytest.mark.parametrize("seconds", [0, 1.5])
def test_ranks_whose_launcher_is_killed_while_they_start_end(seconds, workspace, tmp_path):
    with start(command(workspace, tmp_path / "run", *LONG, launcher="torchrun")) as process:
        wait_for(lambda: len(ranks(process)) == 2, process)
        found = ranks(process)
        time.sleep(seconds)
        process.kill()
        _, alive = psutil.wait_procs(found, timeout=500)
    assert not alive


@pytest.mark.parametrize("launcher", mostly_faults(["torchrun", "deepspeed", "accelerate:ddp"], "torchrun"))
def test_ranks_whose_launcher_is_killed_save_and_exit(launcher, workspace, tmp_path):
    """Until the ranks have ended, no other run may use their directory."""
    output_dir, watch = tmp_path / "run", Stopwatch()
    with start(command(workspace, output_dir, *LONG, *FLAGS[launcher], launcher=launcher)) as process:
        wait_for(lambda: list(output_dir.glob("checkpoint-*")), process)
        found = ranks(process)
        process.kill()
        with pytest.raises(UserError):
            take_lock(output_dir / LOCK_NAME)
        watch.begin()
        gone, alive = psutil.wait_procs(found, timeout=500)
        seconds = watch.seconds()
        output, _ = process.communicate(timeout=500)
    assert not alive and seconds < 10 and "Stopped by SIGTERM" in output, (seconds, output[-3000:])
    *_, newest = steps_of(output_dir)
    assert f"after step {newest}" in output and not find_damage(output_dir / f"checkpoint-{newest}")
    take_lock(output_dir / LOCK_NAME)
    release_lock(output_dir / LOCK_NAME)


# `tests/test_command.py` kills rank 1 under torchrun, too.
@pytest.mark.faults
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_others(launcher, rank, harm):
    kill = lambda process, found: found[rank].send_signal(signal.SIGKILL)  # noqa: E731
    returncode, output, seconds, _ = harm(kill, launcher, *FLAGS[launcher])
    assert returncode != 0 and seconds < 30, (returncode, seconds, output[-3000:])


@pytest.mark.faults
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_rank_that_hangs_ends_the_others(launcher, harm):
    """This takes the timeout of 5 seconds, and 30 until a launcher kills a frozen rank."""
    returncode, output, seconds, _ = harm(to_one(signal.SIGSTOP), launcher, *FLAGS[launcher], "--ddp_timeout", "5")
    assert returncode != 0 and seconds < 60, (returncode, seconds, output[-3000:])


def test_torchrun_restarts_a_run_after_a_rank_dies(workspace, reference, tmp_path):
    """torchrun restarts both ranks, which resume from the newest checkpoint and end with the same bits."""
    output_dir = tmp_path / "run"
    words = command(workspace, output_dir, "--save_total_limit", "9", launcher="torchrun")
    words[1:1] = ["--max-restarts", "1"]
    # A step has two passes.
    result = run_poisoned(words, "kill:11:1")
    assert result.returncode == 0 and f"Resuming from {output_dir / 'checkpoint-4'}" in result.stdout, result.stdout
    assert final_bits(output_dir) == final_bits(reference("torchrun"))

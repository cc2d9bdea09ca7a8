"""The checks of `hf-pretrain doctor` that start ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from .build_locks import remove_stale_build_locks
from .findings import BAD, NOTE, OK, Finding
from .probe import checks_on


# With the start of the doctor itself, a backend that hangs takes less than a minute.
_RANKS_SECONDS = 45


def check_ranks() -> Iterator[Finding]:
    """
    Run the ranks of [`~runtime.probe`] on each kind of device of this machine. All kinds run at the same time, so a
    backend that hangs costs `_RANKS_SECONDS`, and not that time per kind.
    """
    # Otherwise the ranks would wait for the lock of a killed build.
    remove_stale_build_locks()
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    with ThreadPoolExecutor() as pool:
        for findings in pool.map(_probe, kinds):
            yield from findings


def _probe(kind: str) -> list[Finding]:
    """Run the ranks of [`~runtime.probe`] under torchrun, and return a finding for each check."""
    num_ranks = 2 if kind == "cpu" else min(2, torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    command += ["-m", "hf_pretrain.runtime.probe", kind]
    # DeepSpeed takes the number of CPU devices from LOCAL_SIZE.
    own = {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(num_ranks), "PATH": program_path()}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = subprocess.Popen(command, env=os.environ | own, **pipes)
    output, errors, is_late = _communicate(ranks)

    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]
    what, advice = f"{num_ranks} rank(s) on {kind}", f"For the traceback, run {' '.join(command)}"
    findings = [
        Finding(
            f"{result['check']}, {what}",
            OK if result["is_ok"] else BAD,
            result["message"],
            "" if result["is_ok"] else advice,
        )
        for result in results
    ]
    if is_late:
        # The ranks run the checks in order, and wait in the first one without a result.
        late, *untested = [*checks_on(kind)][len(results) :] or ["shutdown"]
        findings.append(_no_answer(f"{late}, {what}", untested, command))
    elif ranks.returncode or not results:
        last = [line for line in errors.splitlines() if "Error" in line][-1:] or ["no output"]
        findings.append(Finding(what, BAD, last[0].strip(), advice))
    return findings


def _communicate(launcher: subprocess.Popen) -> tuple[str, str, bool]:
    """
    Return what a launcher and its ranks print to stdout and stderr, and whether they were too late: if they have not
    ended after `_RANKS_SECONDS`, kill them. The time in which DeepSpeed compiles a kernel does not count.
    """
    torchrun, waited_seconds = psutil.Process(launcher.pid), 0
    while waited_seconds < _RANKS_SECONDS:
        with suppress(subprocess.TimeoutExpired):
            return *launcher.communicate(timeout=1), False
        waited_seconds += 0 if _is_compiling(torchrun) else 1
    with suppress(psutil.NoSuchProcess):
        # Killing torchrun alone would leave its ranks behind. A suspended torchrun starts no new ranks.
        torchrun.suspend()
        for process in [*torchrun.children(recursive=True), torchrun]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    return *launcher.communicate(), True


def _is_compiling(launcher: psutil.Process) -> bool:
    """Return whether a descendant of a process is `ninja`, with which torch compiles kernels."""
    # A process may end in the meantime.
    with suppress(psutil.NoSuchProcess):
        return any(process.name() == "ninja" for process in launcher.children(recursive=True))
    return False


def _no_answer(what: str, untested: list[str], command: list[str]) -> Finding:
    """Return the finding about ranks that did not answer in time."""
    message = f"no answer in {_RANKS_SECONDS} s" + (f"; not tested: {', '.join(untested)}" if untested else "")
    load, num_cores = psutil.getloadavg()[0], os.cpu_count() or 1
    # The doctor's own ranks are up to four processes.
    if load > 2 * num_cores:
        message += f", with a load of {load:.0f} on {num_cores} cores"
        return Finding(what, NOTE, message, "Stop other programs, and run the doctor again.")
    causes = "A firewall or a wrong host name may be the cause: try GLOO_SOCKET_IFNAME=lo or NCCL_DEBUG=INFO."
    return Finding(what, BAD, message, f"{causes} To see where it waits, run {' '.join(command)}")


def program_path() -> str:
    """Return PATH with the directory of this environment's programs in front."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


__all__ = ["check_ranks", "program_path"]

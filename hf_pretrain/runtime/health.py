"""The checks of `hf-pretrain doctor`: versions, devices, disk, compiler, port, Hub login, and a run of two ranks."""

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import HfHubHTTPError
from packaging.requirements import Requirement

from .devices import describe_search, has_bfloat16_units


OK, NOTE, BAD = "ok", "note", "bad"
_COLOURS = {OK: "32", NOTE: "33", BAD: "31"}
_MIN_DISK_GB, _MIN_SHARED_MB, _MIN_MEMORY_GB = 5, 64, 2
_PROBE_SECONDS = 50
_PORT = 29500


@dataclass
class Finding:
    """
    The result of a check.

    Args:
        name (`str`): what was checked.
        status (`str`): `ok`; `note` for something that limits what this machine can do; `bad` for a defect.
        message (`str`): what was found.
        advice (`str`): what to do about it; empty if nothing.
    """

    name: str
    status: str
    message: str
    advice: str = ""


def check_versions() -> Iterator[Finding]:
    """Compare the installed versions with the tested version ranges, which the package's metadata hold."""
    yield Finding("Python", OK, platform.python_version())
    for line in importlib.metadata.requires("hf_pretrain") or []:
        requirement = Requirement(line)
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if not is_extra:
                yield Finding(requirement.name, BAD, "is not installed", f"pip install '{requirement}'")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        if not is_extra or not fits:
            advice = "" if fits else f"pip install '{requirement.name}{requirement.specifier}'"
            tested = f", tested with {requirement.specifier}" if requirement.specifier else ""
            yield Finding(requirement.name, OK if fits else BAD, f"{version}{tested}", advice)


def check_devices() -> Iterator[Finding]:
    """Check the devices, their free memory and their bfloat16 units."""
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            is_free = free > _MIN_MEMORY_GB * 1e9
            advice = "" if is_free else "Another program uses this GPU: find it with nvidia-smi."
            message = f"{name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
            yield Finding(f"GPU {number}", OK if is_free else NOTE, message, advice)
    else:
        # If there is a driver but torch finds no GPU, the usual cause is a CPU build of torch.
        has_driver = shutil.which("nvidia-smi") is not None
        advice = "A driver is installed, but torch finds no GPU: install a CUDA build of torch." if has_driver else ""
        yield Finding("GPU", BAD if has_driver else NOTE, f"none ({describe_search()})", advice)
    capability = torch.backends.cpu.get_cpu_capability()
    units = "with" if has_bfloat16_units("cpu") else "without"
    yield Finding("CPU", OK, f"{os.cpu_count()} cores, {capability}, {units} bfloat16 units")
    free = psutil.virtual_memory().available / 1e9
    is_enough = free > _MIN_MEMORY_GB
    advice = "" if is_enough else "Stop other programs; the preset tiny needs about 2 GB."
    yield Finding("memory", OK if is_enough else BAD, f"{free:.1f} GB free", advice)


def check_disk() -> Iterator[Finding]:
    """Check the free space for runs, for the Hub's caches, and in the shared memory."""
    for name, path, variable in (("disk", Path.cwd(), "--output_dir"), ("caches", Path(HF_HOME), "HF_HOME")):
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free / 1e9
        is_writable = os.access(path, os.W_OK)
        status = BAD if not is_writable else OK if free > _MIN_DISK_GB else NOTE
        message = f"{path}: {free:.0f} GB free" + ("" if is_writable else ", not writable")
        yield Finding(name, status, message, "" if status == OK else f"Choose another directory with {variable}.")
    if sys.platform == "linux":
        free = shutil.disk_usage("/dev/shm").free / 1e6 if Path("/dev/shm").is_dir() else 0
        advice = "" if free > _MIN_SHARED_MB else "If this is a container, start it with --shm-size 1g."
        yield Finding("shared memory", NOTE if advice else OK, f"{free:,.0f} MB free", advice)


def check_compiler() -> Iterator[Finding]:
    """Look for a C++ compiler and ninja, with which torch compiles DeepSpeed's kernels."""
    compiler, ninja = (shutil.which(os.environ.get("CXX", "c++")), shutil.which("ninja", path=_path()))
    advice = "DeepSpeed cannot compile its kernels: apt-get install g++" if compiler is None else ""
    yield Finding("C++ compiler", NOTE if advice else OK, compiler or "none", advice)
    advice = "DeepSpeed cannot compile its kernels: pip install ninja" if ninja is None else ""
    yield Finding("ninja", NOTE if advice else OK, ninja or "none", advice)


def check_ranks() -> Iterator[Finding]:
    """Run the ranks of [`~runtime.probe`] on each kind of device of this machine."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    probes = [("cpu", 2, [])] + [("cuda", min(2, num_gpus), [])] * bool(num_gpus)
    zero = ("cuda", min(2, num_gpus), ["zero"]) if num_gpus else ("cpu", 2, ["zero"])
    for probe in (*probes, zero):
        yield from _probe(*probe)


def _probe(kind: str, num_ranks: int, words: list[str]) -> Iterator[Finding]:
    """Run the ranks of [`~runtime.probe`] under torchrun, and yield a finding for each line that they print."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    # DeepSpeed takes the number of CPU devices from LOCAL_SIZE.
    own = {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(num_ranks), "PATH": _path()}
    what = f"{num_ranks} rank(s) on {kind}"
    rerun = f"run {' '.join([*launch, '-m', 'hf_pretrain.runtime.probe', kind, *words])}"
    ranks = subprocess.Popen(
        [*launch, "-m", "hf_pretrain.runtime.probe", kind, *words],
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    torchrun = psutil.Process(ranks.pid)
    deadline, is_late = time.monotonic() + _PROBE_SECONDS, False
    while not is_late:
        try:
            output, errors = ranks.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:
            if _is_compiling(torchrun):
                # DeepSpeed compiles a kernel when it runs for the first time. That can take minutes on a slow machine.
                deadline = time.monotonic() + _PROBE_SECONDS
            is_late = time.monotonic() > deadline
    if is_late:
        # Killing torchrun alone would leave its ranks behind. A suspended torchrun starts no new ranks.
        torchrun.suspend()
        for process in [*torchrun.children(recursive=True), torchrun]:
            process.kill()
        output, errors = ranks.communicate()
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]
    for result in found:
        status = OK if result["is_ok"] else BAD
        advice = "" if result["is_ok"] else f"For the traceback, {rerun}"
        yield Finding(f"{result['check']}, {what}", status, result["message"], advice)
    if is_late:
        yield _no_answer(f"ZeRO step, {what}" if words else what, f"To see where it waits, {rerun}")
    elif ranks.returncode or not found:
        last = [line for line in errors.splitlines() if "Error" in line][-1:] or ["no output"]
        yield Finding(what, BAD, last[0].strip(), f"For the traceback, {rerun}")


def _is_compiling(launcher: psutil.Process) -> bool:
    """Return whether a descendant of a process is `ninja`, with which torch compiles kernels."""
    try:
        return any(process.name() == "ninja" for process in launcher.children(recursive=True))
    except psutil.NoSuchProcess:
        # A process ended in the meantime.
        return False


def _no_answer(what: str, rerun: str) -> Finding:
    """Return the finding about ranks that did not answer in time."""
    message = f"no answer in {_PROBE_SECONDS} s"
    load, num_cores = psutil.getloadavg()[0], os.cpu_count() or 1
    # The doctor's own ranks are up to four processes.
    if load > 2 * num_cores:
        return Finding(
            what,
            NOTE,
            f"{message}, with a load of {load:.0f} on {num_cores} cores",
            "Stop other programs, and run the doctor again.",
        )
    advice = "A firewall or a wrong host name may be the cause: try GLOO_SOCKET_IFNAME=lo or NCCL_DEBUG=INFO."
    return Finding(what, BAD, message, f"{advice} {rerun}")


def check_port() -> Iterator[Finding]:
    """Check whether the default port of the deepspeed and accelerate launchers is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", _PORT))
        except OSError:
            advice = "Choose another port for deepspeed and accelerate: hf-pretrain ... --master_port 29501"
            yield Finding("port", NOTE, f"{_PORT} is in use", advice)
            return
    yield Finding("port", OK, f"{_PORT} is free")


def check_visible_devices() -> Iterator[Finding]:
    """Warn about `CUDA_VISIBLE_DEVICES`, which the deepspeed launcher ignores if it gets `--include`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        advice = "`deepspeed --include` ignores this variable; `hf-pretrain ... --launcher deepspeed` obeys it."
        yield Finding("CUDA_VISIBLE_DEVICES", NOTE, repr(visible), advice)


def check_hub() -> Iterator[Finding]:
    """Check whether the Hub can be reached and accepts the token. No finding contains the token."""
    token, endpoint = get_token(), HfApi().endpoint
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        yield Finding("Hub", NOTE, "HF_HUB_OFFLINE is set: no downloads, no pushes", "Unset it to use the Hub.")
        return
    if token is None:
        yield Finding("Hub", NOTE, f"not logged in at {endpoint}", "To push models, log in: hf auth login")
        return
    try:
        name = HfApi().whoami()["name"]
    except HfHubHTTPError as error:
        message = f"{endpoint} refuses the token ({error.response.status_code})"
        yield Finding("Hub", BAD, message, "Log in again: hf auth login")
    except Exception as error:
        # HTTP libraries raise many kinds of errors.
        advice = "Training works without the Hub. To use a mirror, set HF_ENDPOINT."
        yield Finding("Hub", NOTE, f"{endpoint} cannot be reached ({type(error).__name__})", advice)
    else:
        yield Finding("Hub", OK, f"logged in as {name} at {endpoint}")


def _path() -> str:
    """Return PATH with the directory of this environment's programs in front."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_versions,
    check_devices,
    check_disk,
    check_compiler,
    check_port,
    check_visible_devices,
    check_hub,
    check_ranks,
)


def examine(*, is_quiet: bool = False) -> Iterator[Finding]:
    """
    Yield the findings of all checks, in order. The checks run in threads, because some are slow.

    Args:
        is_quiet (`bool`): print no progress to standard error.
    """
    with ThreadPoolExecutor() as pool:
        running = {check: pool.submit(_collect, check) for check in CHECKS}
        for check, findings in running.items():
            if check is check_ranks and not is_quiet:
                print(
                    "Testing the ranks, which takes up to a minute. The first time, DeepSpeed also compiles a kernel, "
                    "which takes minutes on a busy machine ...",
                    file=sys.stderr,
                    flush=True,
                )
            yield from findings.result()


def print_findings(*, as_json: bool) -> bool:
    """Print the findings of all checks, and return whether this machine has no defect."""
    findings = []
    for finding in examine(is_quiet=as_json):
        findings.append(finding)
        if as_json:
            continue
        mark = f"{finding.status:4}"
        mark = f"\033[{_COLOURS[finding.status]}m{mark}\033[0m" if sys.stdout.isatty() else mark
        print(f"{mark}  {finding.name:36} {finding.message}", flush=True)
        if finding.advice:
            print(f"      {'':36} -> {finding.advice}")
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    return all(finding.status != BAD for finding in findings)


def _collect(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    return list(check())


__all__ = ["BAD", "NOTE", "OK", "Finding", "examine", "print_findings"]

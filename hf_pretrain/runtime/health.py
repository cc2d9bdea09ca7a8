"""The checks of `hf-pretrain doctor`: versions, devices, disk, compiler, port, Hub login, and a run of two ranks."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from packaging.requirements import Requirement

from .devices import describe_search, has_bfloat16_units
from .findings import BAD, NOTE, OK, Finding
from .rank_checks import check_ranks, program_path


_COLOURS = {OK: "32", NOTE: "33", BAD: "31"}
_MIN_DISK_GB, _MIN_SHARED_MB, _MIN_MEMORY_GB = 5, 64, 2
_HUB_SECONDS = 10
_PORT = 29500


def check_versions() -> Iterator[Finding]:
    """Compare the installed versions with the tested version ranges, which the package's metadata hold."""
    yield Finding("Python", OK, platform.python_version())
    for line in importlib.metadata.requires("hf_pretrain") or []:
        requirement = Requirement(line)
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        # pip gets the requirement without its condition, but with the extras of the package.
        requirement.marker = None
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if not is_extra:
                yield Finding(requirement.name, BAD, "is not installed", f"pip install '{requirement}'")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        if not is_extra or not fits:
            advice = "" if fits else f"pip install '{requirement}'"
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
    """Look for the C++ compiler and ninja, and for the CUDA toolkit if there is an NVIDIA GPU."""
    compiler, ninja = (shutil.which(os.environ.get("CXX", "c++")), shutil.which("ninja", path=program_path()))
    advice = "DeepSpeed and --torch_compile cannot compile: apt-get install g++" if compiler is None else ""
    yield Finding("C++ compiler", NOTE if advice else OK, compiler or "none", advice)
    advice = "DeepSpeed cannot compile its kernels: pip install ninja" if ninja is None else ""
    yield Finding("ninja", NOTE if advice else OK, ninja or "none", advice)
    # ROCm builds of torch have no CUDA version.
    if torch.version.cuda is not None and (torch.cuda.is_available() or shutil.which("nvidia-smi") is not None):
        # The import takes half a second.
        from torch.utils.cpp_extension import CUDA_HOME

        yield _check_toolkit(CUDA_HOME, torch.version.cuda)


def _check_toolkit(home: str | None, torch_cuda: str) -> Finding:
    """
    Compare the version of the CUDA toolkit with that of torch.

    NOTE: DeepSpeed compiles CUDA code for an `optimizer` block (FusedAdam) and for ZeRO++. No config in `ds_configs/`
    has either: the optimizer is torch's, and offloading compiles DeepSpeed's CPU optimizer with the C++ compiler.

    Args:
        home (`str`, *optional*): the directory of the toolkit, as torch finds it.
        torch_cuda (`str`): the CUDA version of torch.
    """
    use = "No config in ds_configs/ needs it. For a DeepSpeed config with an `optimizer` block or ZeRO++, install"
    advice = f"{use} the CUDA toolkit {torch_cuda}, and set CUDA_HOME to its directory."
    if home is None:
        return Finding("CUDA toolkit", NOTE, "none", advice)
    nvcc = Path(home, "bin/nvcc")
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("CUDA toolkit", NOTE, f"{nvcc} does not run ({type(error).__name__})", advice)
    found = re.search(r"release (\d+)\.(\d+)", text)
    version = f"{found[1]}.{found[2]}" if found else "unknown"
    # DeepSpeed accepts another minor version with CUDA 11 and 12 only.
    major = version.partition(".")[0]
    fits = version == torch_cuda or (major in ("11", "12") and major == torch_cuda.partition(".")[0])
    message = f"{home}, CUDA {version}; torch was built with {torch_cuda}"
    return Finding("CUDA toolkit", OK if fits else NOTE, message, "" if fits else advice)


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
        # `HfApi().whoami()` would wait for ever if the Hub accepted the connection and did not answer.
        url, headers = f"{endpoint}/api/whoami-v2", build_hf_headers(token=token)
        response = get_session().get(url, headers=headers, timeout=_HUB_SECONDS)
        hf_raise_for_status(response)
        name = response.json()["name"]
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            yield Finding("Hub", BAD, f"{endpoint} refuses the token ({status})", "Log in again: hf auth login")
        else:
            yield Finding("Hub", NOTE, f"{endpoint} answers with an error ({status})", "Try again later.")
    except Exception as error:
        # HTTP libraries raise many kinds of errors.
        advice = "Training works without the Hub. To use a mirror, set HF_ENDPOINT."
        yield Finding("Hub", NOTE, f"{endpoint} cannot be reached ({type(error).__name__})", advice)
    else:
        yield Finding("Hub", OK, f"logged in as {name} at {endpoint}")


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


__all__ = ["examine", "print_findings"]

"""The checks of `hf-pretrain doctor`: versions, devices, memory, disk, and two ranks."""

import importlib.metadata
import itertools
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..runtime.command_line import print_result
from ..runtime.devices import find_unused_gpu, has_bfloat16_units
from ..runtime.ranks import leave_process_group
from ..weights import localizing


OK, NOTE, BAD = "ok", "note", "bad"


class Finding(NamedTuple):
    """
    The result of a check.

    Args:
        status (`str`): `ok`; `note` for something that limits what this machine can do; `bad` for a defect.
        name (`str`): what was checked.
        message (`str`): what was found.
        advice (`str`): what to do if the status is not `ok`.
    """

    status: str
    name: str
    message: str
    advice: str = ""


def check_versions() -> Iterator[Finding]:
    """Compare the installed versions with the tested ranges, which the package's metadata hold."""
    installed = {canonicalize_name(found.name): found.version for found in importlib.metadata.distributions()}
    yield Finding(OK, "Python", platform.python_version())
    for requirement in map(Requirement, importlib.metadata.requires("hf_pretrain") or []):
        # Leave out packages of extras, and packages for other systems.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(canonicalize_name(requirement.name))
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        message = f"{version or 'not installed'}, tested with {requirement.specifier or 'any version'}"
        advice = f"pip install '{requirement.name}{requirement.specifier}'"
        yield Finding(OK if fits else BAD, requirement.name, message, advice)


def check_devices() -> Iterator[Finding]:
    """Name the GPUs and the CPU."""
    if (unused := find_unused_gpu()) is not None:
        message, _, advice = unused.partition(". ")
        yield Finding(BAD, "GPU", message, advice)
    elif torch.cuda.is_available():
        names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        yield Finding(OK, "GPU", ", ".join(names))
    elif torch.backends.mps.is_available():
        yield Finding(OK, "GPU", f"{torch.backends.mps.get_name()}, through MPS")
    units = "with" if has_bfloat16_units("cpu") else "without"
    yield Finding(OK, "CPU", f"{os.cpu_count()} cores, {units} bfloat16 units")


def check_space() -> Iterator[Finding]:
    """Check the free memory, the disk of the working directory, and the shared memory, which workers need."""
    # Only Linux limits the shared memory by a file system.
    shared = "/dev/shm" if sys.platform == "linux" else "."
    for name, free, least_gb, advice in (
        ("memory", psutil.virtual_memory().available, 2, "Stop other programs."),
        ("disk", psutil.disk_usage(".").free, 5, "Choose another directory with --output_dir."),
        ("shared memory", psutil.disk_usage(shared).free, 0.064, "Start a container with --shm-size 1g."),
    ):
        yield Finding(OK if free > least_gb * 1e9 else NOTE, name, f"{free / 1e9:.1f} GB free", advice)


def check_copies() -> Iterator[Finding]:
    """Show the size of the native copies of other programs' models."""
    if size := localizing.copies_bytes():
        removal = "`hf-pretrain doctor --remove_copies` removes them"
        yield Finding(OK, "native copies", f"{size / 1e9:.1f} GB below {localizing.COPIES}; {removal}")


def check_ranks() -> Iterator[Finding]:
    """Start two ranks on each kind of device, which add their numbers."""
    kinds = {"cpu": 2} | ({"cuda": min(2, torch.cuda.device_count())} if torch.cuda.is_available() else {})
    for kind, num_ranks in kinds.items():
        with tempfile.TemporaryDirectory() as directory:
            try:
                torch.multiprocessing.spawn(_add_ones, (kind, num_ranks, f"{directory}/store"), nprocs=num_ranks)
                yield Finding(OK, f"ranks on {kind}", f"{num_ranks} add numbers")
            # Each backend raises its own errors.
            except Exception as error:
                # A call that hangs ends after a minute, too.
                advice = ". For several consumer cards, export NCCL_P2P_DISABLE=1" if kind == "cuda" else ""
                last = str(error).strip().splitlines()[-1]
                yield Finding(BAD, f"ranks on {kind}", f"{num_ranks} fail", last + advice)


def _add_ones(rank: int, kind: str, num_ranks: int, store: str) -> None:
    """Add up the ones of all ranks."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend, where = "nccl" if kind == "cuda" else "gloo", dist.FileStore(store, num_ranks)
    dist.init_process_group(backend, store=where, world_size=num_ranks, rank=rank, timeout=timedelta(seconds=60))
    total = torch.ones(1, device=kind)
    dist.all_reduce(total)
    assert total.item() == num_ranks, f"the sum is {total.item()}"
    leave_process_group()


def print_findings(more: Iterable[Finding] = ()) -> bool:
    """Print the findings of all checks and `more`, and return whether this machine has no defect."""
    is_sound = True
    checks = (check_versions(), check_devices(), check_space(), check_copies(), more, check_ranks())
    for finding in itertools.chain(*checks):
        print_result(f"{finding.status:4}  {finding.name:18} {finding.message}")
        if finding.status != OK:
            print_result(f"      {'':18} -> {finding.advice}")
        is_sound = is_sound and finding.status != BAD
    return is_sound

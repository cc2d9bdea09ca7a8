"""The device of a run, its bfloat16 units and its compiler, and the memory allocator of a CPU."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable

import torch
from torch import nn
from transformers.utils import logging

from .errors import UserError


logger = logging.get_logger(__name__)


def describe_found() -> str:
    """Return a few words that name the kind of device that torch has found."""
    found = default_device_type(use_cpu=False)
    return f"torch {torch.__version__} found {'no accelerator' if found == 'cpu' else found}"


def default_device_type(*, use_cpu: bool) -> str:
    """Return `cpu`, or the type of the accelerator that torch finds."""
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def find_unused_gpu() -> str | None:
    """
    Return two sentences about an NVIDIA GPU that torch cannot use, with the remedy. `None` if there is none, or if the
    user hides it with an empty `CUDA_VISIBLE_DEVICES`.
    """
    if torch.cuda.is_available() and torch.version.cuda:
        number, built = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.get_arch_list()
        capability = torch.cuda.get_device_capability(number)
        if any(_runs_on(name, capability) for name in built):
            return None
        return (
            f"torch {torch.__version__} has kernels for {', '.join(built)}, and none for "
            f"{torch.cuda.get_device_name(number)} (sm_{capability[0]}{capability[1]}). {_advise(capability)}."
        )
    is_hidden = not re.match(r"\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip())
    if torch.cuda.is_available() or is_hidden or shutil.which("nvidia-smi") is None:
        return None
    # Old drivers do not know `compute_cap`.
    for fields in ("name,driver_version,compute_cap", "name,driver_version"):
        words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        text = subprocess.run(words, capture_output=True, text=True).stdout
        if found := re.match(r"(.+?), (\d[.\d]*)(?:, (\d+)\.(\d+))?$", text, re.MULTILINE):
            break
    else:
        return None
    capability = (int(found[3]), int(found[4])) if found[3] else (7, 5)
    built, advice = "without CUDA", _advise(capability)
    if torch.version.cuda:
        built = f"for CUDA {torch.version.cuda}"
        if capability >= (7, 5) or torch.version.cuda == "12.6":
            advice = "Update the driver, or install a torch that fits it (https://pytorch.org/get-started/locally)"
    return (
        f"nvidia-smi lists {found[1]} with driver {found[2]}, and torch {torch.__version__}, built {built}, cannot "
        f"use it. {advice}."
    )


def _advise(capability: tuple[int, int]) -> str:
    """
    Return the command that installs a torch with kernels for an NVIDIA GPU.

    The wheels for CUDA 12.6 have kernels for capability 5.0 to 9.0, and those for CUDA 13 from 7.5 on
    (`PYTORCH_RELEASES_CODE_CC` in `torch.cuda`). torch 2.14 is the last one with wheels for CUDA 12.6
    (https://github.com/pytorch/pytorch/issues/190385).
    """
    if capability < (5, 0):
        return "No torch that this package supports has any"
    version, cuda = torch.__version__.partition("+")[0], "130"
    if capability < (7, 5):
        version, cuda = version if torch.__version__ < (2, 15) else "2.14.0", "126"
    index = f"https://download.pytorch.org/whl/cu{cuda}"
    return f"Run `pip install --force-reinstall torch=={version} --index-url {index}`"


def _runs_on(name: str, capability: tuple[int, int]) -> bool:
    """
    Return whether code for `name`, such as `sm_86` or `compute_120`, runs on a GPU. Binary code runs on its own and on
    newer minor versions of its major version, and PTX (`compute`) on all newer GPUs. Code with the suffix `a` runs on
    its own version alone, and code with `f` within its major version.
    """
    kind, major, minor, suffix = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name).groups()
    built = int(major), int(minor)
    if suffix == "a":
        return built == capability
    return built <= capability and (built[0] == capability[0] or (kind, suffix) == ("compute", ""))


def refuse_unused_gpu(flag: str) -> None:
    """Raise `UserError` if torch cannot use an NVIDIA GPU of this machine. `flag` chooses the CPU."""
    if (unused := find_unused_gpu()) is not None:
        raise UserError(f"{unused} To use the CPU, pass {flag}.")


def compile_modules(modules: Iterable[nn.Module], **options: str) -> None:
    """Compile modules, each by itself, with the options of `torch.compile`."""
    # NOTE: DDP's optimization would split the graph of each layer, and bypass the cache of compiled graphs. Without
    # it, a layer's gradients are reduced while the backward pass of the layer before it runs.
    torch._dynamo.config.optimize_ddp = False
    for module in modules:
        module.compile(**options)


def can_compile(device: torch.device, **options: str) -> bool:
    """
    Return whether `torch.compile` works: on a GPU it needs Triton, a C compiler and Python.h, on a CPU a C++ compiler.
    If it does not work, warn.
    """
    try:
        torch.compile(lambda states: states + 1, **options)(torch.zeros(2, device=device))
    except Exception as error:
        # Each of the compilers raises its own errors. The first lines name the cause, the others are advice.
        reason = " ".join(str(error).strip().splitlines()[:2])
        logger.warning(f"torch.compile does not work here, so this run trains without it, more slowly: {reason}")
        return False
    return True


def has_bfloat16_units(device_type: str) -> bool:
    """
    Return whether the device has units for bfloat16 matrix products. Otherwise it emulates them, and they are slower
    than float32.
    """
    if device_type == "cuda":
        # torch counts emulation as support by default.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # The last name is Arm's; the others are Intel's and AMD's.
    features = torch.cpu.get_capabilities()
    return any(features.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def keep_freed_blocks() -> None:
    """
    Let glibc keep freed memory in the process. A training step on a CPU is then up to 1.2 times as fast.

    By default, glibc returns large blocks to the system as soon as they are freed. The next step gets them back page
    by page, each after a page fault, and the system fills each page with zeros. Do nothing without glibc, and if the
    environment configures the allocator.
    """
    is_configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if is_configured or platform.libc_ver()[0] != "glibc":
        return
    # From glibc's malloc.h: give large blocks a place in the heap instead of mappings of their own (M_MMAP_MAX), never
    # shrink the heap (M_TRIM_THRESHOLD), and let it grow by 256 MiB at once (M_TOP_PAD). Pages that are never touched
    # take no memory.
    for parameter, value in ((-4, 0), (-1, -1), (-2, 256 << 20)):
        ctypes.CDLL(None).mallopt(parameter, value)

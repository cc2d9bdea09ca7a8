"""
The device of a run: the kinds that torch supports, the one that is present, and whether it has bfloat16 units.
"""

from importlib.util import find_spec

import torch


# The device types of torch itself (ROCm appears as `cuda`), and the packages that add others.
DEVICE_TYPES = ("cuda", "mps", "xpu")
PLUG_INS = (
    *("torch_xla", "torch_npu", "torch_neuronx", "torch_mlu", "torch_musa", "torch_sdaa", "torch_directml"),
    "habana_frameworks",
)


def describe_found() -> str:
    """Return a few words that name the kinds of devices that torch has found."""
    return f"torch {torch.__version__} found {', '.join(_found()) or 'no accelerator'}"


def describe_search() -> str:
    """Return one line that names the kinds of devices that were looked for, and those that were found."""
    kinds = ", ".join((*DEVICE_TYPES, *PLUG_INS))
    return f"torch {torch.__version__} looked for {kinds}: found {', '.join(_found()) or 'none'}"


def _found() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [*([accelerator.type] if accelerator is not None else []), *installed_plug_ins()]


def installed_plug_ins() -> list[str]:
    """Return the installed packages that add a device type to torch."""
    # Do not import the packages: importing one may start its device.
    return [name for name in PLUG_INS if find_spec(name) is not None]


def default_device_type(*, use_cpu: bool) -> str:
    """Return `cpu`, or the type of the accelerator that torch finds."""
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def has_bfloat16_units(device_type: str) -> bool:
    """
    Return whether the device has units for bfloat16 matrix products. Otherwise it emulates them, and they are slower
    than float32.
    """
    if device_type == "cuda":
        # torch counts emulation as support by default.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # The last name is Arm's; the others are Intel's and AMD's.
    features = torch.cpu.get_capabilities()
    return any(features.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


__all__ = ["describe_found", "describe_search", "default_device_type", "has_bfloat16_units", "installed_plug_ins"]

"""The device of a run, and whether it has bfloat16 units."""

import torch


def describe_found() -> str:
    """Return a few words that name the kind of device that torch has found."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return f"torch {torch.__version__} found {accelerator.type if accelerator is not None else 'no accelerator'}"


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

"""Which device a run trains on, and whether it is good at bfloat16."""

import torch


def default_device_type(*, use_cpu: bool) -> str:
    """`cpu`, or the kind of accelerator that torch finds: `cuda` (ROCm too), `mps`, `xpu`."""
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def has_bfloat16_units(device_type: str) -> bool:
    """Whether bfloat16 products are faster there than float32 ones. Elsewhere they are emulated, or were never tried."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    features = torch.cpu.get_capabilities()
    return any(features.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


__all__ = ["default_device_type", "has_bfloat16_units"]

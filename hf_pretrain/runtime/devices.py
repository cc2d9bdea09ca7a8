"""Which devices a run looks for, which one it trains on, and whether that is good at bfloat16."""

from importlib.util import find_spec

import torch


# Devices of torch itself, ROCm among `cuda`, and packages that add others to it.
DEVICE_TYPES = ("cuda", "mps", "xpu")
PLUG_INS = (
    *("torch_xla", "torch_npu", "torch_neuronx", "torch_mlu", "torch_musa", "torch_sdaa", "torch_directml"),
    "habana_frameworks",
)


def describe_search() -> str:
    """Which devices were looked for, and which of them are there."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = [*([accelerator.type] if accelerator is not None else []), *installed_plug_ins()]
    return (
        f"torch {torch.__version__} looked for {', '.join((*DEVICE_TYPES, *PLUG_INS))}: "
        f"found {', '.join(found) or 'none'}"
    )


def installed_plug_ins() -> list[str]:
    return [name for name in PLUG_INS if find_spec(name) is not None]


def default_device_type(*, use_cpu: bool) -> str:
    """`cpu`, or the kind of accelerator that torch finds."""
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


__all__ = ["describe_search", "default_device_type", "has_bfloat16_units", "installed_plug_ins"]

"""
Compare a training step of a small model on the accelerator with the same step on the CPU.

A kernel that is wrong on some device, or in its backward pass alone, returns finite values: no other check notices it.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ..runtime.devices import default_device_type
from ..runtime.machine_checks import BAD, OK, Finding
from .configuration_minimind import MiniMindConfig
from .modeling_minimind import MiniMindForCausalLM


MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"num_experts": 4, "num_shared_experts": 1, "qk_norm": True},
}
# In float32. TF32 rounds matrix products by up to 0.1 %.
LIMIT = 0.01


def check_step() -> Iterator[Finding]:
    """Compare the loss and the gradients of a step on the accelerator, if there is one."""
    kind = default_device_type(use_cpu=False)
    for name, fields in MODELS.items() if kind != "cpu" else ():
        # As in training: the loop over the experts serves CPUs and Apple GPUs.
        found = find_gradients(kind, experts="eager" if kind == "mps" else "grouped_mm", **fields)
        expected = find_gradients("cpu", **fields)
        error = (torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)).item()
        advice = "Training on this device would be wrong. Install another version of torch, and report this one."
        # NaN fails this test, too.
        status = OK if error < LIMIT else BAD
        yield Finding(status, f"training, {kind}", f"{name}: gradients {error:.2%} off those of the CPU", advice)


def find_gradients(
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "packed",
    experts: str = "eager",
    compiles: bool = False,
    **fields: Any,
) -> torch.Tensor:
    """
    Return the loss of a small model on two rows of packed documents, and all gradients, in one vector.

    Args:
        device (`str`): the type of the device.
        dtype (`torch.dtype`): dtype of autocast; in float32, there is none.
        attention, experts (`str`): the implementations.
        compiles (`bool`): compile the layers.
        fields: fields of the config.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MiniMindConfig(**sizes, vocab_size=256, initializer_range=0.1, zero_init_residual=False, **fields)
    config._attn_implementation, config._experts_implementation = attention, experts
    # Weights and ids come from the CPU, so that both devices get the same.
    model, ids = MiniMindForCausalLM(config), torch.randint(256, (2, 96))
    # Documents of 40, 40 and 16 tokens. As in training, the model gets their bounds: to find them, it would wait.
    position_ids = (torch.arange(96) % 40).expand(2, -1)
    bounds = torch.tensor([0, 40, 80, 96, 136, 176, 192], dtype=torch.int32)
    ids, position_ids, bounds = ids.to(device), position_ids.to(device), bounds.to(device)
    model = model.to(device)
    if compiles:
        for layer in model.model.layers:
            layer.compile()
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        loss = model(ids, position_ids=position_ids, labels=ids, cu_seq_lens_q=bounds, max_length_q=40).loss
    loss.backward()
    return torch.cat([loss.detach().view(1), *(weight.grad.flatten() for weight in model.parameters())]).cpu()

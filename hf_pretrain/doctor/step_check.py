"""
Compare training steps and generation of small models, on the devices at hand, with plain attention on the CPU.

A kernel that is wrong on some device, or in its backward pass alone, returns finite values: no other check notices it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..model.presets import PRESETS
from ..runtime.devices import default_device_type, has_bfloat16_units
from .machine_checks import BAD, OK, Finding


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_shared_experts": 1, "qk_norm": True}
# Documents longer than the blocks of attention kernels, shorter, and of a single token.
LENGTHS = (270, 65, 1)
# Batches of pretraining, of reinforcement learning (padded on the left), and of sampling with a cache.
LAYOUTS = ("packed documents", "padding", "generation")
# Largest difference, relative to the norm. Rounding causes 0.9 % in bfloat16, and TF32 0.1 %. A head that is wrong by
# a third, or a wrong scale of the scores, causes 3 % or more; a missing mask causes 30 %.
LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.025, torch.float16: 0.01}


def check_steps() -> Iterator[Finding]:
    """Compare models with the heads of all presets, on the CPU and on the accelerator, in the dtypes of a run."""
    for device in sorted({"cpu", default_device_type(use_cpu=False)}):
        half = torch.float16 if device == "cuda" and not has_bfloat16_units("cuda") else torch.bfloat16
        for dtype in (torch.float32, half):
            error, worst = max(find_errors(device, dtype))
            message = f"{str(dtype).removeprefix('torch.')}: {error:.2%} off the reference at most ({worst})"
            advice = "Results on this device would be wrong. Install another version of torch, and report this one."
            yield Finding(OK if error < LIMITS[dtype] else BAD, f"training, {device}", message, advice)


def find_errors(device: str, dtype: torch.dtype) -> Iterator[tuple[float, str]]:
    """
    Yield how far each model in each layout is from the reference, relative to its norm, and their names. A result that
    is not finite is infinitely far.
    """
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    heads = [[vars(MiniMindConfig(**preset))[name] for name in names] for preset in PRESETS.values()]
    models: dict[str, dict[str, Any]] = {
        "{}/{} heads of {}".format(*sizes): dict(zip(names, sizes, strict=True)) for sizes in heads
    }
    if dtype == torch.float32:
        # In half precision, rounding may choose another expert. On CPUs and Apple GPUs, training loops over experts.
        models["experts"] = {**EXPERTS, "experts": "eager" if device in ("cpu", "mps") else "grouped_mm"}
    for name, fields in models.items():
        for layout in LAYOUTS:
            found = compute_step(device, dtype=dtype, layout=layout, **fields)
            expected = compute_step("cpu", layout=layout, **fields | {"attention": "eager", "experts": "eager"})
            error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
            yield torch.nan_to_num(error, nan=torch.inf).item(), f"{layout}, {name}"


def compute_step(
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    layout: str = LAYOUTS[0],
    attention: str = "packed",
    experts: str = "eager",
    compiles: bool = False,
    **fields: Any,
) -> torch.Tensor:
    """
    Return the loss of a small model and all gradients in one vector, `(1 + num_parameters,)`; for `generation`, the
    logits of the last tokens, `(batch_size * vocab_size,)`.

    Args:
        device (`str`): the type of the device.
        dtype (`torch.dtype`): dtype of autocast; in float32, there is none.
        layout (`str`): one of `LAYOUTS`.
        attention, experts (`str`): the implementations.
        compiles (`bool`): compile the layers and the loss.
        fields: fields of the config.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MiniMindConfig(**sizes | fields, vocab_size=256, max_position_embeddings=512, initializer_range=0.1)
    config._attn_implementation, config._experts_implementation = attention, experts
    # Weights and ids come from the CPU, so that both devices get the same.
    model = MiniMindForCausalLM(config)
    inputs = {name: tensor.to(device) for name, tensor in _lay_out(layout).items()}
    model = model.to(device)
    for part in (*model.model.layers, model.lm_head) if compiles else ():
        part.compile()
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        if layout == "generation":
            return _predict_last(model, inputs).flatten().float().cpu()
        # The head computes the loss by itself only without logits.
        loss = model(**inputs, skip_logits=compiles).loss
    loss.backward()
    return torch.cat([loss.detach().view(1), *(weight.grad.flatten() for weight in model.parameters())]).cpu()


def _lay_out(layout: str) -> dict[str, torch.Tensor]:
    """Return a batch of documents of random ids, `(batch_size, seq_len)`, as the model gets it in this layout."""
    documents = torch.randint(256, (sum(LENGTHS),)).split(LENGTHS)
    if layout == "packed documents":
        ids, positions = torch.cat(documents)[None], torch.cat([torch.arange(length) for length in LENGTHS])[None]
        # As in training, the model gets the bounds of the documents: to find them, it would wait for the device.
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        return {"input_ids": ids, "position_ids": positions, "labels": ids, "cu_seq_lens_q": bounds}
    pads = [(max(LENGTHS) - length, 0) for length in LENGTHS]
    ids = torch.stack([F.pad(document, pad) for document, pad in zip(documents, pads, strict=True)])
    mask = torch.stack([F.pad(torch.ones(length), pad).long() for length, pad in zip(LENGTHS, pads, strict=True)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    # Padding predicts nothing, so a document's first token has no label.
    labels = ids.where((mask == 1) & (positions > 0), -100)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}


@torch.no_grad()
def _predict_last(model: MiniMindForCausalLM, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """
    Return the logits of the last token of each sequence, `(batch_size, vocab_size)`, after a cache of those before it.
    """
    cache = DynamicCache()
    ids, mask, positions = (inputs[name] for name in ("input_ids", "attention_mask", "position_ids"))
    for part in (slice(None, -1), slice(-1, None)):
        # The mask covers the tokens in the cache, too.
        logits = model(ids[:, part], mask[:, : part.stop], positions[:, part], cache=cache).logits
    return logits[:, -1]

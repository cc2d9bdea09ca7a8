"""
The size of a micro-batch on a GPU (`--fit_micro_batch`, which the presets turn on).

The host enqueues the kernels of each micro-batch one by one, so a step of a few large micro-batches takes the host
less time than a step of many small ones. The sum over a step is the same (`masked_loss_trainer.py`).
"""

from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from ..model.configuration_minimind import MiniMindConfig
from ..rows.collators import DataCollatorForPackedRows
from ..runtime.stages import STAGES
from .training_arguments import LMTrainingArguments


if TYPE_CHECKING:
    from .run import Run

# Share of the free memory that the estimate may fill. The rest is for chunks of logits, the optimizer's temporary
# tensors, and blocks that the allocator cannot reuse.
_FILLED_SHARE = 0.8
# Weights, gradients and AdamW's two moments in float32, and the copy of the weights in bfloat16.
_BYTES_PER_PARAMETER = 18


def activation_bytes_per_token(config: MiniMindConfig) -> int:
    """
    Return the bytes that a token takes on a GPU between forward and backward, with compiled layers in bfloat16.

    The estimate is a bound, compared with the peaks of torch's allocator (docs/performance.md).
    """
    hidden, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
    if config.num_experts:
        num_active = config.num_experts_per_tok + config.num_shared_experts
        # Each chosen expert has a sorted copy of the token and an output.
        width, copies = num_active * config.moe_intermediate_size, 10 * config.num_experts_per_tok
    else:
        width, copies = config.intermediate_size, 0
    # Gate, up and their product; the residual stream in float32, its norms, query and output; key and value.
    per_layer = 6 * width + (18 + copies) * hidden + 8 * keys
    return config.num_hidden_layers * per_layer + 24 * hidden


def fitting_micro_batch(config: MiniMindConfig, *, num_parameters: int, row_length: int, rows: int, free: int) -> int:
    """
    Return the largest divisor of `rows` whose micro-batch fits into `free` bytes by the estimate, at least 1.

    Args:
        config ([`MiniMindConfig`]): the config of the model.
        num_parameters (`int`): its number of parameters.
        row_length (`int`): tokens of a row.
        rows (`int`): rows that a process trains on in a step.
        free (`int`): free bytes of the device, before the model is on it.
    """
    left = _FILLED_SHARE * free - _BYTES_PER_PARAMETER * num_parameters
    most = left // (row_length * activation_bytes_per_token(config))
    return max(size for size in range(1, rows + 1) if rows % size == 0 and size <= max(most, 1))


def depends_on_micro_batch(args: LMTrainingArguments, config: MiniMindConfig) -> bool:
    """Return whether the size of a micro-batch changes an update, by the order of the rows or by the loss."""
    is_per_batch = config.num_experts > 0 and config.router_aux_loss_level == "batch"
    return args.train_sampling_strategy == "group_by_length" or is_per_batch or args.loss_depends_on_micro_batch


def choose_micro_batch(
    run: "Run", model: PreTrainedModel, train: object, collator: DataCollatorForPackedRows | None
) -> tuple[int, int, int] | None:
    """
    Return rows per micro-batch, the number of micro-batches and the free bytes, for the memory of the smallest GPU and
    the same rows per step. All ranks must call this function.

    Return `None` where the estimate does not hold or the result would depend on the size of a micro-batch: without
    compiled layers in bfloat16, with recomputed activations, for adapters and teachers, for streams and sampling by
    length, and for a router loss per batch.
    """
    args, config = run.args, model.config
    # A model with an adapter is no `PreTrainedModel`.
    is_whole = isinstance(model, PreTrainedModel)
    is_estimated = args.device.type == "cuda" and args.compiles_layers and args.bf16 and is_whole
    recomputes = args.activation_checkpointing or config.dropout > 0
    is_packed = isinstance(collator, DataCollatorForPackedRows) and isinstance(train, Dataset)
    row_length = collator.max_length if is_packed and STAGES[run.facts.recipe].fits_micro_batch else None
    if (
        not (args.fit_micro_batch and is_estimated and row_length)
        or recomputes
        or depends_on_micro_batch(args, config)
    ):
        return None
    free = min(run.ranks.gather(torch.cuda.mem_get_info(args.device)[0]))
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    size = fitting_micro_batch(
        config, num_parameters=model.num_parameters(), row_length=row_length, rows=rows, free=free
    )
    return size, rows // size, free

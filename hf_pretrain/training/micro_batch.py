"""
The memory of a micro-batch, and its size on a GPU (`--fit_micro_batch`).

The host enqueues the kernels of each micro-batch one by one, so a step of a few large micro-batches takes the host
less time than a step of many small ones. The sum over a step is the same (`masked_loss_trainer.py`).

The estimate holds for compiled layers in bfloat16 with AdamW or Muon. docs/memory.md shows its parts, and
tests/training/test_micro_batch.py compares it with the peaks of torch's allocator.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from datasets import Dataset

from ..loading.adapters import base_model_of, is_adapted
from ..model.configuration_minimind import MiniMindConfig
from ..model.loss import MAX_LOGITS, MIN_CHUNK
from ..rows.collators import DataCollatorForPackedRows
from ..runtime.stages import STAGES, Stage
from .optimizers import OPTIMIZERS, is_matrix_of_muon
from .training_arguments import LMTrainingArguments


if TYPE_CHECKING:
    from .run import Run

# Share of the free memory that the estimate may fill. The rest is for blocks that the allocator cannot reuse, and for
# what the estimate leaves out.
_FILLED_SHARE = 0.8
# cuBLAS keeps two workspaces of 32 MiB on an H100.
_WORKSPACE_BYTES = 2**26
# bitsandbytes, NF4 with double quantization: 4 bits, a scale of 8 bits for 64 weights, and one in float32 for 256
# scales.
BYTES_PER_4BIT_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
# For each logit of a chunk: logits, their gradient and a temporary tensor in bfloat16. With a teacher, logits,
# log-probabilities and gradients of both models in float32, and the products of the divergence.
_BYTES_PER_LOGIT = {"own": 6, "teacher": 30}


class Weights(NamedTuple):
    """
    Numbers of weights on a GPU.

    Args:
        trained (`float`): in float32, with a gradient and two moments, and a copy in bfloat16.
        frozen (`float`): under an adapter, in float32, with a copy in bfloat16.
        quantized (`float`): under an adapter, in 4 bits.
        reference (`float`): of a reference model or a teacher, in float32.
        with_one_moment (`float`): of the trained ones, those of Muon.
    """

    trained: float
    frozen: float = 0
    quantized: float = 0
    reference: float = 0
    with_one_moment: float = 0

    @property
    def kept_bytes(self) -> float:
        """Bytes that stay between steps."""
        trained = 12 * self.trained - 4 * self.with_one_moment
        return trained + 4 * (self.frozen + self.reference) + BYTES_PER_4BIT_WEIGHT * self.quantized


def layer_bytes_per_token(config: MiniMindConfig, *, mask_length: int = 0, has_adapter: bool = False) -> int:
    """
    Return the bytes that a token takes in a layer between forward and backward.

    Args:
        config ([`MiniMindConfig`]): the config of the model.
        mask_length (`int`): tokens of a row with an attention mask, as in TRL's trainers; 0 for packed sequences.
        has_adapter (`bool`): whether linear layers have adapters, which keep their inputs and products.
    """
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    if config.num_experts:
        num_active = config.num_experts_per_tok + config.num_shared_experts
        # Each chosen expert has a sorted copy of the token and an output.
        width, copies = num_active * config.moe_intermediate_size, 10 * config.num_experts_per_tok
    else:
        width, copies = config.intermediate_size, 0
    # The norms of queries and keys keep their inputs.
    normed = 2 * (queries + keys) if config.qk_norm else 0
    # The kernel with a mask repeats keys and values for all heads.
    keys = queries if mask_length else keys
    # Gate, up and their product; the residual stream in float32, two norms and the output; queries and attention; keys
    # and values; the mask.
    residual = 10 + copies + (3 if has_adapter else 0)
    return 6 * width + residual * config.hidden_size + 4 * (queries + keys) + normed + 2 * mask_length


def activation_bytes(config: MiniMindConfig, tokens: int, *, recomputes: bool = False, **layer: Any) -> int:
    """
    Return what stays between forward and backward. Recomputed layers keep their inputs in float32. `layer` are the
    options of [`layer_bytes_per_token`].
    """
    one = 4 * config.hidden_size if recomputes else layer_bytes_per_token(config, **layer)
    # Embeddings in float32, and the last norm and the head's input in bfloat16.
    return tokens * (config.num_hidden_layers * one + 8 * config.hidden_size)


def loss_bytes(config: MiniMindConfig, tokens: int, head: str, *, trains_head: bool = True) -> int:
    """
    Return what a head and its loss take at most. The gradient of a trained head is computed in float32 beside the one
    that accumulates, and our head multiplies it by the gradient of the loss.

    Args:
        head (`str`): one of `own`, `teacher`, `trl` and `score`.
    """
    gradient = 4 * config.vocab_size * config.hidden_size if trains_head else 0
    if head not in _BYTES_PER_LOGIT:
        # TRL's tile in bfloat16 is as wide for a small vocabulary. The gradient of the head's input is in float32. A
        # reward model has no logits.
        tile = 2 * min(tokens, 4096) * 32768 + 4 * tokens * config.hidden_size
        return tile + gradient if head == "trl" else 0
    chunk = config.vocab_size * min(tokens, max(MIN_CHUNK, MAX_LOGITS[0] // config.vocab_size))
    return max(_BYTES_PER_LOGIT[head] * chunk + gradient, 2 * gradient)


def cache_bytes(config: MiniMindConfig, tokens: int) -> int:
    """Return the bytes of keys and values of all layers in bfloat16, while GRPO generates."""
    return 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens


def needed_bytes(
    config: MiniMindConfig,
    weights: Weights,
    tokens: int,
    *,
    head: str = "own",
    mask_length: int = 0,
    cached_tokens: int = 0,
    accumulates: bool = True,
    recomputes: bool = False,
) -> float:
    """
    Return the peak of a training step in bytes: at the loss, in the backward pass of a recomputed layer, or while
    completions are generated.

    Args:
        config ([`MiniMindConfig`]): the config of the model.
        weights ([`Weights`]): its weights and those beside it.
        tokens (`int`): tokens of a micro-batch.
        head (`str`), mask_length (`int`), recomputes (`bool`): as in the functions above.
        cached_tokens (`int`): tokens of all completions that are generated at once, with their prompts.
        accumulates (`bool`): whether the gradients of other micro-batches are kept meanwhile.
    """
    kept, copied = weights.kept_bytes + _WORKSPACE_BYTES, weights.trained + weights.frozen
    # Autocast keeps the copies of a reference model, which is not compiled.
    copies = 2 * (copied + (weights.reference if head == "trl" else 0))
    loss = loss_bytes(config, tokens, head, trains_head=not weights.frozen)
    options: dict[str, Any] = {"mask_length": mask_length, "has_adapter": weights.frozen > 0}
    layers = activation_bytes(config, tokens, recomputes=recomputes, **options)
    # Its activations, and the gradients of some of them.
    layer = 1.25 * tokens * layer_bytes_per_token(config, **options) if recomputes else 0
    training = (4 * weights.trained if accumulates else 0) + (0 if recomputes else copies) + layers + max(loss, layer)
    return kept + max(training, copies + cache_bytes(config, cached_tokens))


def fitting_micro_batch(needed: Callable[[int], float], *, rows: int, free: int) -> int:
    """
    Return the largest divisor of `rows` whose micro-batch fits into `free` bytes by the estimate, at least 1.

    Args:
        needed (`Callable`): returns [`needed_bytes`] for a number of rows per micro-batch.
        rows (`int`): rows that a process trains on in a step.
        free (`int`): free bytes of the device, before the model is on it.
    """
    sizes = [size for size in range(2, rows + 1) if rows % size == 0 and needed(size) <= _FILLED_SHARE * free]
    return max(sizes, default=1)


def depends_on_micro_batch(args: LMTrainingArguments, config: MiniMindConfig) -> bool:
    """Return whether the size of a micro-batch changes an update, by the order of the rows or by the loss."""
    is_per_batch = config.num_experts > 0 and config.router_aux_loss_level == "batch"
    return args.train_sampling_strategy == "group_by_length" or is_per_batch or args.loss_depends_on_micro_batch


def choose_micro_batch(run: "Run", model: Any, data: Any) -> tuple[int, int, int] | None:
    """
    Return rows per micro-batch, the number of micro-batches and the free bytes, for the memory of the smallest GPU and
    the same rows per step. All ranks must call this function.

    Return `None` where the estimate does not hold or the result would depend on the size of a micro-batch: without
    compiled layers in bfloat16, with dropout or tools, for streams, for rows of no fixed length or
    sampled by length, for experts outside pretraining and fine-tuning, for adapters of experts, for other adapters
    than plain LoRA, and for losses per micro-batch. So it is for 4 bits with recomputed layers in other stages than
    fine-tuning.

    Args:
        run ([`~training.run.Run`]), model ([`~transformers.PreTrainedModel`] or peft model): as in
            [`~training.settling.settle`].
        data ([`~rows.preparation.PreparedData`] or [`~training.settling.TrainerData`]): the data of the run.
    """
    args, config = run.args, base_model_of(model).config
    is_estimated = args.device.type == "cuda" and args.compiles_layers and args.bf16 and not args.fixes_micro_batch
    if not (args.fit_micro_batch and is_estimated) or depends_on_micro_batch(args, config):
        return None
    stage = STAGES[run.facts.recipe]
    length = _row_length(args, data, stage)
    # The descriptions of tools lengthen prompts. The base of an adapter is a teacher without weights of its own.
    has_tools, keeps_base = (any(vars(part).get(name) for part in run.others) for name in ("tools", "kl_to_base"))
    head = "teacher" if keeps_base else stage.head
    weights, recomputes, is_plain = _count_weights(args, model), args.activation_checkpointing, head == "own"
    if length is None or has_tools or not _is_measured(model, weights, is_plain=is_plain, recomputes=recomputes):
        return None
    # A quantized model is on the GPU already, as a teacher is, which the estimate leaves out.
    held = sum(weight.nbytes for weight in model.parameters() if weight.device.type == "cuda")
    free = min(run.ranks.gather(torch.cuda.mem_get_info(args.device)[0] + held))
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps

    def needed(size: int) -> float:
        options = {"mask_length": 0 if args.has_masked_loss else length, "recomputes": recomputes}
        options |= {"head": head, "cached_tokens": rows * length if stage.generates else 0}
        tokens = size * length * stage.num_sequences
        return needed_bytes(config, weights, tokens, accumulates=size < rows, **options)

    size = fitting_micro_batch(needed, rows=rows, free=free)
    return size, rows // size, free


def _row_length(args: LMTrainingArguments, data: Any, stage: Stage) -> int | None:
    """Return the largest number of tokens of a row, or of each sequence of a pair; `None` if it is unknown."""
    if not isinstance(data.train, Dataset):
        return None
    if isinstance(data.collator, DataCollatorForPackedRows):
        return data.collator.max_length
    given = vars(args)
    if stage.num_sequences > 1:
        return given["max_length"]
    if not stage.generates or not given["max_completion_length"]:
        return None
    # Characters stand for tokens: rendering all prompts takes long.
    longest = max(data.train["prompt"], key=lambda prompt: len(str(prompt)))
    options = {"add_generation_prompt": True, "return_dict": False, **(given["chat_template_kwargs"] or {})}
    return len(data.tokenizer.apply_chat_template(longest, **options)) + given["max_completion_length"]


def _is_measured(model: Any, weights: Weights, *, is_plain: bool, recomputes: bool) -> bool:
    """Return whether the estimate has been compared with peaks. `is_plain`: pretraining or fine-tuning."""
    config = base_model_of(model).config
    if is_adapted(model):
        adapter = model.peft_config[model.active_adapter]
        if adapter.use_dora or adapter.lora_dropout or adapter.target_parameters or adapter.modules_to_save:
            return False
    # With 4 bits and recomputed layers, DPO took 16% more than the estimate.
    is_far = not is_plain and recomputes and weights.quantized > 0
    has_other_experts = config.num_experts > 0 and (recomputes or not is_plain)
    return not (is_far or has_other_experts or config.dropout > 0)


def _count_weights(args: LMTrainingArguments, model: Any) -> Weights:
    """Return the numbers of weights of a run. The reference of an adapter is the model without it."""
    named, given = list(model.named_parameters()), vars(args)
    trained = sum(weight.numel() for _, weight in named if weight.requires_grad)
    frozen = sum(weight.numel() for _, weight in named if weight.is_floating_point()) - trained
    # A byte holds two.
    quantized = 2 * sum(weight.numel() for _, weight in named if not weight.is_floating_point())
    has_reference = given.get("beta") and not (is_adapted(model) or given.get("precompute_ref_log_probs"))
    with_one_moment = 0
    if OPTIMIZERS[args.optim_preset].build is not None:
        with_one_moment = sum(weight.numel() for name, weight in named if is_matrix_of_muon(name, weight))
    return Weights(trained, frozen, quantized, trained if has_reference else 0, with_one_moment)

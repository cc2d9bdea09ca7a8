"""
What a run says when its memory does not suffice: what was tried, what was free, and the flags that fit.

The flags are tried, not calculated. The micro-batch that failed is still at hand; with fewer rows, with recomputed
activations or cut shorter, it either passes through the model and back, or fails again. This needs whole weights on
the rank that failed, and no other rank. Where there are none (ZeRO, FSDP, tensor parallelism), or no micro-batch (in
an update, or while completions are generated), the message names what needs less memory, untried.
"""

import gc
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, send_to_device
from torch.distributed.tensor import DTensor

from ..checkpoints.directory import newest_checkpoint
from ..loading.adapters import AdapterArguments, base_model_of
from ..rows.collators import DataCollatorForPackedRows
from ..runtime.command_line import describe_lack, is_lack_of_memory
from ..runtime.errors import OutOfMemory


if TYPE_CHECKING:
    from ..training.base_trainer import RunTrainer


# The methods of Trainer whose frames hold a micro-batch.
_TRAINING, _EVALUATION = "training_step", "prediction_step"
_SHORTEST = 64


def explain(trainer: "RunTrainer", error: BaseException) -> OutOfMemory:
    """
    Return the error that says what to do after `error`, a lack of memory in a run, which cannot go on afterwards.

    Args:
        trainer ([`~training.base_trainer.RunTrainer`]): the trainer of the run.
        error (`Exception`): what an allocator raised.
    """
    phase, inputs = _find_batch(error)
    # The frames hold what the failed step has allocated.
    traceback.clear_frames(error.__traceback__)
    trainer.model.zero_grad(set_to_none=True)
    where = "In an evaluation" if phase == _EVALUATION else f"In step {trainer.state.global_step + 1}"
    tried: dict[str, bool] = {}
    if inputs is not None and _is_whole(trainer):
        # A user's own collator may make batches that cannot be cut. No error of a trial may hide the lack of memory.
        with suppress(Exception):
            tried.update(_try_flags(trainer, phase, inputs))
    fitting, in_vain = ([flags for flags, fits in tried.items() if fits is each] for each in (True, False))
    advice = f"These do not fit either: {'; '.join(in_vain)}. " if in_vain else ""
    if fitting:
        advice += f"Each of these fits, the cheapest first: {'; '.join(fitting)}"
    else:
        names = {flags.split()[0] for flags in in_vain}
        remedies = [flags for flags in _name_remedies(trainer, phase) if flags.split()[0] not in names]
        advice += f"Try one of these, the cheapest first: {'; '.join(remedies)}"
    args = trainer.args
    saved = None if args.dry_run else newest_checkpoint(args.output_dir)
    resume = "start again with the same command and these flags"
    if saved is not None:
        resume = f"{saved} is intact: repeat the command with these flags and --resume_from_checkpoint auto"
    return OutOfMemory(f"{where}: {describe_lack(error)}. {advice}. Then {resume}.")


def _find_batch(error: BaseException) -> tuple[str, dict[str, Any] | None]:
    """Return the method of Trainer that an error has left, and its micro-batch, if there is one."""
    phase = ""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if (name := frame.f_code.co_name) in ("evaluate", "on_evaluate"):
            # Questions are answered in callbacks.
            return _EVALUATION, None
        phase = phase or (name if name in (_TRAINING, _EVALUATION) else "")
        # Trainer deletes the micro-batch before the backward pass, and its caller has it. In GRPO, that are prompts.
        if phase and isinstance(inputs := frame.f_locals.get("inputs"), Mapping):
            return phase, dict(inputs)
    return phase, None


def _is_whole(trainer: "RunTrainer") -> bool:
    """Return whether a rank can compute a loss by itself."""
    weights = trainer.model.parameters()
    return not (
        trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or any(isinstance(w, DTensor) for w in weights)
    )


def _try_flags(trainer: "RunTrainer", phase: str, inputs: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield flags, the cheapest first, and whether a micro-batch passes with them."""
    args, model = trainer.args, base_model_of(trainer.accelerator.unwrap_model(trainer.model))
    size = args.per_device_train_batch_size if phase == _TRAINING else args.per_device_eval_batch_size
    fewer = _divisors(size)

    def passes(rows: int, length: int | None = None) -> bool:
        # The model finds the bounds of the documents from `position_ids`, too.
        whole = {name: each for name, each in inputs.items() if not name.startswith(("cu_seq_lens", "max_length"))}
        batch = {name: _cut(each, rows, size, length) for name, each in whole.items()}
        return _passes(trainer, batch, is_training=phase == _TRAINING)

    with _alone(trainer), torch.compiler.set_stance("force_eager"):
        rows = next(filter(passes, fewer), 0)
        if fewer:
            yield _rows_flags(trainer, phase, rows or 1), rows > 0
        if phase == _EVALUATION:
            return
        if not args.activation_checkpointing:
            with _recomputing(model):
                more = next(filter(passes, (each for each in (size, *fewer) if each > rows)), 0)
            if more > 0:
                # Typed sizes are kept. Otherwise, `--fit_micro_batch` would choose others.
                yield f"--activation_checkpointing {_rows_flags(trainer, phase, more)}", True
            elif not rows:
                yield "--activation_checkpointing", False
        collator = trainer.data_collator
        if isinstance(collator, DataCollatorForPackedRows) and collator.max_length:
            lengths = [collator.max_length >> n for n in range(1, 8) if collator.max_length >> n >= _SHORTEST]
            length = next((each for each in lengths if passes(size, each)), None)
            if lengths:
                flags = f"--max_length {length or lengths[-1]} {_rows_flags(trainer, phase, size)}, in a new run"
                yield flags, length is not None


def _divisors(size: int) -> list[int]:
    """Return the smaller sizes that give the same rows per step, the largest first."""
    return [rows for rows in range(size // 2, 0, -1) if size % rows == 0]


def _cut(value: Any, rows: int, size: int, length: int | None) -> Any:
    """Return the first of the `size` rows of a tensor, and their first tokens. A preference has two sequences."""
    if not isinstance(value, torch.Tensor) or not value.dim() or len(value) % size:
        return value
    cut = value.unflatten(0, (-1, size))[:, :rows].flatten(0, 1)
    return cut[:, :length] if cut.dim() > 1 else cut


def _rows_flags(trainer: "RunTrainer", phase: str, rows: int) -> str:
    args = trainer.args
    if phase == _EVALUATION:
        return f"--per_device_eval_batch_size {rows}"
    number = args.per_device_train_batch_size * args.gradient_accumulation_steps // rows
    return f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {number}"


def _passes(trainer: "RunTrainer", inputs: dict[str, Any], *, is_training: bool) -> bool:
    """Return whether a micro-batch passes through the model and back, beside the optimizer's moments."""
    model = trainer.accelerator.unwrap_model(trainer.model).train(is_training)
    weights = [each for each in model.parameters() if each.requires_grad]
    has_moments = trainer.optimizer is not None and len(trainer.optimizer.state) > 0
    held: list[Any] = []
    try:
        # The first update allocates the moments. A step of several micro-batches accumulates gradients.
        held += [torch.zeros_like(each) for each in weights if is_training for _ in ("g" if has_moments else "gmv")]
        inputs = send_to_device(inputs, trainer.args.device)
        with torch.set_grad_enabled(is_training), trainer.compute_loss_context_manager():
            held.append(trainer.compute_loss(model, inputs))
        if is_training:
            # Unlike `backward`, it calls no hooks of DDP, which would wait for other ranks.
            held += torch.autograd.grad(held[-1], weights, allow_unused=True)
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return False
    finally:
        held.clear()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


@contextmanager
def _recomputing(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def _alone(trainer: "RunTrainer") -> Iterator[None]:
    """Let collectives of accelerate end at once: the other ranks wait in another one until the launcher ends them."""
    states = [vars(PartialState()), vars(trainer.accelerator.state)]
    alone = {"distributed_type": DistributedType.NO, "num_processes": 1, "process_index": 0}
    before = [{name: state[name] for name in alone} for state in states]
    for state in states:
        state.update(alone)
    try:
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.update(values)


def _name_remedies(trainer: "RunTrainer", phase: str) -> Iterator[str]:
    """Yield flags that need less memory and are not tried, the cheapest first."""
    args, collator = trainer.args, trainer.data_collator
    size = args.per_device_eval_batch_size if phase == _EVALUATION else args.per_device_train_batch_size
    if size > 1:
        yield _rows_flags(trainer, phase or _TRAINING, _divisors(size)[0])
    if phase != _EVALUATION and not args.activation_checkpointing:
        yield "--activation_checkpointing"
    if length := getattr(collator, "max_length", None) or vars(args).get("max_length"):
        yield f"--max_length {length // 2}, in a new run"
    for adapter in (each for each in trainer.run.others if isinstance(each, AdapterArguments)):
        if not adapter.use_peft:
            yield "--use_peft, in a new run"
        if not adapter.load_in_4bit and args.device.type == "cuda":
            yield "--use_peft --load_in_4bit, in a new run"
    if not trainer.is_deepspeed_enabled:
        yield "--ds zero3_offload of hf-pretrain"

"""
Where the time of a training step goes. `bench.py` writes the table into its record.

torch's profiler records the operators of some steps of `MaskedLossTrainer`. Hooks mark the modules whose forward pass
runs, and autograd's sequence numbers lead from an operator of the backward pass to the module of its forward pass.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from benchmarks import programs
from benchmarks.programs import NUM_WARMUP_STEPS, Setting
from hf_pretrain.model import decoder_layer
from hf_pretrain.model.decoder_layer import MiniMindAttention, MiniMindRMSNorm
from hf_pretrain.model.mlp import MiniMindExperts, MiniMindMLP, MiniMindTopKRouter
from hf_pretrain.model.modeling_minimind import MiniMindLMHead


MATRIX_PRODUCTS, CASTS = "matrix products of the layers", "casts of weights"
# The first class that fits names the part. A head is a `Linear` too.
PARTS: dict[type[nn.Module], str] = {
    MiniMindLMHead: "head and loss",
    nn.Linear: MATRIX_PRODUCTS,
    MiniMindRMSNorm: "norms",
    MiniMindAttention: "attention",
    MiniMindMLP: "elementwise operators of the MLP",
    MiniMindTopKRouter: "router",
    MiniMindExperts: "experts",
    nn.Embedding: "embedding",
}
# Ranges that torch itself records, by the beginning of their names.
RANGES = {"Optimizer.": "optimizer", "enumerate(DataLoader)": "data"}
_PREFIX = "part: "


class _Recorder(TrainerCallback):
    """Record the steps after the warm-up."""

    def __init__(self, num_steps: int):
        self.num_steps = num_steps
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == NUM_WARMUP_STEPS:
            self.profiler.start()
            self.seconds = time.perf_counter()
        elif state.global_step == NUM_WARMUP_STEPS + self.num_steps:
            self.seconds = time.perf_counter() - self.seconds
            self.profiler.stop()


def _mark(function: Callable, part: str) -> Callable:
    """Return the function with its calls marked as a part of the step."""

    def marked(*args, **kwargs):
        with record_function(_PREFIX + part):
            return function(*args, **kwargs)

    return marked


def _mark_modules(model: nn.Module, stack: ExitStack) -> None:
    """Mark the forward passes of the modules in `PARTS` until the stack is closed."""
    open_ranges: list[record_function] = []

    def enter(part: str) -> None:
        open_ranges.append(record_function(_PREFIX + part))
        open_ranges[-1].__enter__()

    for module in model.modules():
        part = next((part for kind, part in PARTS.items() if isinstance(module, kind)), None)
        if part is not None:
            before = module.register_forward_pre_hook(lambda *_, part=part: enter(part))
            after = module.register_forward_hook(lambda *_: open_ranges.pop().__exit__(None, None, None))
            stack.callback(before.remove)
            stack.callback(after.remove)


def _find_parts(events: list[FunctionEvent]) -> dict[str, float]:
    """Return the seconds of each part: the time in its operators, without the operators that they call."""
    part_of: dict[int, str] = {}

    def find(event: FunctionEvent | None) -> str:
        """Return the part of an operator of the forward pass, or of a range; "" for all others."""
        while event is not None:
            if event.name.startswith(_PREFIX):
                return event.name.removeprefix(_PREFIX)
            for beginning, part in RANGES.items():
                if event.name.startswith(beginning):
                    return part
            # Autograd gives an operator of the backward pass the number of its forward pass, and scope 1.
            if event.scope == 1 and event.sequence_nr in part_of:
                return part_of[event.sequence_nr]
            event = event.cpu_parent
        return ""

    for event in events:
        if event.scope != 1 and event.sequence_nr >= 0 and (part := find(event)):
            part_of.setdefault(event.sequence_nr, part)
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        part = find(event)
        if part == MATRIX_PRODUCTS and event.name == "aten::copy_":
            part = CASTS
        seconds[part or "other"] += event.self_cpu_time_total / 1e6
    return seconds


def profile_step(setting: Setting, *, steps: int, **arguments: Any) -> dict[str, float]:
    """
    Return the share of each part in the time of a step, the largest first. `other` holds the residual connections, the
    sums of gradients, and all time outside of operators.

    Args:
        setting ([`Setting`]): the model, data and precision.
        steps (`int`): number of steps to profile.
        arguments: training arguments.
    """
    program = programs.ours(setting, **arguments)
    trainer, recorder = program.trainer, _Recorder(steps)
    trainer.add_callback(recorder)
    rotate, clip = decoder_layer.apply_rotary_pos_emb, trainer.accelerator.clip_grad_norm_
    with ExitStack() as stack:
        _mark_modules(trainer.model, stack)
        stack.enter_context(patch.object(decoder_layer, "apply_rotary_pos_emb", _mark(rotate, "rotations")))
        stack.enter_context(patch.object(trainer.accelerator, "clip_grad_norm_", _mark(clip, "gradient clipping")))
        program(steps)
    seconds = _find_parts(recorder.profiler.events())
    seconds["other"] += recorder.seconds - sum(seconds.values())
    return {part: seconds[part] / recorder.seconds for part in sorted(seconds, key=lambda part: -seconds[part])}


__all__ = ["profile_step"]

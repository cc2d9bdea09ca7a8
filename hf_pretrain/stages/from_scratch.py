"""
Plan and run the stages from text to a chat model within a budget of time (`recipes/from_scratch.py`).

`plan.json` in the output directory holds the plan and the seconds that were used, so a run that was killed goes on.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import hf_pretrain_cli

from ..data.corpora import EMBEDDED_CORPORA
from ..data.inspection import MAX_PASSES, TOKENS_PER_PARAMETER
from ..data.sources import EMBEDDED_SOURCES, find_sources
from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..model.presets import PRESETS
from ..run_directory.directory import RunDirectory
from ..run_directory.history import RunHistory
from ..runtime.devices import default_device_type, has_bfloat16_units
from ..runtime.errors import UserError
from ..runtime.json_files import read_json
from ..runtime.minimind_flags import translate_minimind
from ..runtime.parser import recipe_parser
from ..runtime.writing import written_whole
from ..training.budgets import whole_model


PLAN_NAME = "plan.json"
# Presets from small to large. Choose the one whose tokens per parameter, in the time on this machine, come nearest to
# the best ratio (https://arxiv.org/abs/2203.15556).
CANDIDATES = ("tiny", "minimind2-small", "minimind2", "0.5B", "1B")
# Share of each stage in the time that is left before it (docs/performance.md).
SHARES = {"pretrain": 0.3, "sft": 1.0}
# Each stage trains at least for this share of the time, even if the machine is slower than planned.
LEAST_SHARE = 0.1
# Seconds of a stage besides its training.
START_SECONDS = 20.0
# Up to this budget, no stage evaluates before its first step.
SHORT_SECONDS = 600.0
# Weights, gradients and AdamW's moments in float32, the copy in bfloat16, and as much for a small micro-batch.
_BYTES_PER_PARAMETER = 24
# Bytes of the data per token. In a file of conversations, there are about ten.
_BYTES_PER_TOKEN = 4


def measure_pace(preset: str, device_type: str) -> float:
    """Return the tokens per second that a preset trains on, on all devices of this machine together."""
    model = MiniMindForCausalLM(MiniMindConfig(**PRESETS[preset])).to(device_type)
    ids = torch.randint(model.config.vocab_size, (8, 256), device=device_type)
    # The first step also allocates memory and loads kernels.
    for _ in range(2):
        start = time.monotonic()
        with torch.autocast(device_type, torch.bfloat16, enabled=has_bfloat16_units(device_type)):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        # Reading a gradient waits for the device.
        model.lm_head.weight.grad.sum().item()
        seconds = time.monotonic() - start
    if device_type == "cpu":
        return ids.numel() / seconds
    # The stages need the memory, which torch would keep for this process.
    del model, loss
    torch.accelerator.empty_cache()
    return torch.accelerator.device_count() * ids.numel() / seconds


def count_bytes(flags: list[str]) -> int:
    """Return the bytes of the files that the flags of a stage name. The size of Hub datasets is unknown: 0."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dataset_name", nargs="+", default=["embedded"])
    total = 0
    for name in parser.parse_known_args(flags)[0].dataset_name:
        for source in find_sources(name) or ():
            part = EMBEDDED_SOURCES.get(source)
            path = EMBEDDED_CORPORA[part].find() if part else Path(source)
            total += sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*.*")))
    return total


def split_flags(stage: str, text: str) -> list[str]:
    """
    Return the flags of a stage as a shell reads them. Raise `UserError` for flags that the stage would refuse, and for
    data that are not there.
    """
    try:
        flags = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--{stage}_args {text!r} cannot be read: {error}. Close each quote.") from None
    _, rest = hf_pretrain_cli.make_parser().parse_known_args(flags)
    recipe_parser(hf_pretrain_cli.RECIPES / f"{stage}.py").parse_args(translate_minimind(rest, stage))
    count_bytes(flags)
    return flags


class Budget:
    """
    The clock and the plan of a run.

    Args:
        directory (`Path`): the output directory.
        seconds (`float`): the time of all commands together, over all launches.
    """

    def __init__(self, directory: Path, seconds: float):
        self.path, self._clock = directory / PLAN_NAME, time.monotonic()
        self.plan: dict[str, Any] = {"used_seconds": 0.0, "preset": None, "pace": None, "flags": {}}
        if self.path.is_file():
            # A plan of another kind adds nothing.
            self.plan |= read_json(self.path)
        self.plan["seconds"] = seconds

    def save(self) -> None:
        """Write the plan with the seconds until now."""
        started, self._clock = self._clock, time.monotonic()
        self.plan["used_seconds"] += self._clock - started
        with written_whole(self.path.parent) as scratch:
            (scratch / PLAN_NAME).write_text(json.dumps(self.plan, indent=1) + "\n", encoding="utf-8")

    def run(self, *words: str) -> None:
        """Run a stage in its directory. If it fails or stops, exit with its status."""
        # By its path: `-m` would let Python import modules of the working directory in place of its own.
        command = [sys.executable, hf_pretrain_cli.__file__, *words, "--output_dir", str(self.path.parent / words[0])]
        # If this process is killed, the stage stops, too.
        options: dict[str, Any] = {
            "env": os.environ | {"HF_PRETRAIN_PARENTS": "1"},
            "text": True,
            "errors": "replace",
        }
        with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
            # The stage saves a checkpoint and stops.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, frame: process.send_signal(number))
            for line in process.stdout or ():
                print(line, end="", flush=True)
                self.save()
        self.save()
        if process.returncode:
            print(f"{words[0]} ended early. The same command goes on from its newest checkpoint.", file=sys.stderr)
            # A negative one is the signal that ended the stage.
            raise SystemExit(process.returncode if process.returncode > 0 else 128 - process.returncode)

    def choose_preset(self, presets: tuple[str, ...], flags: list[str]) -> None:
        """Choose the preset, and keep its pace."""
        device_type = default_device_type(use_cpu="--use_cpu" in flags)
        free = torch.cuda.mem_get_info()[0] if device_type == "cuda" else psutil.virtual_memory().available
        seconds_left = self.plan["seconds"] - self.plan["used_seconds"]
        found: dict[float, tuple[str, float]] = {}
        for preset in presets:
            number = whole_model(MiniMindConfig(**PRESETS[preset])).num_parameters()
            if found and _BYTES_PER_PARAMETER * number > free:
                print(f"{preset} needs more memory: choosing among the smaller presets.")
                break
            pace = measure_pace(preset, device_type)
            ratio = pace * seconds_left / number / TOKENS_PER_PARAMETER
            found[abs(math.log(max(ratio, 1e-9)))] = preset, pace
            if ratio < 1:
                break
        self.plan["preset"], self.plan["pace"] = found[min(found)]
        self.save()

    def plan_stage(self, stage: str, flags: list[str]) -> None:
        """Give a stage its minutes, and the share of the data that it can train on in this time."""
        # The later stages start, too.
        num_starts = len(SHARES) - list(SHARES).index(stage)
        whole = self.plan["seconds"]
        seconds = max(
            SHARES[stage] * (whole - self.plan["used_seconds"] - num_starts * START_SECONDS), LEAST_SHARE * whole
        )
        present, pace = count_bytes(flags), _BYTES_PER_TOKEN * self.plan["pace"]
        # Read twice as much as the whole time can train on: the steps may be faster than measured, and a tokenizer of
        # little text is worse.
        fraction = min(1.0, 2 * pace * whole / max(present, 1))
        # Both stages leave the same documents out. Less data need less validation.
        validation = self.plan.setdefault("validation_fraction", f"{min(0.01, 0.03 * fraction):.6f}")
        planned = f"--train_fraction {fraction:.4f} --validation_fraction {validation} "
        if 0 < MAX_PASSES * present < pace * seconds:
            planned += f"--num_train_epochs {MAX_PASSES}"
        else:
            planned += f"--max_minutes {seconds / 60:.3f}"
        self.plan["flags"][stage] = planned.split()

    def train(self, stage: str, *flags: str) -> Path:
        """Run a stage to its end, in the time that is left if it has no plan yet, and return its directory."""
        directory = self.path.parent / stage
        if not any("ended" in launch for launch in RunDirectory(directory).launches):
            if stage not in self.plan["flags"]:
                self.plan_stage(stage, list(flags))
            short = ["--eval_on_start", "false"] if self.plan["seconds"] <= SHORT_SECONDS else []
            words = [stage, "--preset", self.plan["preset"], *self.plan["flags"][stage], *short, *flags]
            self.run(*words, "--eval_steps", "0.5", "--save_steps", "0.25", "--resume_from_checkpoint", "auto")
        return directory

    def describe(self, runs: list[RunHistory]) -> list[str]:
        """Return sentences for the page: the time, and what a longer budget would have bought."""
        used, planned = self.plan["used_seconds"], self.plan["seconds"]
        notes = [f"The preset {self.plan['preset']} took {used:,.0f} of {planned:,.0f} seconds, starts included."]
        for run in runs:
            tokens, losses = run.series("eval_loss")
            # Otherwise the flags of the stage leave no validation set, or it had only a few steps.
            if len(losses) > 1:
                half = min(range(len(losses)), key=lambda number: abs(tokens[number] - tokens[-1] / 2))
                notes.append(
                    f"{run.name}: the validation loss fell by {losses[half] - losses[-1]:.3f} in the second half of "
                    "the steps. Twice the time would buy at most as much again, because a part of it comes from the "
                    "learning rate, which falls towards the end."
                )
        return notes

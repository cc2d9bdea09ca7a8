"""Translate the flags of MiniMind's scripts into ours, by the table `minimind_flags.yaml`."""

import itertools
import math
import os
import shlex
import sys
from collections import deque
from pathlib import Path
from typing import Any

import yaml

from ..runtime.command_line import is_main
from ..runtime.errors import UserError


TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# MiniMind's default of its RL scripts.
_NUM_GENERATIONS = "6"
# MiniMind's names of runs that have other names here.
_RUNS = {"full_sft": "sft", "full_dist": "distill"}
# The commands that replace MiniMind's scripts of inference.
_INFERENCE = ("chat", "serve")


def translate_minimind(argv: list[str], stage: str) -> list[str]:
    """
    Replace the flags of MiniMind's scripts, and print the command line that results.

    Args:
        argv (`list[str]`): the words of a command line, with flags of MiniMind or of this package.
        stage (`str`): the stage, such as `grpo`.

    Raises:
        `UserError`: for a flag of MiniMind, or a value, that means nothing here.
    """
    rules = TABLE["answers" if stage in _INFERENCE else "all"] | TABLE.get(stage, {})
    translated: list[str] = []
    collected: dict[str, str] = {}
    words = deque(argv)
    while words:
        flag, is_joined, value = words.popleft().partition("=")
        _check_refused(flag, stage)
        rule = rules.get(flag)
        if rule is None:
            translated.append(flag + is_joined + value)
            continue
        # A switch has no value. `--use_moe` was one in some generations.
        takes_value = not isinstance(rule, str) or "{}" in rule or rule == "collect"
        if takes_value and not is_joined:
            value = words.popleft() if words and not words[0].startswith("--") else "1"
        collected[flag.removeprefix("--")] = value
        translated += _apply(flag, rule, value)
    if collected.keys() <= {"num_generations"}:
        return argv
    if "wandb_project" in collected:
        # transformers passes `--project` to trackio alone.
        os.environ.setdefault("WANDB_PROJECT", collected["wandb_project"])
    translated = _scale_steps(translated) + _complete(translated, collected, stage)
    if is_main():
        print(f"With the names of this package, MiniMind's flags are: {shlex.join(translated)}", file=sys.stderr)
    return translated


def _check_refused(flag: str, stage: str) -> None:
    reason = TABLE["refused"].get(flag)
    # `--max_seq_len` has a meaning in the stages without TRL's sampling.
    if reason and stage not in _INFERENCE and (stage == "grpo" or flag not in TABLE["all"]):
        raise UserError(f"MiniMind's {flag} means nothing here: {reason}.")


def _apply(flag: str, rule: str | dict[str, str], value: str) -> list[str]:
    """Return the words that replace a flag and its value."""
    if rule == "collect":
        return []
    if isinstance(rule, dict):
        rule = rule.get(value, rule.get("*", "refused"))
        if rule == "refused":
            hint = TABLE["otherwise"].get(flag, "leave it out")
            raise UserError(f"MiniMind's {flag} {value} means nothing here: {hint}.")
    return [word.replace("{}", value) for word in rule.split()]


def _scale_steps(words: list[str]) -> list[str]:
    """Turn numbers of micro-batches, after the word `@steps`, into numbers of optimizer steps."""
    accumulation = int(_last(words, "--gradient_accumulation_steps") or 1)
    scaled: list[str] = []
    for word in words:
        if scaled and scaled[-1] == "@steps":
            scaled[-1] = f"{max(1, round(float(word) / accumulation)) if float(word) else 0}"
        else:
            scaled.append(word)
    return scaled


def _last(words: list[str], flag: str) -> str | None:
    """Return the last value of a flag of ours, if it is there."""
    values = [value for name, value in itertools.pairwise(words) if name == flag]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return values[-1] if values else None


def _complete(words: list[str], collected: dict[str, str], stage: str) -> list[str]:
    """Return the words for what MiniMind splits into several flags: the model, its directory, and GRPO's batch."""
    more: list[str] = []
    directory = Path(collected.get("save_dir", collected.get("out_dir", "out")))
    if stage in _INFERENCE:
        model = _find_weights(directory, collected["weight"]) if "weight" in collected else collected.get("load_from")
        return ["--model_name_or_path", model] if model else []
    name = collected.get("save_weight", collected.get("lora_name", ""))
    if name or {"save_dir", "out_dir"} & collected.keys():
        more += ["--output_dir", str(directory / name)]
    if "epochs" in collected and _last(words, "--max_steps") is None:
        # The YAML files of `tiny` limit the steps, which would win over the epochs.
        more += ["--max_steps", "-1"]
    if "lora_name" in collected:
        more.append("--use_peft")
    if "lora_name" in collected and not (_last(words, "--lora_target_modules") or _last(words, "--lora_alpha")):
        # MiniMind adapts the square projections, with scale 1.
        more += ["--lora_target_modules", "q_proj", "o_proj", "--lora_alpha", "16"]
    weights = collected.get("from_weight", collected.get("from_student_weight", "none"))
    if weights != "none":
        more += ["--model_name_or_path", _find_weights(directory, weights)]
        tokenizer = directory.parent / "model"
        if more[-1].endswith(".pth") and (tokenizer / "tokenizer.json").is_file():
            # In MiniMind's checkout, `model` stands beside `out`.
            more += ["--tokenizer_name_or_path", str(tokenizer)]
        base = Path(sys.argv[0]).parent / f"base/{stage}.yaml"
        if base.is_file() and _last(words, "--config") is None:
            # A recipe that starts from other weights takes no preset's settings.
            more += ["--config", str(base)]
    elif not {"--model_name_or_path", "--config"} & {word.partition("=")[0] for word in words}:
        more += _sizes(collected, has_preset=_last(words, "--model_preset") is not None)
    if "from_teacher_weight" in collected:
        more += ["--teacher_name_or_path", _find_weights(directory, collected["from_teacher_weight"])]
    if "batch_size" in collected and stage == "grpo":
        # TRL counts completions, MiniMind prompts.
        collected.setdefault("num_generations", _NUM_GENERATIONS)
        rows = str(int(collected["batch_size"]) * int(collected["num_generations"]))
        more += ["--per_device_train_batch_size", rows, "--per_device_eval_batch_size", rows]
    if "num_generations" in collected:
        more += ["--num_generations", collected["num_generations"]]
    rates = _last(words, "--learning_rate"), _last(words, "--max_grad_norm")
    if stage == "pretrain" and any(rates) and not (_last(words, "--optim_preset") or _last(words, "--optim")):
        # A rate and a clipping of MiniMind's scripts are those of its optimizer.
        more += ["--optim_preset", "adamw"]
    return more


def _sizes(collected: dict[str, str], *, has_preset: bool) -> list[str]:
    """Return the words that name the model of MiniMind's sizes."""
    names = {"dim": "hidden_size", "student_hidden_size": "hidden_size", "hidden_size": "hidden_size"}
    names |= dict.fromkeys(("n_layers", "student_num_layers", "num_hidden_layers"), "num_hidden_layers")
    sizes = {names[name]: value for name, value in collected.items() if name in names}
    is_moe = collected.get("use_moe", collected.get("student_use_moe", "0")).lower() in ("1", "true")
    if not sizes and not is_moe:
        return []
    # MiniMind renamed its sizes when it changed its architecture.
    preset = "minimind2" if {"dim", "n_layers"} & collected.keys() else "minimind3"
    if preset == "minimind3" and "hidden_size" in sizes and not has_preset:
        sizes["intermediate_size"] = str(64 * math.ceil(math.pi * int(sizes["hidden_size"]) / 64))
    words = [] if has_preset else ["--model_preset", f"{preset}-moe" if is_moe else preset]
    overrides = ",".join(f"{name}={value}" for name, value in sizes.items())
    return [*words, *(["--config_overrides", overrides] if overrides else [])]


def _find_weights(directory: Path, name: str) -> str:
    """Return the run, or the file of MiniMind, that MiniMind's name of weights means."""
    files = sorted(map(str, directory.glob(f"{name}_*.pth")))
    # The recipes write `out/sft` by default.
    runs = [directory / name, directory / _RUNS.get(name, name)]
    run = next((run for run in runs if run.is_dir()), None)
    if run is not None or not files:
        return str(run or runs[-1])
    if len(files) > 1:
        raise UserError(f"Several files have the name {name}: {', '.join(files)}. Pass one with --model_name_or_path.")
    return files[0]

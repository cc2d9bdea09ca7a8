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

from .command_line import is_main
from .errors import UserError
from .named import load_named
from .secret_words import hide_secrets


TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# MiniMind's names of runs that have other names here.
_RUNS = {"full_sft": "sft", "full_dist": "distill"}
# The commands that replace MiniMind's scripts of inference. `evaluate` also knows the flags of training.
_INFERENCE = ("chat", "serve")
_ANSWERING = (*_INFERENCE, "evaluate")
# The stages whose default optimizer is not MiniMind's.
_WITH_MUON = ("pretrain",)
_PRESET_FLAGS = {"--preset", "--model_preset"}
_RATES = {"--learning_rate", "--max_grad_norm"}
_SIZES = {
    **dict.fromkeys(("dim", "hidden_size", "student_hidden_size"), "hidden_size"),
    **dict.fromkeys(("n_layers", "num_hidden_layers", "student_num_layers"), "num_hidden_layers"),
}


def translate_minimind(argv: list[str], stage: str) -> list[str]:
    """
    Replace the flags of MiniMind's scripts, and print the command line that results.

    Args:
        argv (`list[str]`): the words of a command line, with flags of MiniMind or of this package.
        stage (`str`): the stage, such as `grpo`.

    Raises:
        `UserError`: for a flag of MiniMind, or a value, that means nothing here.
    """
    rules = ({} if stage in _INFERENCE else TABLE["all"]) | (TABLE["answers"] if stage in _ANSWERING else {})
    rules |= TABLE.get(stage, {})
    rules |= TABLE["agent"] if stage == "grpo" and "--tools" in {word.partition("=")[0] for word in argv} else {}
    translated: list[str] = []
    collected: dict[str, str] = {}
    words = deque(argv)
    while words:
        flag, is_joined, value = words.popleft().partition("=")
        rule = rules.get(flag)
        if stage not in _INFERENCE and rule in (None, "refused") and (reason := TABLE["refused"].get(flag)):
            raise UserError(f"MiniMind's {flag} means nothing here: {reason}.")
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
    translated = _scale_steps(translated) + _complete(_values(translated), collected, stage)
    if is_main():
        shown = shlex.join(hide_secrets(translated))
        print(f"With the names of this package, MiniMind's flags are: {shown}", file=sys.stderr)
    return translated


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


def _values(words: list[str]) -> dict[str, str]:
    """Return the words of a command line that a value follows, with the last value of each."""
    return dict(itertools.pairwise(words)) | dict(word.split("=", 1) for word in words if "=" in word)


def _scale_steps(words: list[str]) -> list[str]:
    """Turn numbers of micro-batches, after the word `@steps`, into numbers of optimizer steps."""
    accumulation = int(_values(words).get("--gradient_accumulation_steps", 1))
    return [
        f"{max(1, round(float(word) / accumulation)) if float(word) else 0}" if before == "@steps" else word
        for before, word in itertools.pairwise(["", *words])
        if word != "@steps"
    ]


def _complete(typed: dict[str, str], collected: dict[str, str], stage: str) -> list[str]:
    """
    Return the words for what MiniMind splits into several flags: the model, its directory, and GRPO's batch. `typed`
    holds the values of the flags with our names.
    """
    more: list[str] = []
    directory = Path(collected.get("save_dir", collected.get("out_dir", "out")))
    if collected.get("backend") == "api":
        return _without(typed, TABLE["defaults"]["served"])
    if stage in _ANSWERING:
        model = _answering_model(directory, collected, typed.get("--model_name_or_path"))
        return ["--model_name_or_path", model] if model else []
    name = collected.get("save_weight", collected.get("lora_name", ""))
    if name or {"save_dir", "out_dir"} & collected.keys():
        more += ["--output_dir", str(directory / name)]
    if "lora_name" in collected:
        more.append("--use_peft")
        if not {"--lora_target_modules", "--lora_alpha"} & typed.keys():
            # MiniMind adapts the square projections, with scale 1.
            more += ["--lora_target_modules", "q_proj", "o_proj", "--lora_alpha", "16"]
    weights = collected.get("from_weight", collected.get("from_student_weight", "none"))
    if weights != "none":
        more += ["--model_name_or_path", _find_weights(directory, weights)]
        base = Path(sys.argv[0]).parent / f"base/{stage}.yaml"
        if base.is_file() and not {"--config", *_PRESET_FLAGS} & typed.keys():
            # A recipe that starts from other weights takes no preset's settings.
            more += ["--config", str(base)]
    elif not {"--model_name_or_path", "--config"} & typed.keys():
        more += _sizes(collected, has_preset=not typed.keys().isdisjoint(_PRESET_FLAGS))
    if "from_teacher_weight" in collected:
        more += ["--teacher_name_or_path", _find_weights(directory, collected["from_teacher_weight"])]
    if "max_gen_len" in collected:
        whole = {"--max_completion_length": collected["max_gen_len"]}
        more += _without(typed, TABLE["defaults"]["agent"] if "--tools" in typed else whole)
    if "batch_size" in collected and "--batch_size" in TABLE.get(stage, {}):
        # TRL counts completions, MiniMind prompts.
        collected.setdefault("num_generations", "4" if "--tools" in typed else "6")
        rows = str(int(collected["batch_size"]) * int(collected["num_generations"]))
        more += ["--per_device_train_batch_size", rows, "--per_device_eval_batch_size", rows]
    if "num_generations" in collected:
        more += ["--num_generations", collected["num_generations"]]
    if stage in _WITH_MUON and _RATES & typed.keys() and not {"--optim_preset", "--optim"} & typed.keys():
        # A rate and a clipping of MiniMind's scripts are those of its optimizer.
        more += ["--optim_preset", "adamw"]
    return more


def _without(typed: dict[str, str], defaults: dict[str, str]) -> list[str]:
    """Return the words of default values of flags that the user has not typed."""
    return [word for flag, value in defaults.items() if flag not in typed for word in (flag, value)]


def _sizes(collected: dict[str, str], *, has_preset: bool) -> list[str]:
    """Return the words that name the model of MiniMind's sizes."""
    sizes = {_SIZES[name]: value for name, value in collected.items() if name in _SIZES}
    is_moe = collected.get("use_moe", collected.get("student_use_moe", "0")).lower() in ("1", "true")
    if not sizes and not is_moe:
        return []
    # MiniMind renamed its sizes when it changed its architecture.
    preset = "minimind2" if {"dim", "n_layers"} & collected.keys() else "minimind3"
    if preset == "minimind3" and "hidden_size" in sizes and not has_preset:
        sizes["intermediate_size"] = str(64 * math.ceil(math.pi * int(sizes["hidden_size"]) / 64))
    words = [] if has_preset else ["--preset", f"{preset}-moe" if is_moe else preset]
    overrides = ",".join(f"{name}={value}" for name, value in sizes.items())
    return [*words, *(["--config_overrides", overrides] if overrides else [])]


def _answering_model(directory: Path, collected: dict[str, str], typed: str | None) -> str | None:
    """Return the model that MiniMind's flags of inference name, or `typed` with a LoRA; `None` if they name none."""
    lora = collected.get("lora_weight", collected.get("lora_name", "None"))
    # An adapter of this package knows its base model.
    if (directory / lora).is_dir():
        return str(directory / lora)
    weight = collected.get("weight", collected.get("from_weight", "None"))
    model = collected.get("load_from") if weight == "None" else _find_weights(directory, weight)
    if lora == "None":
        return model
    # MiniMind's default.
    model = typed or model or _find_weights(directory, "full_sft")
    file = [directory / f"{lora}.pth", *sorted(directory.rglob(f"{lora}_*.pth"))][-1]
    return load_named("hf_pretrain.weights.localizing:make_native")(model, lora=file)


def _find_weights(directory: Path, name: str) -> str:
    """Return the run, or the file of MiniMind, that MiniMind's name of weights means."""
    files = sorted(map(str, directory.glob(f"{name}_*.pth")))
    # The recipes write `out/sft` by default.
    runs = [directory / name, directory / _RUNS.get(name, name)]
    run = next(filter(Path.is_dir, runs), None if files else runs[-1])
    if run is None and len(files) > 1:
        raise UserError(f"Several files have the name {name}: {', '.join(files)}. Pass one with --model_name_or_path.")
    return str(run or files[0])

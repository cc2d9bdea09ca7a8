"""
The report at the end of a run: validation metrics beside a baseline, samples, loss curve and the next command. The
model card shows the same figures on the Hub.
"""

import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.utils import logging

from hf_pretrain_cli import config_value

from ..hub.model_card import CARD_NAME, CURVE_NAME, RunFacts, format_run_card
from ..reports.runs import RECORD_NAME, REPORT_NAME, read_run
from ..runtime.installation import install_command
from ..runtime.metrics import HEADLINES
from ..runtime.processes import num_local_processes
from ..tokenizer.encoding import encode_prompt
from .arguments import LMTrainingArguments
from .optimizers import complete_schedule_kwargs, optimizer_name
from .run_record import COMMAND_VARIABLE


logger = logging.get_logger(__name__)

# The usual next stage after each stage.
NEXT_STAGES = {"pretrain": "sft", "sft": "dpo", "distill": "dpo", "dpo": "grpo"}
# The share of pairs whose chosen answer gets the higher reward, and the mean difference of the two rewards.
_ACCURACY, _MARGINS = "eval_rewards/accuracies", "eval_rewards/margins"
# The stages that need the extra `trl`.
TRL_STAGES = ("dpo", "grpo")


def unigram_loss(train_rows: datasets.Dataset, eval_rows: datasets.Dataset, *, vocab_size: int) -> float:
    """
    Return the validation loss in nats per token of a unigram model, the baseline that a language model has to beat.

    The unigram model predicts each token by its frequency in the training rows, with add-one smoothing. As in
    training, the first token of a document is not predicted.

    Args:
        train_rows, eval_rows ([`~datasets.Dataset`]): packed rows with `input_ids` and `seq_lengths`.
        vocab_size (`int`): number of tokens in the vocabulary.
    """
    # Delete the first token of each document.
    train_tokens, eval_tokens = (np.delete(*_tokens_and_starts(rows)) for rows in (train_rows, eval_rows))
    counts = 1 + np.bincount(train_tokens, minlength=vocab_size)
    return float(-np.log(counts / counts.sum())[eval_tokens].mean())


def _tokens_and_starts(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens of packed rows, shape `(num_tokens,)`, and the index of each document's first token."""
    # Arrow columns flatten without a Python object per token.
    table = rows.with_format("arrow")[:]
    tokens, lengths = (table[name].combine_chunks().flatten().to_numpy() for name in ("input_ids", "seq_lengths"))
    return tokens, np.cumsum(lengths, dtype=np.int64) - lengths


def sample_continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    eval_rows: datasets.Dataset,
    *,
    num_samples: int = 3,
    prompt_tokens: int = 16,
    max_new_tokens: int = 48,
    seed: int = 0,
) -> list[tuple[str, str]]:
    """
    Return pairs of prompt and continuation for documents of the validation set. All ranks of a sharded model must call
    this function with the same arguments.

    Args:
        eval_rows ([`~datasets.Dataset`]): packed rows of the validation set.
        num_samples (`int`): number of documents.
        prompt_tokens (`int`): tokens of a prompt, or half the document if that is shorter.
        max_new_tokens (`int`): tokens of a continuation at most.
        seed (`int`): seed of each continuation.
    """
    tokens, starts = _tokens_and_starts(eval_rows)
    ends = np.append(starts[1:], len(tokens))
    samples = []
    # Evenly spaced documents come from different sources: the set follows the order of `--dataset_name`.
    for number in np.linspace(0, len(starts) - 1, num_samples).astype(int):
        length = max(2, min(prompt_tokens, (ends[number] - starts[number]) // 2))
        prompt = tokens[starts[number] : starts[number] + length]
        continuation = _generate(model, tokenizer, prompt, max_new_tokens=max_new_tokens, seed=seed)
        samples.append(tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, continuation)))
    return samples


def format_preview(rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, num_rows: int) -> str:
    """
    Return rows as text for a terminal. Tokens of weight 1 are green, tokens of another positive weight are yellow, and
    tokens without loss have no colour.

    Args:
        rows (`Iterable[dict]`): rows with `input_ids`, `seq_lengths` and optionally `loss_mask`.
        num_rows (`int`): number of rows to show.
    """
    lines = []
    for row in itertools.islice(rows, num_rows):
        lines.append(f"--- a row of {len(row['input_ids'])} tokens, {len(row['seq_lengths'])} documents\n")
        # An entry of `loss_mask` weighs the prediction of the token at the same index.
        weights = row.get("loss_mask", [1] * len(row["input_ids"]))
        runs = itertools.groupby(zip(weights, row["input_ids"], strict=True), key=lambda pair: pair[0])
        for weight, run in runs:
            text = tokenizer.decode([token for _, token in run])
            colour = "\033[32m" if weight == 1 else "\033[33m"
            lines[-1] += f"{colour}{text}\033[0m" if weight else text
    return "\n".join(lines)


def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: datasets.Dataset,
    *,
    num_samples: int = 3,
    max_prompt_tokens: int = 512,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> list[tuple[str, str]]:
    """
    Return pairs of question and answer for questions of validation conversations or preferences. An answer includes
    its stop token, which shows whether the model learnt to stop. All ranks of a sharded model must call this function
    with the same arguments.

    Args:
        conversations ([`~datasets.Dataset`]): the conversations or preferences, as JSON in the column `text`.
        num_samples (`int`): number of conversations.
        max_prompt_tokens (`int`): tokens of a prompt at most. A longer prompt loses its beginning.
        max_new_tokens (`int`): tokens of an answer at most.
        seed (`int`): seed of each answer.
    """
    samples = []
    for number in np.linspace(0, len(conversations) - 1, num_samples).astype(int):
        record = json.loads(conversations[int(number)]["text"])
        # A preference has a prompt. The prompt of a conversation ends before the first answer.
        messages = record.get("prompt") or list(
            itertools.takewhile(lambda message: message["role"] != "assistant", record["messages"])
        )
        prompt = encode_prompt(tokenizer, messages)[-max_prompt_tokens:]
        answer = _generate(model, tokenizer, prompt, max_new_tokens=max_new_tokens, seed=seed)
        samples.append((messages[-1]["content"], tokenizer.decode(answer)))
    return samples


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int] | np.ndarray,
    *,
    max_new_tokens: int,
    seed: int,
) -> list[int]:
    """Return token ids sampled after a prompt. The seed makes them reproducible."""
    model.eval()
    input_ids = torch.tensor(prompt, device=model.device).long()[None]
    # `generate` draws only torch's random numbers. The training must not depend on the texts.
    device_type = model.device.type
    kept_random = torch.random.fork_rng([] if device_type == "cpu" else [model.device], device_type=device_type)
    # A compiled layer would be compiled again for each length of the growing text.
    with kept_random, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        # Seed each text, so that it does not depend on the texts before it. This seeds the generators of all devices.
        torch.manual_seed(seed)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.8,
            top_p=0.9,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    return output[0, input_ids.shape[1] :].tolist()


def plot_loss_curve(
    log_history: list[dict[str, Any]],
    path: Path,
    *,
    unigram: float | None = None,
    loss_unit: str = "nats per token",
):
    """
    Write a PNG of training and validation loss (or reward) over tokens.

    Args:
        log_history (`list[dict]`): the log history of [`~transformers.TrainerState`].
        path (`Path`): file to write.
        unigram (`float`, *optional*): the result of [`unigram_loss`], drawn as a line.
        loss_unit (`str`): unit on the axis of the loss.
    """
    # The import is slow, and no run needs it before its end. Without pyplot, there is no global state and no search
    # for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    measure = "reward" if any("reward" in entry for entry in log_history) else "loss"
    for key, label, style in ((measure, "training", "-"), (f"eval_{measure}", "validation", "o-")):
        points = [
            (entry["num_input_tokens_seen"] / 1e6, entry[key])
            for entry in log_history
            if {key, "num_input_tokens_seen"} <= entry.keys()
        ]
        axes.plot(*zip(*points, strict=True) if points else ([], []), style, label=label, markersize=3, linewidth=1.2)
    if unigram is not None:
        axes.axhline(unigram, color="gray", linestyle="--", linewidth=1, label="unigram model")
    axes.set(xlabel="tokens seen (millions)", ylabel="mean reward" if measure == "reward" else f"loss ({loss_unit})")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def format_report(
    args: LMTrainingArguments,
    *,
    metrics: dict[str, float],
    unigram: float | None,
    samples: list[tuple[str, str]],
    commands: Sequence[tuple[str, str]] = (),
    start: dict[str, float] | None = None,
    loss_unit: str = "nats per token",
    push_report: str | None = None,
) -> str:
    """
    Return the report that a training recipe prints at its end.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        metrics (`dict[str, float]`): validation metrics.
        unigram (`float`, *optional*): the result of [`unigram_loss`], shown beside the loss.
        samples (`list[tuple[str, str]]`): prompts and generated texts.
        commands (`Sequence[tuple[str, str]]`): the result of [`next_commands`].
        start (`dict[str, float]`, *optional*): validation metrics from before the first step, shown beside the others.
        loss_unit (`str`): unit of the loss.
        push_report (`str`, *optional*): one line about the push.
    """
    rows = [
        ("Checkpoint", str(args.output_dir)),
        ("Optimizer", f"{optimizer_name(args)}, learning rate {args.learning_rate:g}"),
    ]
    for metric in HEADLINES:
        if metric.key in metrics:
            beside = f" ({start[metric.key]:.4f} before)" if start and metric.key in start else ""
            if start and metric.key == _ACCURACY and start.get(_ACCURACY) == start.get(_MARGINS) == 0:
                beside = " (before, all pairs tied)"
            if metric.key == "eval_loss" and unigram is not None:
                beside = f" (a unigram model: {unigram:.4f})"
            figure = f"{metrics[metric.key]:.4f} {metric.unit_in(loss_unit)}".rstrip()
            rows.append((metric.label[0].upper() + metric.label[1:], figure + beside))
    rows += [("Sample", f"{prompt!r} -> {continuation!r}") for prompt, continuation in samples]
    rows += commands
    if push_report is not None:
        rows.append(("Hub", push_report))
    width = max(18, *(len(label) for label, _ in rows))
    return "\n".join(["", *(f"{label:<{width}} {text}" for label, text in rows)])


def next_commands(args: LMTrainingArguments, facts: RunFacts) -> list[tuple[str, str]]:
    """
    Return the commands that a user may run next with the trained model, as pairs of label and command.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        facts ([`~hub.model_card.RunFacts`]): the recipe and the kind of data decide the next stage.
    """
    # A distillation on text gives a base model, as pretraining does.
    recipe = "pretrain" if facts.data_kind == "text" else facts.recipe
    model = ["--model_name_or_path", args.output_dir]
    program = _program()
    commands = [("Talk to it", [program, "chat", *model])]
    if recipe in NEXT_STAGES:
        stage = NEXT_STAGES[recipe]
        # The YAML file of the preset's next stage is in the same directory as the file of this run.
        config = Path(args.config).with_name(f"{stage}.yaml") if args.config else None
        words, starts_from = [program, stage], None
        if config is not None and config.is_file():
            is_preset = config.resolve().parent.parent == Path(sys.argv[0]).resolve().parent
            words += ["--preset", config.parent.name] if is_preset else ["--config", str(config)]
            starts_from = config_value(str(config), "model_name_or_path")
        # The preset's directories belong to its own chain of stages.
        output_dir = args.output_dir.rstrip("/")
        if starts_from != output_dir:
            words += [*model, "--output_dir", f"{output_dir}-{stage}"]
        words += _launch_words(args)
        # Without an accelerator, `use_cpu` is on although nobody asked for it.
        if "--use_cpu" in sys.argv:
            words.append("--use_cpu")
        if stage in TRL_STAGES and not find_spec("trl"):
            commands.append(("Next, install TRL", shlex.split(install_command("trl"))))
        commands.append(("Next stage", words))
    return [(label, shlex.join(words)) for label, words in commands]


def _launch_words(args: LMTrainingArguments) -> list[str]:
    """Return the flags with which `hf-pretrain` launches the next stage as this run was launched."""
    words = ["--nproc", str(num_local_processes())] if args.world_size > 1 else []
    # Only `hf-pretrain` chooses among its own configs.
    command = shlex.split(os.environ.get(COMMAND_VARIABLE, ""))
    if command and args.launcher == "deepspeed":
        path = Path(str(args.deepspeed))
        is_ours = path.resolve().parent == Path(sys.argv[0]).resolve().parent.parent / "ds_configs"
        words += ["--launcher", "deepspeed", *(["--ds", path.stem] if is_ours else ["--deepspeed", str(path)])]
    elif command and args.launcher == "accelerate launch":
        config = Path(command[command.index("--config_file") + 1])
        words += ["--launcher", "accelerate", "--accelerate", config.stem]
    return words


def _program() -> str:
    """Return the name of the command, or its path if its environment is not active in the shell of the user."""
    is_active = sys.prefix in (sys.base_prefix, os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX"))
    path = Path(sys.executable).with_name("hf-pretrain")
    if is_active or not path.is_file():
        return "hf-pretrain"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def write_run_page(output_dir: str | Path) -> None:
    """Write `report.html` of a run of a recipe. Only the main process calls it. No failure ends the run."""
    try:
        if not Path(output_dir, RECORD_NAME).is_file():
            return
        # The import of matplotlib is slow, and no run needs charts before it ends.
        from ..reports.page import write_page

        write_page([read_run(output_dir)], Path(output_dir, REPORT_NAME))
    except Exception as error:
        # The run matters more than its page.
        logger.warning(f"The page of {output_dir} could not be written: {error}. `hf-pretrain compare` writes it.")


def write_run_card(
    args: LMTrainingArguments, model: PreTrainedModel, state: TrainerState, facts: RunFacts, repo_id: str, layout: str
) -> None:
    """
    Write the model card of a run into `output_dir`. Arguments as for [`~hub.model_card.format_run_card`]; `layout` is
    the layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`.
    """
    card = format_run_card(
        model,
        state,
        facts,
        repo_id=repo_id,
        training=_describe_training(args, state, layout),
        command=resume_command(args, facts.recipe, repo_id),
        language=args.hub_language,
        license=args.hub_license,
        has_curve=Path(args.output_dir, CURVE_NAME).is_file(),
    )
    Path(args.output_dir, CARD_NAME).write_text(card, encoding="utf-8")


def _describe_training(args: LMTrainingArguments, state: TrainerState, layout: str) -> list[tuple[str, str]]:
    """Return rows `(name, value)` that describe how a run was trained, for a table in its model card."""
    not_sharded = "DDP" if args.world_size > 1 else "one process"
    sharding = {"FSDP": "FSDP2", "one file": not_sharded}.get(layout, f"DeepSpeed {layout}")
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    schedule_kwargs = complete_schedule_kwargs(args, state.max_steps)
    # The ranks of a group share their rows.
    groups = f"groups of {args.tp_size} tensor-parallel processes" if args.tp_size > 1 else "processes"
    clipping = f"gradients clipped at {args.max_grad_norm:g}" if args.max_grad_norm else "gradients not clipped"
    rows = [
        ("tokens seen", f"{state.num_input_tokens_seen:,}"),
        ("optimizer steps", f"{state.global_step:,}"),
        (
            "sequences per step",
            f"{args.rows_per_step} ({args.per_device_train_batch_size} x {args.gradient_accumulation_steps} "
            f"accumulated x {args.world_size // args.tp_size} {groups})",
        ),
        ("learning rate", f"{args.learning_rate:g}, {schedule} {schedule_kwargs or ''}".strip()),
        ("warmup", f"{args.warmup_steps:g} {'of all steps' if args.warmup_steps < 1 else 'steps'}"),
        (
            "optimizer",
            f"{optimizer_name(args)}, betas ({args.adam_beta1:g}, {args.adam_beta2:g}), weight decay "
            f"{args.weight_decay:g}, {clipping}",
        ),
        ("seed", str(args.seed)),
        ("launcher", f"{args.launcher}, {sharding}"),
        ("hardware", f"{args.launch_description}{f' ({_cpu_name()})' if args.device.type == 'cpu' else ''}"),
    ]
    # Trainer measures only the current launch. A resumed run has one entry for each launch that reached its end.
    seconds = [entry["train_runtime"] for entry in state.log_history if "train_runtime" in entry]
    if seconds:
        rows.append(("duration of the last launch", f"{seconds[-1]:,.0f} seconds"))
    packages = [("torch", torch.__version__), ("transformers", transformers.__version__)]
    packages.append(("hf_pretrain", importlib.metadata.version("hf_pretrain")))
    return rows + [("versions", ", ".join(f"{name} {version}" for name, version in packages))]


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def resume_command(args: LMTrainingArguments, recipe: str, repo_id: str) -> str:
    """Return the command that continues a run from `repo_id`: from a pushed checkpoint, or else from the weights."""
    strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
    if strategy in ("checkpoint", "all_checkpoints") and not args.save_only_model:
        return f"hf-pretrain {recipe} --resume_from_hub {repo_id}   # with the flags of this run"
    return f"hf-pretrain {recipe} --model_name_or_path {repo_id}"

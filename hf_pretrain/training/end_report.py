"""
The report at the end of a run: validation metrics beside a baseline, samples and the next command. The model card
shows the same figures on the Hub.
"""

import shlex
from importlib.metadata import version
from pathlib import Path

from transformers import TrainerState
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from ..hub.model_card import RunFacts, hub_id
from ..model.presets import PRESETS
from ..reports.metrics import HEADLINES, Metric, named_figures
from ..reports.run_files import RECORD_NAME, REPORT_NAME, Run, read_launches
from ..reports.texts import format_rows, translation
from ..runtime.errors import find_program
from ..runtime.stages import STAGES
from ..weights.package_models import PACKAGE_MODELS
from .run_directory import RunDirectory
from .training_arguments import LMTrainingArguments, optimizer_name


logger = logging.get_logger(__name__)


def format_report(
    args: LMTrainingArguments,
    facts: RunFacts,
    metrics: dict[str, float],
    samples: list[tuple[str, str]],
    *,
    start: dict[str, float] | None = None,
    push_report: str | None = None,
    language: str = "en",
) -> str:
    """
    Return the report that a training recipe prints at its end.

    Args:
        args ([`LMTrainingArguments`]), facts ([`~hub.model_card.RunFacts`]): the arguments and facts of the run.
        metrics (`dict[str, float]`): validation metrics.
        samples (`list[tuple[str, str]]`): prompts and generated texts.
        start (`dict[str, float]`, *optional*): validation metrics from before the first step, shown beside the others.
        push_report (`str`, *optional*): one line about the push.
        language (`str`): `en` or `zh`.
    """
    t = translation(language)
    rows = [
        ("Checkpoint", str(args.output_dir)),
        ("Optimizer", f"{optimizer_name(args)}, {t('learning rate')} {args.learning_rate:g}"),
    ]
    named = [Metric(*each) for each in named_figures(metrics).items()]
    for metric in (*HEADLINES, *named):
        if metric.key in metrics:
            known = {"before": (start or {}).get(metric.key), "unigram_loss": facts.unigram_loss}
            rows.append((metric.label, metric.describe(metrics[metric.key], facts.loss_unit, **known, t=t)))
    rows += [("Sample", f"{prompt!r} -> {continuation!r}") for prompt, continuation in samples]
    rows += next_commands(args, facts)
    if push_report is not None:
        rows.append(("Hub", push_report))
    return "\n" + format_rows(rows, t, width=18)


def next_commands(args: LMTrainingArguments, facts: RunFacts) -> list[tuple[str, str]]:
    """
    Return the commands that a user may run next with the trained model, as pairs of label and command.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        facts ([`~hub.model_card.RunFacts`]): the recipe and the kind of data decide the next stage.
    """
    # A distillation on text gives a base model, as pretraining does.
    stage = STAGES["pretrain" if facts.data_kind == "text" else facts.recipe].following
    output_dir, program = str(args.output_dir).rstrip("/"), find_program("hf-pretrain")
    if facts.recipe == "reward":
        policy = ["--model_name_or_path", facts.base_model] if facts.base_model else []
        return [("Next stage", shlex.join([program, "grpo", "--rewards", output_dir, *policy]))]
    model = ["--model_name_or_path", output_dir]
    commands = [("Talk to it", [program, "chat", *model])]
    preset = Path(args.config).parent.name if args.config else None
    words = ["--preset", preset] if preset in PRESETS or preset in PACKAGE_MODELS else []
    if facts.recipe == "sft" and (preset in PACKAGE_MODELS or hub_id(facts.base_model) is not None):
        # A published chat model, which has learnt facts.
        more = [*words, *model, "--dataset_name", "your/facts.jsonl", "--output_dir", f"{output_dir}-more"]
        gguf = ["--from", output_dir, "--to", f"{output_dir}-gguf", "--format", "gguf", "--dtype", "q8_0"]
        commands += [("Teach it more", [program, "sft", *more]), ("Export it", [program, "convert", *gguf])]
    elif stage is not None:
        # out/pretrain-tiny comes before out/sft-tiny, as the presets and `make` name them.
        beside = Path(output_dir).with_name(stage + Path(output_dir).name.removeprefix(facts.recipe))
        is_named = Path(output_dir).name.startswith(f"{facts.recipe}-") and beside != Path(output_dir)
        next_dir = str(beside) if is_named else f"{output_dir}-{stage}"
        commands.append(("Next stage", [program, stage, *words, *model, "--output_dir", next_dir]))
    return [(label, shlex.join(words)) for label, words in commands]


def write_run_page(args: LMTrainingArguments, state: TrainerState, *, stopped: str | None = None) -> None:
    """
    Write `report.html` of a run of a recipe. Only the main process calls it. No failure ends the run.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        state ([`~transformers.TrainerState`]): the state with the log.
        stopped (`str`, *optional*): why the run stops, for its record.
    """
    output_dir = Path(args.output_dir)
    try:
        if not (output_dir / RECORD_NAME).is_file():
            return
        if stopped is not None:
            RunDirectory(args).record(stopped=f"after step {state.global_step}: {stopped}")
        from ..reports.page import write_page

        run = Run(output_dir.resolve().name, read_launches(output_dir), state.log_history)
        write_page([run], output_dir / REPORT_NAME)
    except Exception as error:
        # The run matters more than its page.
        logger.warning(f"The page of {output_dir} could not be written: {error}. `hf-pretrain compare` writes it.")


def describe_training(args: LMTrainingArguments, state: TrainerState, layout: str) -> list[tuple[str, str]]:
    """
    Return rows `(name, value)` that describe how a run was trained, for a table in its model card. `layout` is the
    layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`.
    """
    not_sharded = "DDP" if args.world_size > 1 else "one process"
    sharding = {"FSDP": "FSDP2", "one file": not_sharded}.get(layout, f"DeepSpeed {layout}")
    schedule = SchedulerType(args.lr_scheduler_type).value
    schedule_kwargs = args.lr_scheduler_kwargs or {}
    return [
        ("tokens seen", f"{state.num_input_tokens_seen:,}"),
        ("optimizer steps", f"{state.global_step:,}"),
        ("sequences per step", f"{args.rows_per_step}"),
        ("learning rate", f"{args.learning_rate:g}, warmup {args.warmup_steps:g}, {schedule} {schedule_kwargs or ''}"),
        (
            "optimizer",
            f"{optimizer_name(args)}, betas ({args.adam_beta1:g}, {args.adam_beta2:g}), weight decay "
            f"{args.weight_decay:g}, largest norm of the gradients {args.max_grad_norm:g} (0: not clipped)",
        ),
        ("seed", f"{args.seed}"),
        ("launcher", f"{args.launcher}, {sharding}"),
        ("hardware", args.launch_description),
        ("versions", ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "hf_pretrain"))),
    ]

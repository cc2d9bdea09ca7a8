"""
The report at the end of a run: validation metrics beside a baseline, samples and the next command. The model card
shows the same figures on the Hub.
"""

import shlex
from pathlib import Path

from ..model.presets import PRESETS
from ..run_directory.facts import RunFacts
from ..run_directory.metrics import HEADLINES, Metric, named_figures
from ..runtime.errors import find_program
from ..runtime.stages import STAGES
from ..runtime.texts import format_rows, translation
from ..weights.package_models import PACKAGE_MODELS, hub_id


def format_report(
    output_dir: str,
    facts: RunFacts,
    metrics: dict[str, float],
    samples: list[tuple[str, str]],
    *,
    optimizer: tuple[str, float],
    commands: list[tuple[str, str]],
    start: dict[str, float] | None = None,
    push_report: str | None = None,
    language: str = "en",
) -> str:
    """
    Return the report that a training recipe prints at its end.

    Args:
        output_dir (`str`), facts ([`~run_directory.facts.RunFacts`]): the directory and the facts of the run.
        metrics (`dict[str, float]`): validation metrics.
        samples (`list[tuple[str, str]]`): prompts and generated texts.
        optimizer (`tuple[str, float]`): its name and the peak learning rate.
        commands (`list[tuple[str, str]]`): the [`next_commands`].
        start (`dict[str, float]`, *optional*): validation metrics from before the first step, shown beside the others.
        push_report (`str`, *optional*): one line about the push.
        language (`str`): `en` or `zh`.
    """
    t = translation(language)
    rows = [
        ("Checkpoint", output_dir),
        ("Optimizer", f"{optimizer[0]}, {t('learning rate')} {optimizer[1]:g}"),
    ]
    named = [Metric(*each) for each in named_figures(metrics).items()]
    for metric in (*HEADLINES, *named):
        if metric.key in metrics:
            known = {"before": (start or {}).get(metric.key), "unigram_loss": facts.unigram_loss}
            rows.append((metric.label, metric.describe(metrics[metric.key], facts.loss_unit, **known, t=t)))
    rows += [("Sample", f"{prompt!r} -> {continuation!r}") for prompt, continuation in samples]
    rows += commands
    if push_report is not None:
        rows.append(("Hub", push_report))
    return "\n" + format_rows(rows, t, width=18)


def next_commands(output_dir: str, facts: RunFacts, *, config: str | None = None) -> list[tuple[str, str]]:
    """
    Return the commands that a user may run next with the trained model, as pairs of label and command.

    Args:
        output_dir (`str`): the directory of the model.
        facts ([`~run_directory.facts.RunFacts`]): the recipe and the kind of data decide the next stage.
        config (`str`, *optional*): the YAML file of the run. A preset's next stage takes the same preset.
    """
    # A distillation on text gives a base model, as pretraining does.
    stage = STAGES["pretrain" if facts.data_kind == "text" else facts.recipe]
    output_dir, program = output_dir.rstrip("/"), find_program("hf-pretrain")
    model = ["--model_name_or_path", output_dir]
    if stage.following and stage.result_flag not in model:
        policy = ["--model_name_or_path", facts.base_model] if facts.base_model else []
        words = [program, stage.following, stage.result_flag, output_dir, *policy]
        return [("Next stage", shlex.join(words))]
    commands = [("Talk to it", [program, "chat", *model])]
    preset = Path(config).parent.name if config else None
    words = ["--preset", preset] if preset in PRESETS or preset in PACKAGE_MODELS else []
    if STAGES[facts.recipe].teaches and (preset in PACKAGE_MODELS or hub_id(facts.base_model) is not None):
        # A published chat model, which has learnt facts. Trained further on others, it would forget the first ones.
        if words and facts.base_model:
            commands.append(("Judge it", [program, "evaluate", *words, *model, "--against", facts.base_model]))
        gguf = ["--from", output_dir, "--to", f"{output_dir}-gguf", "--format", "gguf", "--dtype", "q8_0"]
        commands.append(("Export it", [program, "convert", *gguf]))
    elif stage.following is not None:
        # out/pretrain-tiny comes before out/sft-tiny, as the presets and `make` name them.
        beside = Path(output_dir).with_name(stage.following + Path(output_dir).name.removeprefix(facts.recipe))
        is_named = Path(output_dir).name.startswith(f"{facts.recipe}-") and beside != Path(output_dir)
        next_dir = str(beside) if is_named else f"{output_dir}-{stage.following}"
        commands.append(("Next stage", [program, stage.following, *words, *model, "--output_dir", next_dir]))
    return [(label, shlex.join(words)) for label, words in commands]

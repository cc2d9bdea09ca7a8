"""The table of headline metrics, which every output of figures reads."""

import pytest
from transformers import TrainerControl, TrainerState

from hf_pretrain.evaluation.evaluation import format_results
from hf_pretrain.hub.model_card import validation_results
from hf_pretrain.reports.end_report import format_report
from hf_pretrain.run_directory.facts import RunFacts
from hf_pretrain.run_directory.metrics import METRICS, find_evaluations, named_figures
from hf_pretrain.training.callbacks import LogLinesCallback
from hf_pretrain.training.training_arguments import LMTrainingArguments


FIGURES = {metric.key: 1.0 + number for number, metric in enumerate(METRICS)}


def test_every_place_shows_the_same_label_and_value(capsys):
    args = LMTrainingArguments(output_dir="out/a", learning_rate=1e-3)
    report = format_report("out/a", RunFacts(), FIGURES, [], optimizer=("adamw", 1e-3), commands=[])
    state = TrainerState(is_world_process_zero=True, global_step=3, max_steps=5)
    LogLinesCallback().on_log(args, state, TrainerControl(), logs=FIGURES)
    line = capsys.readouterr().out
    results = {result.metric_type: result for result in validation_results(FIGURES, RunFacts())}
    table = format_results({"held_out": FIGURES, "tasks": {}}).splitlines()[1:]
    assert len(results) == len(METRICS) == len(table)
    for metric, row in zip(METRICS, table, strict=True):
        value = f"{FIGURES[metric.key]:.4f}"
        assert (f"{metric.label} {value}" in line) == metric.is_headline
        (*shown,) = [text for text in report.splitlines() if text.lower().startswith(metric.label.lower())]
        assert [value in text and metric.unit in text for text in shown] == [True] * metric.is_headline
        assert results[metric.name].metric_name.startswith(metric.label) and value in row
        assert results[metric.name].metric_value == FIGURES[metric.key]


def test_a_loss_has_the_unit_of_its_run():
    units = {metric.name: metric.unit_in("DPO") for metric in METRICS}
    assert units["loss"] == "DPO" and units["kl"] == "nats per token" and units["bits_per_byte"] == ""


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_the_better_direction_reaches_the_trainer(metric, tmp_path):
    for name in (metric.key, metric.name):
        args = LMTrainingArguments(output_dir=str(tmp_path), metric_for_best_model=name)
        assert args.greater_is_better is not metric.lower_is_better
    # The user may turn it round.
    turned = LMTrainingArguments(
        output_dir=str(tmp_path), metric_for_best_model=metric.name, greater_is_better=metric.lower_is_better
    )
    assert turned.greater_is_better is metric.lower_is_better


def test_evaluations_are_found_in_a_log():
    log = [{"loss": 2.0}, {"eval_loss": 1.0, "step": 1}, {"eval_runtime": 3.0}, {"eval_reward": 0.5, "step": 2}]
    assert [entry["step"] for entry in find_evaluations(log)] == [1, 2]


def test_only_validation_sets_are_named():
    """TRL's trainer of reward models logs the extremes of its rewards."""
    figures = ["eval_loss", "eval_news_loss", "eval_code_reward", "eval_reward", "eval_train_loss"]
    figures += ["eval_min_reward", "eval_mean_reward", "eval_max_reward", "eval_news_min_reward"]
    expected = {"eval_news_loss": "loss on news", "eval_code_reward": "reward on code"}
    assert named_figures(figures) == expected | {"eval_train_loss": "loss on train"}

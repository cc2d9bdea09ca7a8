"""`--load_best_model_at_end` gives the weights of the best evaluation, also after a resume. Figures are planted."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from hf_pretrain.runtime.command_line import quiet_libraries
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.training.callbacks import AddedFigures
from hf_pretrain.training.run import train_and_evaluate
from tests.trainers import make_documents, make_trainer


# By the step of each evaluation.
FIGURES = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 3.5, 6: 4.5}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "planted", "greater_is_better": False}
OFTEN = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_total_limit": 9}


def run(directory, *, resume: str | None = None, figure: str = "eval_planted", **arguments):
    """Train and save. Return the trainer."""
    arguments = OFTEN | BEST | {"save_steps": 4} | arguments
    figures = AddedFigures(lambda model: {figure: FIGURES[trainer.state.global_step]})
    trainer = make_trainer(directory, make_documents(), arguments=arguments, callbacks=[figures])
    train_and_evaluate(trainer, checkpoint=resume)
    return trainer


def saved(directory) -> dict[str, torch.Tensor]:
    return load_file(Path(directory, "model.safetensors"))


def step_of(directory, whole) -> int:
    """Return the step whose weights lie in `directory`."""
    weights = saved(directory)
    return next(
        step
        for step in FIGURES
        if all(torch.equal(weight, weights[name]) for name, weight in saved(whole / f"checkpoint-{step}").items())
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The directory of a whole run that keeps the weights of each step."""
    path = tmp_path_factory.mktemp("whole")
    run(path, save_steps=1)
    assert step_of(path, path) == 2
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """The directory of a run of four steps, with the checkpoints 1, 2 and 4."""
    path = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        run("out/run", max_steps=4)
    assert sorted(found.name for found in path.glob("out/run/checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 4)]
    return path / "out/run"


def test_a_best_step_between_two_checkpoints_is_kept(tmp_path, whole):
    trainer = run(tmp_path, save_total_limit=1)
    assert step_of(tmp_path, whole) == 2 and trainer.state.best_metric == 1.0
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def test_without_the_flag_no_further_checkpoint_is_saved(tmp_path):
    run(tmp_path, load_best_model_at_end=False)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("has_other", [True, False])
def test_a_run_that_was_moved_keeps_its_best_model(tmp_path, stopped, whole, monkeypatch, has_other):
    """Where the recorded path leads now, another run has a checkpoint of the same step, or nothing is."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    if has_other:
        shutil.copytree(stopped / "checkpoint-1", "out/run/checkpoint-2")
    shutil.copytree(stopped, tmp_path / "moved")
    recorded = json.loads((tmp_path / "moved/checkpoint-4/trainer_state.json").read_text())["best_model_checkpoint"]
    assert Path(recorded).is_dir() == has_other
    quiet_libraries()
    with CaptureLogger(logging.get_logger("transformers.trainer")) as captured:
        trainer = run("../moved", resume="../moved/checkpoint-4")
    # transformers does not say that the best checkpoint is gone.
    assert step_of(tmp_path / "moved", whole) == 2 and "best checkpoint" not in captured.out
    assert trainer.state.best_model_checkpoint == "../moved/checkpoint-2"


def test_a_run_that_resumes_into_another_directory_keeps_its_best_model(tmp_path, stopped, whole):
    trainer = run(tmp_path, resume=str(stopped / "checkpoint-4"))
    assert step_of(tmp_path, whole) == 2 and trainer.state.best_model_checkpoint == str(stopped / "checkpoint-2")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_without_its_checkpoint_the_best_of_the_others_is_chosen(tmp_path, stopped, whole, caplog, is_damaged):
    path = shutil.copytree(stopped, tmp_path / "run")
    if is_damaged:
        data = (path / "checkpoint-2/model.safetensors").read_bytes()
        (path / "checkpoint-2/model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        shutil.rmtree(path / "checkpoint-2")
    trainer = run(path, resume=str(path / "checkpoint-4"))
    assert step_of(path, whole) == 4 and trainer.state.best_metric == 3.0
    assert "Step 2 has the best eval_planted, and no intact checkpoint beside" in caplog.text


@pytest.mark.parametrize(
    ("changes", "best"),
    [
        ({"greater_is_better": True}, 1),
        # Of this metric, the steps before the resume have no figures.
        ({"metric_for_best_model": "other", "figure": "eval_other"}, 5),
    ],
)
def test_another_metric_chooses_anew(tmp_path, stopped, whole, changes, best):
    path = shutil.copytree(stopped, tmp_path / "run")
    run(path, resume=str(path / "checkpoint-4"), **changes)
    assert step_of(path, whole) == best


def test_a_run_may_ask_for_the_best_model_when_it_resumes(tmp_path, whole):
    run(tmp_path, max_steps=4, save_steps=1, load_best_model_at_end=False)
    run(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert step_of(tmp_path, whole) == 2


def test_other_validation_data_are_refused(tmp_path):
    rows = Dataset.from_list(make_documents())

    def train(eval_rows, resume=True, **arguments):
        arguments = OFTEN | {"save_steps": 1, "max_steps": 2} | arguments
        trainer = make_trainer(tmp_path, rows, eval_dataset=eval_rows, arguments=arguments)
        trainer.train(resume_from_checkpoint=resume)

    best, other = {"load_best_model_at_end": True}, rows.select(range(5))
    train(rows, resume=None, **best)
    train(rows.select(range(13)), **best)
    # Without the flag, an evaluation changes nothing.
    train(other)
    for eval_rows in (other, {"a": rows, "b": other}):
        with pytest.raises(UserError):
            train(eval_rows, **best)

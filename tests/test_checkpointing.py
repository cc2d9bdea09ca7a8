"""Which checkpoint a run goes on from."""

import os
from types import SimpleNamespace

import pytest

from hf_pretrain.checkpointing import checkpoint_to_resume, find_newest_run


def arguments(output_dir, resume=None):
    return SimpleNamespace(output_dir=str(output_dir), resume_from_checkpoint=resume, distributed_state=None)


def make_checkpoint(output_dir, step: int):
    path = output_dir / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    return str(path)


def test_starts_in_a_new_or_empty_directory(tmp_path):
    assert checkpoint_to_resume(arguments(tmp_path / "new")) is None
    (tmp_path / "rejected.jsonl").touch()
    assert checkpoint_to_resume(arguments(tmp_path)) is None


def test_refuses_to_write_over_a_run(tmp_path):
    make_checkpoint(tmp_path, 10)
    with pytest.raises(ValueError, match="is not empty.*--resume_from_checkpoint auto"):
        checkpoint_to_resume(arguments(tmp_path))


def test_auto_takes_the_newest_or_starts(tmp_path):
    assert checkpoint_to_resume(arguments(tmp_path / "new", "auto")) is None
    make_checkpoint(tmp_path, 9)
    newest = make_checkpoint(tmp_path, 10)
    assert checkpoint_to_resume(arguments(tmp_path, "auto")) == newest


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_resumes_by_itself(tmp_path, monkeypatch, variable):
    newest = make_checkpoint(tmp_path, 10)
    monkeypatch.setenv(variable, "0")
    with pytest.raises(ValueError, match="is not empty"):
        checkpoint_to_resume(arguments(tmp_path))
    monkeypatch.setenv(variable, "1")
    assert checkpoint_to_resume(arguments(tmp_path)) == newest


def test_a_named_checkpoint_must_be_one(tmp_path):
    path = make_checkpoint(tmp_path, 10)
    assert checkpoint_to_resume(arguments(tmp_path, path)) == path
    with pytest.raises(ValueError, match="no trainer_state.json"):
        checkpoint_to_resume(arguments(tmp_path, str(tmp_path)))


def test_the_newest_run_is_the_one_whose_weights_are(tmp_path):
    with pytest.raises(ValueError, match="run `make pretrain` first"):
        find_newest_run(str(tmp_path))
    for time, name in enumerate(["first", "second", "another-model", "unfinished"]):
        (tmp_path / name).mkdir()
        model_type = "llama" if name == "another-model" else "minimind"
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        (tmp_path / name / "tokenizer.json").touch()
        if name != "unfinished":
            (tmp_path / name / "model.safetensors").touch()
            os.utime(tmp_path / name / "model.safetensors", (time, time))
    assert find_newest_run(str(tmp_path)) == str(tmp_path / "second")
    os.utime(tmp_path / "first/model.safetensors", (9, 9))
    assert find_newest_run(str(tmp_path)) == str(tmp_path / "first")

"""The choice of the checkpoint that a run resumes from, rotation, and saving of the model."""

import errno
import json
import os
import shutil
import time

import pytest
import torch

from hf_pretrain.checkpoints.directory import find_newest_run, rotate_checkpoints
from hf_pretrain.checkpoints.manifest import MANIFEST_NAME, write_manifest
from hf_pretrain.checkpoints.whole_weights import load_weights
from hf_pretrain.data.documents import load_documents
from hf_pretrain.model.modeling_minimind import MiniMindForSequenceClassification
from hf_pretrain.rows.manifest import describe_data
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.resuming import checkpoint_to_resume
from tests.checkpoints.toys import arguments, make_checkpoint
from tests.toys import toy_model, write_jsonl
from tests.trainers import make_documents, make_trainer


def test_a_run_starts_in_a_new_or_empty_directory(tmp_path):
    assert checkpoint_to_resume(arguments(tmp_path / "new")) is None
    (tmp_path / "rejected.jsonl").touch()
    # Left by a run that was killed in its first save.
    (tmp_path / ".saving/checkpoint-5").mkdir(parents=True)
    assert checkpoint_to_resume(arguments(tmp_path)) is None
    # A teacher's logits took time and space, and another run must not replace them.
    (tmp_path / "teacher_logits").mkdir()
    with pytest.raises(UserError):
        checkpoint_to_resume(arguments(tmp_path))


def test_a_used_directory_needs_a_checkpoint_to_resume_from(tmp_path):
    assert checkpoint_to_resume(arguments(tmp_path / "new", "auto")) is None
    make_checkpoint(tmp_path, 9)
    newest = make_checkpoint(tmp_path, 10)
    assert checkpoint_to_resume(arguments(tmp_path, "auto")) == newest
    with pytest.raises(UserError):
        checkpoint_to_resume(arguments(tmp_path))


def test_auto_does_not_overwrite_a_model(tmp_path):
    """A run that ended before its first checkpoint starts again, also after a restart."""
    (tmp_path / "run.json").write_text("[]")
    (tmp_path / ".saving").mkdir()
    # A directory of the user.
    (tmp_path / "checkpoint-x").mkdir()
    assert checkpoint_to_resume(arguments(tmp_path, "auto")) is None
    for name in ("model-00001-of-00002.safetensors", "adapter_model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()
        with pytest.raises(UserError):
            checkpoint_to_resume(arguments(tmp_path, "auto"))
        (tmp_path / name).unlink()
    (tmp_path / "model.safetensors").touch()
    newest = make_checkpoint(tmp_path, 10)
    assert checkpoint_to_resume(arguments(tmp_path, "auto")) == newest


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_resumes_by_itself(tmp_path, monkeypatch, variable):
    newest = make_checkpoint(tmp_path, 10)
    monkeypatch.setenv(variable, "0")
    with pytest.raises(UserError):
        checkpoint_to_resume(arguments(tmp_path))
    monkeypatch.setenv(variable, "1")
    assert checkpoint_to_resume(arguments(tmp_path)) == newest


def test_another_stream_is_recognized_by_the_size_of_its_files(tmp_path):
    def description(*texts: str, max_length: int = 16, held_out: float = 0, **mixture) -> dict:
        name = write_jsonl(tmp_path / "a.jsonl", texts)
        documents, _ = load_documents([name, name], Reading(streaming=True, validation_fraction=held_out, **mixture))
        tokenizer = train_tokenizer(["one two"], vocab_size=300)
        rows, _ = prepare_rows(documents.shuffle(seed=1, buffer_size=10), tokenizer, max_length=max_length)
        return describe_data(rows)

    first = description("one", "two")
    assert description("one", "two") == first and description("one", "two", "three") != first
    for change in ({"max_length": 17}, {"held_out": 0.1}, {"dataset_weights": [1, 2]}):
        assert description("one", "two", **change) != first


def test_damaged_checkpoints_are_renamed(tmp_path):
    oldest, middle, newest = (make_checkpoint(tmp_path, step) for step in (8, 9, 10))
    for path in (middle, newest):
        with open(f"{path}/trainer_state.json", "a") as file:
            file.write(" ")
    with pytest.raises(UserError):
        checkpoint_to_resume(arguments(tmp_path, middle))
    assert checkpoint_to_resume(arguments(tmp_path, "auto")) == oldest
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-8", "damaged-checkpoint-9", "damaged-checkpoint-10"}
    # Rename a second checkpoint of the same step.
    (tmp_path / "checkpoint-10").mkdir()
    write_manifest(tmp_path / "checkpoint-10", {})
    (tmp_path / "checkpoint-10/more").touch()
    assert checkpoint_to_resume(arguments(tmp_path, "auto")) == oldest
    assert (tmp_path / "damaged-checkpoint-10-1/more").exists()


def test_a_checkpoint_without_a_manifest_needs_allow_inexact_resume(tmp_path):
    newest = make_checkpoint(tmp_path, 10)
    os.unlink(f"{newest}/{MANIFEST_NAME}")
    for resume in ("auto", newest):
        with pytest.raises(UserError):
            checkpoint_to_resume(arguments(tmp_path, resume))
        assert checkpoint_to_resume(arguments(tmp_path, resume, allow_inexact_resume=True)) == newest


def test_shards_from_elsewhere_are_refused(tmp_path):
    path = make_checkpoint(tmp_path / "other", 10)
    assert checkpoint_to_resume(arguments(tmp_path / "run", path)) == path
    with pytest.raises(UserError):
        checkpoint_to_resume(arguments(tmp_path / "run", path, deepspeed=object()))
    assert checkpoint_to_resume(arguments(tmp_path / "other", path, deepspeed=object())) == path


def test_a_run_resumes_from_an_older_checkpoint(tmp_path, monkeypatch):
    """Later checkpoints are renamed, or `auto` would take them. A restart takes the newest one of the resumed run."""
    older, _ = (make_checkpoint(tmp_path, step) for step in (8, 10))
    assert checkpoint_to_resume(arguments(tmp_path, older)) == older
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-8", "abandoned-checkpoint-10"}
    newer = make_checkpoint(tmp_path, 9)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert checkpoint_to_resume(arguments(tmp_path, older)) == newer
    # Resume from another directory, before the run has saved anything.
    assert checkpoint_to_resume(arguments(tmp_path / "new", older)) == older


def test_rotation_goes_by_steps_and_not_by_times(tmp_path):
    """Simulate a clock that was set back by a day after the first three checkpoints."""
    for step in (2, 4, 9, 10):
        path = make_checkpoint(tmp_path, step)
        if step < 10:
            os.utime(path, (time.time() + 86400,) * 2)

    def left(**limits) -> set[str]:
        rotate_checkpoints(tmp_path / "checkpoint-10", **limits)
        return {path.name.removeprefix("checkpoint-") for path in tmp_path.iterdir()}

    assert left(limit=None) == left(limit=9) == left(limit=4) == {"2", "4", "9", "10"}
    assert left(limit=3) == {"4", "9", "10"}
    # The run was in another directory when it saved the best checkpoint.
    assert left(limit=2, best="elsewhere/checkpoint-4") == {"4", "10"}
    assert left(limit=1) == {"10"}


def test_a_copied_checkpoint_can_be_resumed(tmp_path, caplog):
    """The copy has other times. The schedule is constant, so more steps change no update, but another rate does."""
    arguments = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.5}
    make_trainer(tmp_path / "first", make_documents(), arguments=arguments).train()
    copy = tmp_path / "copy/checkpoint-1"
    shutil.copytree(tmp_path / "first/checkpoint-1", copy, copy_function=shutil.copyfile)
    for path in (*copy.iterdir(), copy):
        os.utime(path, (0, 0))
    arguments |= {"max_steps": 2, "learning_rate": 0.25}
    with pytest.raises(UserError) as raised:
        make_trainer(tmp_path / "copy", make_documents(), arguments=arguments).train(resume_from_checkpoint=True)
    assert "--learning_rate was 0.5 and is now 0.25. Restore the earlier settings" in str(raised.value)
    arguments |= {"allow_inexact_resume": True}
    trainer = make_trainer(tmp_path / "copy", make_documents(), arguments=arguments)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2 and "although --learning_rate was 0.5 and is now 0.25." in caplog.text


def test_a_model_is_replaced_only_by_a_complete_one(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, make_documents())
    (tmp_path / "mine.safetensors").touch()
    trainer.save_model()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() >= {"config.json", "model.safetensors", "mine.safetensors"}
    assert ".saving" not in before

    trainer.model.model.norm.weight.data += 1
    with monkeypatch.context() as patch:
        # Saving the config fails, as on a full disk.
        patch.setattr("hf_pretrain.model.configuration_minimind.MiniMindConfig.save_pretrained", fail)
        with pytest.raises(OSError):
            trainer.save_model()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    trainer.save_model()
    assert (tmp_path / "model.safetensors").read_bytes() != before["model.safetensors"]


def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_sharded_model_takes_weights_without_its_tied_head(tmp_path):
    """The table of messages refuses them for an untied one."""
    model = toy_model()
    model.save_pretrained(tmp_path)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.model.norm.weight.data += 1
    load_weights(tmp_path, model)
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def test_the_newest_run_is_the_one_whose_weights_are(tmp_path):
    for seconds, name in enumerate(["first", "second", "another-model", "reward", "unfinished"]):
        (tmp_path / name).mkdir()
        model_type = "llama" if name == "another-model" else "minimind"
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        if name == "reward":
            MiniMindForSequenceClassification(toy_model().config).save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "model.safetensors"):
            (tmp_path / name / file).touch()
            os.utime(tmp_path / name / file, (seconds, seconds))
    # A killed program left half a config, and no weights.
    (tmp_path / "unfinished/config.json").write_text("{")
    (tmp_path / "unfinished/model.safetensors").unlink()
    assert find_newest_run(str(tmp_path)) == str(tmp_path / "second")
    # `chat` also talks to a newer adapter, but not to that of a reward model.
    for seconds, task in ((8, "CAUSAL_LM"), (9, "SEQ_CLS")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "adapter_config.json").write_text(json.dumps({"task_type": task}))
        for file in ("tokenizer.json", "adapter_model.safetensors"):
            (tmp_path / task / file).touch()
            os.utime(tmp_path / task / file, (seconds, seconds))
    assert find_newest_run(str(tmp_path)) == str(tmp_path / "second")
    assert find_newest_run(str(tmp_path), with_adapters=True) == str(tmp_path / "CAUSAL_LM")
    os.utime(tmp_path / "first/model.safetensors", (9, 9))
    assert find_newest_run(str(tmp_path)) == str(tmp_path / "first")

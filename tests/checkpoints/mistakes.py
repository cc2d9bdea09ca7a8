"""Mistakes with the checkpoint that a run resumes from, and with its directory."""

from pathlib import Path

from hf_pretrain.checkpoints.directory import find_newest_run
from hf_pretrain.checkpoints.manifest import MANIFEST_NAME, write_manifest
from hf_pretrain.checkpoints.whole_weights import load_weights
from hf_pretrain.training.resume_check import check_resume
from hf_pretrain.training.resuming import checkpoint_to_resume
from tests.checkpoints.toys import arguments, make_checkpoint
from tests.mistakes import Mistake
from tests.toys import toy_model
from tests.trainers import make_documents, make_trainer


def resume(change=lambda path: None, *, named=None, run="", **settings):
    """Resume in a directory with a checkpoint that was changed."""

    def make(tmp_path):
        checkpoint = make_checkpoint(tmp_path, 9)
        change(Path(checkpoint))
        settings["resume"] = str(tmp_path) if named == "directory" else checkpoint if named == "checkpoint" else named
        checkpoint_to_resume(arguments(tmp_path / run, **settings))

    return make


def add_shards_of_torch(path):
    (path / "pytorch_model_fsdp_0").mkdir()
    (path / "pytorch_model_fsdp_0/.metadata").touch()


def resume_beside_a_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    checkpoint_to_resume(arguments(tmp_path, "auto"))


def resume_another_version(tmp_path):
    write_manifest(tmp_path, {"layout": 1})
    check_resume(str(tmp_path), {}, None)


def save_without_a_config(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_pretrain.model.configuration_minimind.MiniMindConfig.save_pretrained", fail)
    make_trainer(tmp_path, make_documents()).save_model()


def load_without_the_head(tmp_path):
    toy_model().save_pretrained(tmp_path)
    load_weights(tmp_path, toy_model(tie_word_embeddings=False))


MISTAKES = [
    Mistake("is not empty.*`--resume_from_checkpoint auto`", resume()),
    Mistake("is not a checkpoint: it has no trainer_state.json", resume(named="directory")),
    Mistake("auto finds no checkpoint in .*, but a model .model.safetensors.*overwrite", resume_beside_a_model),
    Mistake(
        "checkpoint-9 is damaged: trainer_state.json has 3 bytes instead of 2",
        resume(lambda path: (path / "trainer_state.json").write_text("{ }"), named="checkpoint"),
    ),
    Mistake(
        "no manifest.json, so nothing says .* intact.*--allow_inexact_resume",
        resume(lambda path: (path / MANIFEST_NAME).unlink(), named="auto"),
    ),
    Mistake(
        "outside --output_dir.*DeepSpeed.*runs whatever code.*move the checkpoint",
        resume(named="checkpoint", run="run", deepspeed=object()),
    ),
    Mistake("outside --output_dir.*torch's .metadata", resume(add_shards_of_torch, named="checkpoint", run="run")),
    Mistake("another version of hf_pretrain wrote its manifest.json", resume_another_version),
    Mistake("could not be saved: .*No space left", save_without_a_config, OSError),
    Mistake("missing .'lm_head.weight'.", load_without_the_head),
    Mistake("No model in .*run `hf-pretrain pretrain` first", lambda tmp_path: find_newest_run(str(tmp_path))),
]

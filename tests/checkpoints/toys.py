"""Toy checkpoints, and the arguments that name them."""

from pathlib import Path
from types import SimpleNamespace

from hf_pretrain.checkpoints.manifest import write_manifest


def arguments(output_dir, resume=None, allow_inexact_resume=False, deepspeed=None):
    resuming = {"resume_from_checkpoint": resume, "allow_inexact_resume": allow_inexact_resume}
    ranks = {"deepspeed_plugin": deepspeed, "process_index": 0, "world_size": 1}
    return SimpleNamespace(output_dir=str(output_dir), **resuming, **ranks)


def make_checkpoint(output_dir: Path, step: int) -> str:
    path = output_dir / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    write_manifest(path, {"step": step})
    return str(path)

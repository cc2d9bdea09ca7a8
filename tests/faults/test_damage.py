"""Damage to any file of a real checkpoint: the run renames the checkpoint and resumes from the one before it."""

import shutil

import pytest

from hf_pretrain.checkpoints.directory import newest_checkpoint
from hf_pretrain.checkpoints.manifest import MANIFEST_NAME
from tests.faults.driving import command, run


def damage(path, how: str) -> None:
    content = path.read_bytes()
    if how == "a flipped bit":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "deleted":
        path.unlink()
    else:
        path.with_name(f"{path.name}.copy").write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a flipped bit", "truncated", "deleted", "a file beside it"])
def test_damage_to_every_file(how, reference, tmp_path, record):
    source = reference()
    files = sorted(path.relative_to(source / "checkpoint-8") for path in (source / "checkpoint-8").rglob("*.*"))
    assert len(files) >= 13
    for number, file in enumerate(files):
        output_dir = tmp_path / str(number)
        for name in ("checkpoint-6", "checkpoint-8"):
            shutil.copytree(source / name, output_dir / name)
        if how == "deleted" and file.name == MANIFEST_NAME:
            damage(output_dir / "checkpoint-8" / file, how)
            with pytest.raises(ValueError, match="checkpoint-8 has no manifest.json, so nothing says whether"):
                newest_checkpoint(output_dir)
        else:
            damage(output_dir / "checkpoint-8" / file, how)
            assert newest_checkpoint(output_dir) == str(output_dir / "checkpoint-6")
            assert {path.name for path in output_dir.iterdir()} == {"checkpoint-6", "damaged-checkpoint-8"}
        record(f"damage: {how}", True)


@pytest.mark.slow
def test_the_resumed_run_reports_the_damage(reference, tmp_path, ends_like, workspace):
    for name in ("checkpoint-4", "checkpoint-6"):
        shutil.copytree(reference() / name, tmp_path / "run" / name)
    damage(tmp_path / "run/checkpoint-6/optimizer.pt", "a flipped bit")
    words = command(workspace, tmp_path / "run")
    result = run([*words, "--resume_from_checkpoint", str(tmp_path / "run/checkpoint-6")])
    assert result.returncode != 0 and "checkpoint-6 is damaged: optimizer.pt has a different sha256" in result.stdout
    output = ends_like("damage: then resumed", tmp_path / "run")
    assert "is damaged and was renamed to damaged-checkpoint-6: optimizer.pt has a different sha256." in output
    assert "Resuming from" in output and "checkpoint-4." in output

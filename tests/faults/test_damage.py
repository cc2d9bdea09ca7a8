"""Damage to a file of a real checkpoint: the run renames the checkpoint and resumes from the one before it."""

import shutil

import pytest

from tests.faults.driving import command, run


@pytest.mark.slow
def test_the_resumed_run_reports_the_damage(reference, tmp_path, ends_like, workspace):
    for name in ("checkpoint-4", "checkpoint-6"):
        shutil.copytree(reference() / name, tmp_path / "run" / name)
    path = tmp_path / "run/checkpoint-6/optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    words = command(workspace, tmp_path / "run")
    result = run([*words, "--resume_from_checkpoint", str(tmp_path / "run/checkpoint-6")])
    assert result.returncode != 0 and "checkpoint-6 is damaged: optimizer.pt has a different sha256" in result.stdout
    output = ends_like(tmp_path / "run")
    assert "is damaged and was renamed to damaged-checkpoint-6: optimizer.pt has a different sha256." in output
    assert "Resuming from" in output and "checkpoint-4." in output

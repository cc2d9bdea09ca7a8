"""The package reads untrusted files without running code, or refuses them."""

import shutil
from pathlib import Path

import pytest
import torch

from hf_pretrain.checkpoints.manifest import read_manifest, write_manifest
from tests.faults.driving import command, mostly_faults, run, zero


class Hostile:
    """Create a directory when it is unpickled."""

    def __init__(self, planted: Path):
        self.planted = planted

    def __reduce__(self):
        return Path.mkdir, (self.planted,)


@pytest.fixture
def planted(tmp_path) -> Path:
    """Return a path that exists once hostile content has run. The content must work with an unrestricted unpickler."""
    proof = tmp_path / "proof"
    torch.save(Hostile(proof), tmp_path / "proof.pt")
    torch.load(tmp_path / "proof.pt", weights_only=False)
    assert proof.is_dir()
    return tmp_path / "planted"


def check_refused(words: list[str], planted: Path, message: str) -> None:
    result = run(words)
    assert result.returncode != 0 and message in result.stdout and not planted.exists(), result.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_faults(["optimizer.pt", "scheduler.pt", "rng_state.pth"], "optimizer.pt"))
def test_hostile_files_of_a_checkpoint(name, workspace, reference, planted, tmp_path):
    """The manifest matches: an attacker who can write the file can also write the manifest."""
    checkpoint = Path(shutil.copytree(reference() / "checkpoint-6", tmp_path / "run/checkpoint-6"))
    torch.save({"state": Hostile(planted)}, checkpoint / name)
    run_facts = read_manifest(checkpoint)["run"]
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, run_facts)
    words = command(workspace, tmp_path / "run", "--resume_from_checkpoint", "auto")
    check_refused(words, planted, "Weights only load failed")


@pytest.mark.faults
def test_hostile_shards_of_deepspeed(workspace, reference, planted, tmp_path):
    """Older versions saved shards. Beside a whole state, nobody reads them."""
    source = reference("deepspeed", *zero(2)) / "checkpoint-6"
    checkpoint = Path(shutil.copytree(source, tmp_path / "elsewhere/checkpoint-6"))
    run_facts = read_manifest(checkpoint)["run"]
    (checkpoint / "global_step6").mkdir()
    torch.save(Hostile(planted), checkpoint / "global_step6/mp_rank_00_model_states.pt")
    (checkpoint / "latest").write_text("global_step6")
    whole = (checkpoint / "optimizer.pt").rename(tmp_path / "optimizer.pt")
    for name in ("refused", "read"):
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint, run_facts)
        words = command(workspace, tmp_path / name, *zero(2), launcher="deepspeed")
        words += ["--resume_from_checkpoint", str(checkpoint)]
        if name == "refused":
            check_refused(words, planted, "move the checkpoint into --output_dir")
            whole.rename(checkpoint / "optimizer.pt")
    result = run(words)
    assert result.returncode == 0 and not planted.exists(), result.stdout[-3000:]

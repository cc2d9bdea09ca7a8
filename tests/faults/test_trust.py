"""The package reads untrusted files without running code, or refuses them; and it writes the token nowhere."""

import shutil
from pathlib import Path

import pytest
import torch

from hf_pretrain.checkpoints.manifest import read_manifest, write_manifest
from tests.faults.driving import command, run, zero
from tests.hub_server import TOKEN, HubServer


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


def refuses(words: list[str], planted: Path, *messages: str) -> bool:
    result = run(words)
    assert not planted.exists(), result.stdout[-3000:]
    assert result.returncode != 0 and all(message in result.stdout for message in messages), result.stdout[-3000:]
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "optimizer.pt" else pytest.mark.faults)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    ],
)
def test_hostile_files_of_a_checkpoint(name, workspace, reference, planted, tmp_path):
    """The manifest matches: an attacker who can write the file can also write the manifest."""
    checkpoint = Path(shutil.copytree(reference() / "checkpoint-6", tmp_path / "run/checkpoint-6"))
    torch.save({"state": Hostile(planted)}, checkpoint / name)
    run_facts = read_manifest(checkpoint)["run"]
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, run_facts)
    words = command(workspace, tmp_path / "run", "--resume_from_checkpoint", "auto")
    refuses(words, planted, "Weights only load failed")


@pytest.mark.faults
def test_hostile_shards_of_deepspeed(workspace, reference, planted, tmp_path):
    source = reference("deepspeed", *zero(2)) / "checkpoint-6"
    checkpoint = Path(shutil.copytree(source, tmp_path / "elsewhere/checkpoint-6"))
    for shard in checkpoint.glob("global_step*/*.pt"):
        torch.save(Hostile(planted), shard)
    words = command(workspace, tmp_path / "run", *zero(2), launcher="deepspeed")
    words += ["--resume_from_checkpoint", str(checkpoint)]
    refuses(words, planted, "move the checkpoint into --output_dir")


@pytest.mark.faults
def test_hostile_weights(workspace, planted, tmp_path):
    words = command(workspace, tmp_path / "run", "--tokenizer_name_or_path", str(workspace / "toy"))
    torch.save({"model.embed_tokens.weight": Hostile(planted)}, tmp_path / "model.pth")
    words[words.index("--model_name_or_path") + 1] = str(tmp_path / "model.pth")
    refuses(words, planted, "was refused before any code in it ran")


@pytest.mark.faults
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_the_token_is_in_nothing_written_or_sent(launcher, workspace, tmp_path):
    with HubServer() as hub:
        words = command(
            workspace, tmp_path / "run", "--push_to_hub", "--hub_strategy", "checkpoint", launcher=launcher
        )
        result = run(
            [*words, "--hub_model_id", "user/toy"],
            **hub.client_environment(),
        )
        sent = hub.bytes_received()
    assert result.returncode == 0 and hub.repos["user/toy"].commits, result.stdout[-3000:]
    home = Path(hub.client_home)
    written = b"".join(
        path.read_bytes() for folder in (tmp_path, home) for path in folder.rglob("*") if path.is_file()
    )
    assert b"manifest.json" in sent and b"train_batch_size" in sent and b"train_batch_size" in written
    assert TOKEN.encode() not in sent + written + result.stdout.encode()

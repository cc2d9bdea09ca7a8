"""The manifest reveals every change to the files of a checkpoint."""

import json
import os

import pytest

from hf_pretrain.checkpoints.manifest import MANIFEST_NAME, find_damage, read_manifest, write_manifest


FILES = {"model.safetensors": b"weights", "optimizer.pt": b"moments", "global_step2/rank_0.pt": b"shard", "empty": b""}
RUN = {"step": 2}


@pytest.fixture
def checkpoint(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path, RUN)
    return tmp_path


def test_an_unchanged_checkpoint_verifies(checkpoint):
    assert find_damage(checkpoint) == []
    manifest = read_manifest(checkpoint)
    assert manifest["run"] == RUN and manifest["files"].keys() == FILES.keys()


# An empty file has no bit to flip and no byte to truncate.
FAULTS = [
    (fault, name)
    for fault in ("flip", "truncate", "delete", "extend", "link")
    for name in (*FILES, MANIFEST_NAME)
    if FILES.get(name) or fault not in ("flip", "truncate") or name == MANIFEST_NAME
]


@pytest.mark.parametrize(("fault", "name"), FAULTS)
def test_every_fault_of_every_file_is_found(checkpoint, tmp_path_factory, name, fault):
    path = checkpoint / name
    content = path.read_bytes()
    if fault == "flip":
        for bit in range(8 * len(content)):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            # Blanks between JSON tokens have no meaning. The checksum covers everything else.
            assert find_damage(checkpoint) or json.loads(changed) == json.loads(content), bit
        return
    if fault == "truncate":
        path.write_bytes(content[:-1])
    elif fault == "delete":
        path.unlink()
    elif fault == "extend":
        path.write_bytes(content + b"\0")
    else:
        other = tmp_path_factory.mktemp("other") / "file"
        path.rename(other)
        os.symlink(other, path)
    damage = find_damage(checkpoint)
    if fault == "link" and name == MANIFEST_NAME:
        assert not damage
    else:
        assert len(damage) == 1 and damage[0].startswith(name)


def test_a_file_that_cannot_be_read_is_damage(checkpoint):
    (checkpoint / "global_step2").rename(checkpoint / "moved")
    os.symlink("/nowhere", checkpoint / "global_step2")
    assert find_damage(checkpoint)
    name = next(path for path in checkpoint.iterdir() if path.is_file() and path.name != MANIFEST_NAME)
    name.unlink()
    os.symlink("/nowhere", name)
    assert f"{name.name} is a link" in find_damage(checkpoint)


def test_an_added_file_is_found(checkpoint):
    (checkpoint / "global_step2/rank_1.pt").touch()
    assert find_damage(checkpoint) == ["global_step2/rank_1.pt was added"]


def test_a_manifest_edited_by_hand_is_damaged(checkpoint):
    content = json.loads((checkpoint / MANIFEST_NAME).read_text())
    content["run"]["step"] = 3
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(content))
    assert find_damage(checkpoint) == ["manifest.json is damaged (its own sha256 does not match)"]
    for text in ("", "[]", "{}", '{"sha256": 1, "files": []}'):
        (checkpoint / MANIFEST_NAME).write_text(text)
        assert len(find_damage(checkpoint)) == 1

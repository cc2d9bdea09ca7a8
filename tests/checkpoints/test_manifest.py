"""The manifest reveals every change to the files of a checkpoint."""

import json
import os
from pathlib import Path
from tempfile import mkdtemp

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


def test_an_unchanged_checkpoint_verifies_and_an_added_file_is_found(checkpoint):
    assert find_damage(checkpoint) == []
    manifest = read_manifest(checkpoint)
    assert manifest["run"] == RUN and manifest["files"].keys() == FILES.keys()
    (checkpoint / "global_step2/rank_1.pt").touch()
    assert find_damage(checkpoint) == ["global_step2/rank_1.pt was added"]


@pytest.mark.parametrize("name", [name for name in (*FILES, MANIFEST_NAME) if name != "empty"])
def test_a_flipped_bit_of_every_byte_is_found(checkpoint, name):
    content = (checkpoint / name).read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (checkpoint / name).write_bytes(changed)
        # Blanks between JSON tokens have no meaning. The checksum covers everything else.
        assert find_damage(checkpoint) or json.loads(changed) == json.loads(content), place


def move_and_link(path: Path) -> None:
    path.symlink_to(path.rename(Path(mkdtemp()) / "file"))


CHANGES = {
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "extend": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "delete": Path.unlink,
    "link": move_and_link,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*FILES, MANIFEST_NAME])
def test_every_change_of_every_file_is_found(checkpoint, name, change):
    CHANGES[change](checkpoint / name)
    # Nothing is shorter than an empty file, and the manifest may be a link.
    expected = [] if (change, name) in (("truncate", "empty"), ("link", MANIFEST_NAME)) else [name]
    assert [damage[: len(name)] for damage in find_damage(checkpoint)] == expected


def test_a_file_that_cannot_be_read_is_damage(checkpoint):
    (checkpoint / "global_step2").rename(checkpoint / "moved")
    os.symlink("/nowhere", checkpoint / "global_step2")
    assert find_damage(checkpoint)
    name = next(path for path in checkpoint.iterdir() if path.is_file() and path.name != MANIFEST_NAME)
    name.unlink()
    os.symlink("/nowhere", name)
    assert f"{name.name} is a link" in find_damage(checkpoint)


def test_a_manifest_edited_by_hand_is_damaged(checkpoint):
    content = json.loads((checkpoint / MANIFEST_NAME).read_text())
    content["run"]["step"] = 3
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(content))
    assert find_damage(checkpoint) == ["manifest.json is damaged (its own sha256 does not match)"]
    for text in ("", "[]", "{}", '{"sha256": 1, "files": []}'):
        (checkpoint / MANIFEST_NAME).write_text(text)
        assert len(find_damage(checkpoint)) == 1

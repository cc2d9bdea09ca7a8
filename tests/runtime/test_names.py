"""Parsing of the names of models and datasets."""

import pytest

from hf_pretrain.run_directory.facts import RunFacts
from hf_pretrain.runtime.names import DatasetName, is_path, may_be_checkpoint, split_hub_name


@pytest.mark.parametrize(
    ("parse", "name", "parts"),
    [
        (split_hub_name, "owner/name:full_sft_512.pth", ("owner/name", "full_sft_512.pth")),
        (split_hub_name, "owner/name", ("owner/name", None)),
        (split_hub_name, "name:file.pth", ("name:file.pth", None)),
        (DatasetName.parse, "owner/name", DatasetName("owner/name")),
        (DatasetName.parse, "owner/name:config", DatasetName("owner/name", "config")),
        (DatasetName.parse, "owner/name@v1", DatasetName("owner/name", None, "v1")),
        (DatasetName.parse, "owner/name:config@refs/pr/3", DatasetName("owner/name", "config", "refs/pr/3")),
        (DatasetName.parse, "owner/name@branch:with-colon", DatasetName("owner/name", None, "branch:with-colon")),
    ],
)
def test_names_are_split(parse, name, parts):
    assert parse(name) == parts


def test_embedded_names_are_no_repositories(tmp_path):
    assert DatasetName.parse("embedded").is_embedded and DatasetName.parse("embedded:dialogues").is_embedded
    assert not DatasetName.parse("embedded-texts/mine").is_embedded
    file = tmp_path / "train.jsonl"
    file.touch()
    facts = RunFacts(datasets=["embedded:dialogues", str(file), "my/*.jsonl", "me/data:zh@v2", "embedded-texts/mine"])
    assert facts.hub_datasets == ["me/data", "embedded-texts/mine"]


@pytest.mark.parametrize(
    "name", ["./out", "/data/x", "~/x", "a/b/c", "model.pth", "owner/name.safetensors", "out/sft", "here/sft-tin"]
)
def test_paths_are_no_hub_ids(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A name in a directory that exists is a path.
    assert not is_path("here/sft-tin")
    (tmp_path / "here").mkdir()
    assert is_path(name) and not may_be_checkpoint(name)


def test_hub_ids_and_directories_may_be_checkpoints(tmp_path):
    assert not is_path("owner/name") and may_be_checkpoint("owner/name")
    assert not is_path("owner/name:x.pth") and not may_be_checkpoint("owner/name:x.pth")
    assert is_path(tmp_path) and may_be_checkpoint(tmp_path)

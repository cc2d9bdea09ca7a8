"""Parsing of the names of models and datasets."""

import pytest
from huggingface_hub import ModelCard
from transformers import TrainerState

from hf_pretrain.hub.model_card import RunFacts, format_run_card
from hf_pretrain.runtime.names import DatasetName, is_path, may_be_checkpoint, split_hub_name


@pytest.mark.parametrize(
    "name, parts",
    [
        ("owner/name:full_sft_512.pth", ("owner/name", "full_sft_512.pth")),
        ("owner/name", ("owner/name", None)),
        ("name:file.pth", ("name:file.pth", None)),
    ],
)
def test_model_names(name, parts):
    assert split_hub_name(name) == parts


@pytest.mark.parametrize(
    "name, parts",
    [
        ("owner/name", ("owner/name", None, None)),
        ("owner/name:config", ("owner/name", "config", None)),
        ("owner/name@v1", ("owner/name", None, "v1")),
        ("owner/name:config@refs/pr/3", ("owner/name", "config", "refs/pr/3")),
        ("owner/name@branch:with-colon", ("owner/name", None, "branch:with-colon")),
    ],
)
def test_dataset_names(name, parts):
    parsed = DatasetName.parse(name)
    assert (parsed.repo_id, parsed.config, parsed.revision) == parts and not parsed.is_embedded


def test_cards_name_hub_ids_and_no_paths(build_model):
    def card(base_model: str, dataset: str) -> ModelCard:
        facts = RunFacts(datasets=[dataset], base_model=base_model)
        state = TrainerState(log_history=[], max_steps=1)
        return ModelCard(format_run_card(build_model(), state, facts, repo_id="me/x", training=[]))

    assert card("owner/name:full_sft_512.pth", "me/data").data.base_model == "owner/name"
    assert card("owner/name", "me/data").data.datasets == ["me/data"]
    private = card("~/models/mine", "~/private/mine.jsonl")
    assert private.data.base_model is None and private.data.datasets is None
    assert "private" not in private.content and "mine.jsonl" in private.content


def test_embedded_names_are_no_repositories(tmp_path):
    assert DatasetName.parse("embedded").is_embedded and DatasetName.parse("embedded:dialogues").is_embedded
    assert not DatasetName.parse("embedded-texts/mine").is_embedded
    file = tmp_path / "train.jsonl"
    file.touch()
    facts = RunFacts(datasets=["embedded:dialogues", str(file), "my/*.jsonl", "me/data:zh@v2", "embedded-texts/mine"])
    assert facts.hub_datasets == ["me/data", "embedded-texts/mine"]


@pytest.mark.parametrize(
    "name", ["./out", "/data/x", "~/x", "a/b/c", "model.pth", "owner/name.safetensors", "out/sft"]
)
def test_paths_are_no_hub_ids(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_path(name) and not may_be_checkpoint(name)


def test_a_name_in_a_directory_that_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_path("runs/sft-tin")
    (tmp_path / "runs").mkdir()
    assert is_path("runs/sft-tin") and not may_be_checkpoint("runs/sft-tin")


def test_hub_ids_and_directories_may_be_checkpoints(tmp_path):
    assert not is_path("owner/name") and may_be_checkpoint("owner/name")
    assert not is_path("owner/name:x.pth") and not may_be_checkpoint("owner/name:x.pth")
    assert is_path(tmp_path) and may_be_checkpoint(tmp_path)

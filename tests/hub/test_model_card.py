"""Model cards: their figures and names."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import TrainerState

from hf_pretrain.hub.model_card import format_conversion_card, format_run_card
from hf_pretrain.run_directory.facts import RunFacts


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


@pytest.mark.parametrize(
    "experts", [{"num_shared_experts": 1}, {"num_experts_per_tok": 1, "tie_word_embeddings": False}]
)
def test_the_card_counts_the_parameters_that_a_token_uses(build_model, experts):
    """An expert that no token is routed to gets no gradient."""
    model = build_model(num_experts=4, moe_intermediate_size=24, **experts)
    model(torch.tensor([[5]])).logits.square().sum().backward()
    whole = sum(part.numel() for part in model.parameters())
    stacked = [part for part in model.parameters() if part.dim() == 3]
    assert len(stacked) == 4 and whole == model.num_parameters()
    unused = sum((~part.grad.flatten(1).any(1)).sum().item() * part[0].numel() for part in stacked)
    facts = {"repo_id": "me/toy", "source": "x", "format": "minimind", "license": None, "has_tokenizer": True}
    card = format_conversion_card(model, "done", **facts)
    assert unused and f"| parameters active per token | {whole - unused:,} |" in card


def record(name: str, base: str | None, **fields) -> None:
    """Write the record of a run in the directory `name` that began with the model `base`."""
    Path(name).mkdir(parents=True)
    launch = {"directory": os.getcwd(), "arguments": {"model_name_or_path": base}}
    Path(name, "run.json").write_text(json.dumps([launch | fields, {"directory": "elsewhere"}]))


def test_the_cards_of_derived_models_name_the_published_model_and_its_licence(build_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def convert(source: str, form: str = "gguf", **others: str) -> ModelCard:
        how = {"source": source, "format": form, "repo_id": "gguf", "license": None, "has_tokenizer": True} | others
        return ModelCard(format_conversion_card(build_model(), "done", **how))

    record("out/taught", "embedded:smollm2")
    record("out/dpo", "out/taught")
    record("out/dpo/checkpoint-5/deeper", "out/dpo/checkpoint-5")
    record("out/owned", "owner/name")
    record("out/loop", "out/loop")
    smollm2 = ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    expected = {"out/taught": smollm2, "out/dpo": smollm2, "out/dpo/checkpoint-5/deeper": smollm2}
    expected |= {"embedded:smollm2": smollm2, smollm2[0]: smollm2, "out/owned": ("owner/name", None)}
    expected |= {"out/loop": (None, None), "out/nothing": (None, None)}
    for source, pair in expected.items():
        card = convert(source).data
        assert (card.base_model, card.license) == pair, source
        state = TrainerState(log_history=[], max_steps=1)
        trained = format_run_card(build_model(), state, RunFacts(base_model=source), repo_id="me/x", training=[])
        assert (ModelCard(trained).data.base_model, ModelCard(trained).data.license) == pair, source
    # A conversion has no record, but a card.
    (tmp_path / "merged").mkdir()
    convert("out/taught", "minimind").save("merged/README.md")
    (tmp_path / "merged/model.gguf").touch()
    assert (convert("merged").data.base_model, convert("merged/model.gguf").data.license) == smollm2
    assert convert("merged", license="mit").data.license == "mit"
    # peft's cards name the base model as it was loaded.
    (tmp_path / "merged/README.md").write_text(f"---\nbase_model: {tmp_path}/private\nlicense: mit\n---\n")
    assert (convert("merged").data.base_model, convert("merged").data.license) == (None, "mit")
    (tmp_path / "merged/README.md").write_text("---\n[\n---\n")
    assert convert("merged").data.base_model is None
    # A directory is no repository of the Hub.
    assert "llama-cli -m gguf/model.gguf\n" in convert("merged").content
    assert "llama-cli -hf me/gguf\n" in convert("merged", repo_id="me/gguf").content


def test_the_cards_name_the_licences_of_all_embedded_data_and_models_that_a_model_has_seen(
    build_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def licences(card: str) -> dict[str, str]:
        rows = re.findall(r"^\| `embedded:(\w+)` \| \[(.*)\]\(.*\) \| (.*) \|$", card, re.MULTILINE)
        assert ModelCard(card).data.to_dict().get("embedded", []) == [f"embedded:{name}" for name, *_ in rows]
        return {name: licence for name, _, licence in rows}

    def trained(*datasets: str, base: str | None = None, recipe: str = "sft") -> str:
        facts = RunFacts(recipe=recipe, datasets=[*datasets], base_model=base)
        state = TrainerState(log_history=[], max_steps=1)
        return format_run_card(build_model(), state, facts, repo_id="me/x", training=[])

    corpora = {"chatterbot": "BSD-3-Clause", "chitchat": "MIT", "idiom": "MIT"}
    idiom, smollm2 = {"idiom": "MIT"}, {"smollm2": "Apache-2.0"}
    assert licences(trained("me/data", "my/file.jsonl")) == {} and "Licences" not in trained("me/data")
    assert licences(trained("embedded")) == corpora and licences(trained("embedded:idiom", "me/data")) == idiom
    assert licences(trained("embedded:answer-format", base="embedded:smollm2")).keys() == {
        *("chatterbot", "chitchat", "smollm2")
    }
    assert licences(trained("embedded:arithmetic")) == {}
    # The rejected replies come from all corpora.
    assert licences(trained("embedded:idiom", recipe="dpo")) == corpora
    assert licences(trained("my/pairs.jsonl", recipe="dpo", base="embedded:smollm2")) == smollm2

    # What the runs before this one have read, from their records and cards.
    record("out/first", None, recipe="pretrain", data={"names": ["embedded:idiom"]})
    record("out/second", "out/first", recipe="sft", data={"names": ["my/file.jsonl"]})
    third = trained("embedded:chitchat", base="out/second")
    assert licences(third) == {"chitchat": "MIT", "idiom": "MIT"}
    Path("out/third").mkdir()
    Path("out/third/README.md").write_text(third)
    how = {"format": "gguf", "repo_id": "gguf", "license": None, "has_tokenizer": True}
    assert licences(format_conversion_card(build_model(), "done", source="out/third", **how)) == licences(third)
    Path("out/third/README.md").write_text("---\nembedded: 7\n---\n")
    assert licences(trained("me/data", base="out/third")) == {}

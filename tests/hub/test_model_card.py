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
from tests.conftest import TOY
from tests.toys import toy_model


def run_card(*datasets: str, base: str | None = None, recipe: str = "sft") -> ModelCard:
    facts, state = RunFacts(recipe=recipe, datasets=[*datasets], base_model=base), TrainerState(max_steps=1)
    return ModelCard(format_run_card(toy_model(**TOY), state, facts, repo_id="me/x", training=[]))


def conversion_card(source: str, *, model=None, **others) -> ModelCard:
    how = {"format": "gguf", "repo_id": "gguf", "license": None, "has_tokenizer": True} | others
    return ModelCard(format_conversion_card(model or toy_model(**TOY), "done", source=source, **how))


def test_cards_name_hub_ids_and_no_paths():
    assert run_card("me/data", base="owner/name:full_sft_512.pth").data.base_model == "owner/name"
    assert run_card("me/data", base="owner/name").data.datasets == ["me/data"]
    private = run_card("~/private/mine.jsonl", base="~/models/mine")
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
    card = conversion_card("x", model=model, format="minimind")
    assert unused and f"| parameters active per token | {whole - unused:,} |" in card.content


def record(name: str, base: str | None, **fields) -> None:
    """Write the record of a run in the directory `name` that began with the model `base`."""
    Path(name).mkdir(parents=True)
    launch = {"directory": os.getcwd(), "arguments": {"model_name_or_path": base}}
    Path(name, "run.json").write_text(json.dumps([launch | fields, {"directory": "elsewhere"}]))


def test_the_cards_of_derived_models_name_the_published_model_and_its_licence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
        for card in (conversion_card(source).data, run_card(base=source).data):
            assert (card.base_model, card.license) == pair, source
    # A conversion has no record, but a card.
    (tmp_path / "merged").mkdir()
    conversion_card("out/taught", format="minimind").save("merged/README.md")
    (tmp_path / "merged/model.gguf").touch()
    assert conversion_card("merged").data.base_model == smollm2[0]
    assert conversion_card("merged/model.gguf").data.license == smollm2[1]
    assert conversion_card("merged", license="mit").data.license == "mit"
    # peft's cards name the base model as it was loaded.
    (tmp_path / "merged/README.md").write_text(f"---\nbase_model: {tmp_path}/private\nlicense: mit\n---\n")
    card = conversion_card("merged").data
    assert (card.base_model, card.license) == (None, "mit")
    (tmp_path / "merged/README.md").write_text("---\n[\n---\n")
    assert conversion_card("merged").data.base_model is None
    # A directory is no repository of the Hub.
    assert "llama-cli -m gguf/model.gguf\n" in conversion_card("merged").content
    assert "llama-cli -hf me/gguf\n" in conversion_card("merged", repo_id="me/gguf").content


def licences(card: ModelCard) -> dict[str, str]:
    rows = re.findall(r"^\| `embedded:(\w+)` \| \[(.*)\]\(.*\) \| (.*) \|$", card.content, re.MULTILINE)
    assert card.data.to_dict().get("embedded", []) == [f"embedded:{name}" for name, *_ in rows]
    return {name: licence for name, _, licence in rows}


def test_the_cards_name_the_licences_of_all_embedded_data_and_models_that_a_model_has_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpora = {"chatterbot": "BSD-3-Clause", "chitchat": "MIT", "idiom": "MIT"}
    idiom, smollm2 = {"idiom": "MIT"}, {"smollm2": "Apache-2.0"}
    assert licences(run_card("me/data", "my/file.jsonl")) == {} and "Licences" not in run_card("me/data").content
    assert licences(run_card("embedded")) == corpora and licences(run_card("embedded:idiom", "me/data")) == idiom
    answers = run_card("embedded:answer-format", base="embedded:smollm2")
    assert licences(answers).keys() == {"chatterbot", "chitchat", "smollm2"}
    assert licences(run_card("embedded:arithmetic")) == {}
    # The rejected replies come from all corpora.
    assert licences(run_card("embedded:idiom", recipe="dpo")) == corpora
    assert licences(run_card("my/pairs.jsonl", recipe="dpo", base="embedded:smollm2")) == smollm2

    # What the runs before this one have read, from their records and cards.
    record("out/first", None, recipe="pretrain", data={"names": ["embedded:idiom"]})
    record("out/second", "out/first", recipe="sft", data={"names": ["my/file.jsonl"]})
    third = run_card("embedded:chitchat", base="out/second")
    assert licences(third) == {"chitchat": "MIT", "idiom": "MIT"}
    Path("out/third").mkdir()
    third.save("out/third/README.md")
    assert licences(conversion_card("out/third")) == licences(third)
    Path("out/third/README.md").write_text("---\nembedded: 7\n---\n")
    assert licences(run_card("me/data", base="out/third")) == {}

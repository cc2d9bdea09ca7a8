"""Model cards: their figures and names."""

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import TrainerState

from hf_pretrain.hub.model_card import RunFacts, format_conversion_card, format_run_card


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

"""What the model computes on Apple GPUs, with the same branches on the CPU."""

import pytest
import torch

from tests.model.test_modeling_minimind import LENGTHS, assert_near, gradients, left_padded
from tests.toys import LikeMPS


@pytest.mark.parametrize("documents", [LENGTHS, (24,), (2, 17, 1, 4)], ids=str)
def test_losses_and_gradients_of_packed_rows_agree_with_eager(model, input_ids, documents):
    positions = torch.cat([torch.arange(length) for length in documents]).expand(2, -1)
    found = []
    for name, mode in (("eager", torch.enable_grad()), ("packed", LikeMPS())):
        model.set_attn_implementation(name)
        model.zero_grad()
        with mode:
            loss = model(input_ids, position_ids=positions, labels=input_ids).loss
            loss.backward()
        found.append(torch.cat([loss.detach()[None], gradients(model)]))
    assert_near(*found)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "packed"])
@torch.no_grad()
def test_whole_and_padded_texts_agree_with_eager(model, input_ids, attn_implementation):
    ids, mask = left_padded(input_ids)
    found = []
    for name, mode in (("eager", torch.no_grad()), (attn_implementation, LikeMPS())):
        model.set_attn_implementation(name)
        with mode:
            texts = [model(input_ids).logits, model(input_ids, use_cache=False).logits]
            padded = model(ids, attention_mask=mask).logits[mask.bool()]
            next_one = model(input_ids[:, :1], past_key_values=model(input_ids).past_key_values).logits
        found.append(torch.cat([part.flatten() for part in (*texts, padded, next_one)]))
    assert_near(*found)


def test_generation_needs_only_what_apple_gpus_have(model, input_ids):
    ids, mask = left_padded(input_ids)
    greedy = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    expected = model.generate(ids, **greedy)
    with LikeMPS():
        assert torch.equal(model.generate(ids, **greedy), expected)
        for options in ({"top_p": 0.8, "temperature": 0.7}, {"top_k": 5, "repetition_penalty": 1.1}):
            sampled = model.generate(ids, **greedy | {"do_sample": True, **options})
            assert sampled.shape[0] == 2 and sampled.shape[1] > ids.shape[1]


def test_the_mode_finds_what_apple_gpus_lack():
    states = torch.randn(1, 2, 9, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    with LikeMPS():
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(2).double()
        with pytest.raises(NotImplementedError, match="geqrf has no kernel"):
            torch.geqrf(torch.eye(3))
        with pytest.raises(AssertionError, match="is_causal"):
            attention(states, states, states, is_causal=True)

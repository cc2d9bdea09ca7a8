"""Prompts that are computed once: the same tokens, hidden states and gradients, from fewer computed tokens."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from hf_pretrain.stages import reinforcement
from hf_pretrain.stages.shared_prompts import forward_sharing, generate_sharing, share_prompts
from tests.rollouts import make_model, toy_trainer
from tests.toys import toy_model


GREEDY = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = [[3] * (width - len(row)) + row for row in rows]
    return torch.tensor(ids), torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@pytest.mark.parametrize(
    ("fields", "has_adapter"),
    [({}, False), ({}, True), ({"qk_norm": True}, False), ({"num_experts": 4, "num_experts_per_tok": 2}, False)],
    ids=["dense", "adapter", "norms", "experts"],
)
def test_each_turn_of_a_group_equals_its_rows_alone(fields, has_adapter):
    model = toy_model(max_position_embeddings=128, initializer_range=0.3, **fields).eval()
    if has_adapter:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
        # As accelerate does in a run in bf16. `generate` calls the model below, without autocast.
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    vocab, generator = model.config.vocab_size, torch.Generator().manual_seed(0)

    def some(number: int) -> list[int]:
        return torch.randint(5, vocab, (number,), generator=generator).tolist()

    computed: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: computed.append(args[0].numel()))
    prompts, generate_shared = [some(40), some(31)], partial(generate_sharing, model, model.generate)
    first = [prompt for prompt in prompts for _ in range(4)]
    # A call without names is passed on.
    assert torch.equal(generate_shared(padded(first)[0], **GREEDY), model.generate(padded(first)[0], **GREEDY))
    # In later turns, some rows of a group remain, each with an answer and a result of another length.
    second = [prompt + some(5 + 3 * number) for number, prompt in enumerate(first) if number != 2]
    short, numbers = first[0][:18] + some(9), []
    for rows in (first, second, second[3:4], [*second, some(9)], [*first, short], [short, *first], [*first, some(1)]):
        ids, mask = padded(rows)
        counts = []
        for generate in (model.generate, generate_shared):
            computed.clear()
            counts.append((generate(input_ids=ids, attention_mask=mask, **GREEDY), sum(computed)))
        (alone, many), (shared, few) = counts
        assert torch.equal(alone, shared)
        assert few < many / 1.3 if len(rows) > 1 and min(map(len, rows)) > 1 else few == many
        numbers.append(few)
    # A short row leaves the beginning of the others long, wherever it stands.
    assert numbers[4] == numbers[5]


@pytest.mark.parametrize(
    ("attn_implementation", "checkpoints"), [("packed", False), ("sdpa", False), ("eager", False), ("packed", True)]
)
def test_rows_that_begin_alike_have_the_hidden_states_and_gradients_of_rows_alone(attn_implementation, checkpoints):
    model = toy_model(max_position_embeddings=128, attn_implementation=attn_implementation).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    decoder, generator = model.get_decoder(), torch.Generator().manual_seed(0)

    def some(number: int) -> list[int]:
        return torch.randint(5, model.config.vocab_size, (number,), generator=generator).tolist()

    # Two prompts in turn, as TRL shuffles them; equal rows, one that is the prompt alone, and one of its own.
    prompts = [some(40), some(31)]
    rows = [prompts[number % 2] + some(3 + 4 * number) for number in range(7)]
    rows += [rows[2], prompts[1], some(50)]
    width = max(map(len, rows))
    # Padding on both sides.
    sides = [(len(rows) - number, width + number - len(row)) for number, row in enumerate(rows)]
    ids = torch.tensor([[3] * left + row + [3] * right for (left, right), row in zip(sides, rows, strict=True)])
    mask = torch.tensor(
        [[0] * left + [1] * len(row) + [0] * right for (left, right), row in zip(sides, rows, strict=True)]
    )
    weights = torch.randn(*ids.shape, model.config.hidden_size, generator=generator) * mask[..., None]
    computed: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: computed.append(args[0].numel()))
    results = []
    for forward in (decoder.forward, partial(forward_sharing, decoder, decoder.forward)):
        model.zero_grad()
        hidden_states = forward(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        (hidden_states * weights).sum().backward()
        results.append([hidden_states.detach() * mask[..., None], *(each.grad for each in decoder.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    many, few = computed[0], sum(computed[1:])
    # Layers that compute their activations again keep no cache, so each row is computed by itself.
    assert few < many / 1.5 or checkpoints


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_run_computes_fewer_tokens_and_learns_the_same(tokenizer, tmp_path, monkeypatch, has_adapter):
    results = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(reinforcement, "share_prompts", lambda *args: None)
        torch.manual_seed(0)
        model = make_model(initializer_range=0.1)
        if has_adapter:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
        trainer = toy_trainer(tokenizer, tmp_path / str(shares), model=model, per_device_train_batch_size=8, beta=0.1)
        computed = {True: 0, False: 0}

        def count(module, args, computed=computed):
            computed[torch.is_grad_enabled()] += args[0].numel()

        model.get_input_embeddings().register_forward_pre_hook(count)
        trainer.train()
        results.append(([row["grad_norm"] for row in trainer.state.log_history if "loss" in row], computed))
    (norms, few), (plain_norms, many) = results
    assert norms == pytest.approx(plain_norms, rel=1e-3) and min(norms) > 1e-2
    # Rollouts without gradients, trainings with them.
    assert few[False] < many[False] / 1.5
    assert few[True] < many[True] / 1.5


@pytest.mark.parametrize(
    ("flags", "rollouts", "training"),
    [
        ({}, True, True),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, True, False),
        ({"generation_kwargs": {"num_beams": 2}}, False, True),
        ({"cache_implementation": "static"}, False, True),
    ],
)
def test_a_run_shares_where_its_flags_allow(tokenizer, tmp_path, flags, rollouts, training):
    model = toy_trainer(tokenizer, tmp_path, **flags).model
    assert ("generate" in vars(model), "forward" in vars(model.get_decoder())) == (rollouts, training)


def test_a_model_that_generates_without_a_cache_shares_no_rollouts(tokenizer, tmp_path):
    model = make_model()
    model.generation_config.use_cache = False
    assert "generate" not in vars(toy_trainer(tokenizer, tmp_path, model=model).model)


def test_shared_rollouts_compile_no_layer_again(tokenizer, tmp_path, monkeypatch):
    numbers = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(reinforcement, "share_prompts", lambda *args: None)
        torch.compiler.reset()
        counters.clear()
        flags = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1}
        toy_trainer(tokenizer, tmp_path, model=make_model(num_hidden_layers=3), **flags).train()
        numbers.append(counters["frames"]["total"])
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize(("penalty", "is_shared"), [(1.0, True), (1.1, False)])
def test_rollouts_with_a_penalty_are_not_shared(penalty, is_shared):
    """It would count the padding, whose width differs."""
    model, others = toy_model(), {"cache_implementation": None, "generation_kwargs": None, "use_vllm": False}
    share_prompts(
        model, SimpleNamespace(repetition_penalty=penalty, shards_weights=False, compiles_layers=True, **others)
    )
    assert isinstance(model.generate, partial) == is_shared

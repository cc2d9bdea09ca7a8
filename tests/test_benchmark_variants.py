"""Each variant of `benchmarks.learning` does what its name says, compared with the formula written out."""

import pytest
import torch
from datasets import Dataset
from torch import nn

from benchmarks import variants
from benchmarks.learning import run
from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.data.packing import prepare_rows
from hf_pretrain.model.loss import linear_masked_cross_entropy
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import EXPERTS


SHAPE = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def follow(name: str, start: list[float], gradient: list[float], *, steps: int, **settings) -> torch.Tensor:
    """Return the parameter after `steps` of SGD with a constant gradient."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    variants.CANDIDATES[name].follow_optimizer(optimizer, model, steps)
    for _ in range(steps):
        model.weight.grad = torch.tensor(gradient)
        optimizer.step()
    return model.weight.detach()


def test_cautious_weight_decay_leaves_weights_alone_that_grow():
    # The update is -0.1 * gradient. It moves the first and the last weight towards zero.
    found = follow("cautious weight decay", [1.0, -1.0, -1.0], [1.0, 1.0, -1.0], steps=1, lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(found, torch.tensor([1 - 0.1 - 0.05, -1 - 0.1, -1 + 0.1 + 0.05]))


def test_the_weight_decay_falls_to_zero():
    found = follow("decaying weight decay", [1.0], [0.0], steps=4, lr=0.1, weight_decay=0.5)
    expected = (1 - 0.05) * (1 - 0.05 * 3 / 4) * (1 - 0.05 * 2 / 4) * (1 - 0.05 / 4)
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_the_last_weights_are_averaged():
    # Weights 0.19 and 0.20 lie in the last 10% of 20 steps.
    found = follow("averaged weights", [0.0], [-1.0], steps=20, lr=0.01)
    torch.testing.assert_close(found, torch.tensor([0.195]))


def test_the_momentum_rises():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    seen = []
    variants.warm_up_momentum(optimizer, None, 2)
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["momentum"]))
    for _ in range(2):
        optimizer.step()
    assert seen == pytest.approx([0.85, 0.90])


def test_z_loss_penalizes_the_denominator_of_the_softmax():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 8), torch.randn(11, 8)
    labels = torch.randint(11, (2, 5))
    labels[1, 3:] = -100
    trained = labels[:, 1:] != -100
    z = (hidden @ weight.T).logsumexp(-1)[:, :-1][trained]
    expected = linear_masked_cross_entropy(hidden, weight, labels) + 1e-4 * z.square().mean()
    torch.testing.assert_close(variants.cross_entropy_with_z_loss(hidden, weight, labels), expected)
    with torch.no_grad():
        found = variants.cross_entropy_with_z_loss(hidden, weight, labels)
    assert found == linear_masked_cross_entropy(hidden, weight, labels), "validation measures the cross-entropy alone"


def test_the_router_computes_in_float32():
    model = MiniMindForCausalLM(MiniMindConfig(**SHAPE, **EXPERTS))
    router = model.model.layers[0].mlp.gate
    states = torch.randn(7, 32)
    expected, _, _ = router(states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, _, _ = router(states)
        found, weights, _ = variants.float32_router(router, states.bfloat16().float())
    assert plain.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_residual_branches_start_small():
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(**SHAPE | {"num_hidden_layers": 2, "hidden_size": 64}))
    variants.scale_residual_branches(model)
    layer = model.model.layers[1]
    # 0.02 / sqrt(2 * 2)
    assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_every_variant_trains_differently_from_the_default():
    texts = [f"{number} is a number, {number + 1} the next." for number in range(60)]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    rows, _ = prepare_rows(Dataset.from_dict({"text": texts}), tokenizer, max_length=32)
    settings = {"per_device_train_batch_size": 2, "max_steps": 20, "learning_rate": 1e-2, "seed": 0, "bf16": True}
    settings |= {"optim_preset": "muon", "lr_scheduler_type": "cosine_with_min_lr"}
    experts = EXPERTS | {"zero_init_residual": True, "initializer_range": 0.1}

    def loss(variant: variants.Variant) -> float:
        config = MiniMindConfig(**SHAPE | experts | variant.fields(32))
        return run(config, rows, rows, tokenizer, settings | variant.settings, variant)["eval_loss"]

    default = loss(variants.Variant())
    assert default == loss(variants.Variant()), "two runs of the default agree, so a difference is the variant's"
    every = variants.INGREDIENTS | variants.CANDIDATES
    assert [name for name, variant in every.items() if loss(variant) == default] == []

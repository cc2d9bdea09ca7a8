"""Experts equal a loop over tokens and experts, in every implementation."""

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F

from hf_pretrain.model import mlp as mlp_module
from tests.models import Operators, assert_near


def loop_over_experts(mlp: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute the sparse block one token and one expert at a time."""
    config, outputs = mlp.experts.config, []
    for token in hidden_states.flatten(0, 1):
        scores = (mlp.gate.weight @ token).softmax(-1)
        chosen = scores.argsort(descending=True)[: config.num_experts_per_tok]
        weights = scores[chosen] / scores[chosen].sum() if config.norm_topk_prob else scores[chosen]
        output = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ token).split(config.moe_intermediate_size)
            output = output + weight * (mlp.experts.down_proj[expert] @ (F.silu(gate) * up))
        # `n` shared experts, each a slice of the one wide SwiGLU.
        for shared in range(config.num_shared_experts):
            part = slice(shared * config.moe_intermediate_size, (shared + 1) * config.moe_intermediate_size)
            inner = F.silu(mlp.shared_experts.gate_proj.weight[part] @ token)
            inner = inner * (mlp.shared_experts.up_proj.weight[part] @ token)
            output = output + mlp.shared_experts.down_proj.weight[:, part] @ inner
        outputs.append(output)
    return torch.stack(outputs).view_as(hidden_states)


@pytest.fixture(params=["eager", "grouped_mm", "kernel", "batched_mm"])
def implementation(request, monkeypatch) -> str:
    """Return each implementation of experts; `kernel` is torch's kernel for groups, as on GPUs that have it."""
    if request.param == "kernel":
        monkeypatch.setattr(mlp_module, "has_grouped_kernel", lambda device, dtype: True)
    return request.param.replace("kernel", "grouped_mm")


@pytest.mark.parametrize(
    ("top_k", "norm_topk_prob", "num_shared_experts"),
    [(2, True, 1), (2, False, 2), (1, False, 0), (1, True, 0), (3, True, 0)],
)
def test_experts_equal_a_loop_over_experts(build_model, implementation, top_k, norm_topk_prob, num_shared_experts):
    routing = {"num_experts": 4, "num_experts_per_tok": top_k, "norm_topk_prob": norm_topk_prob}
    model = build_model(**routing, num_shared_experts=num_shared_experts, moe_intermediate_size=48)
    model.set_experts_implementation(implementation)
    mlp = model.model.layers[0].mlp
    assert mlp.experts.config._experts_implementation == implementation
    hidden_states = torch.randn(2, 9, 32, requires_grad=True)
    inputs, direction, results = [hidden_states, *mlp.parameters()], torch.randn(2, 9, 32), []
    for output in (mlp(hidden_states)[0], loop_over_experts(mlp, hidden_states)):
        results.append((output, torch.autograd.grad((output * direction).sum(), inputs)))
    (output, grads), (expected, expected_grads) = results
    assert_near(output, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        # The router of a normalised top-1 gets no gradient except rounding noise.
        assert (grad - expected_grad).norm() <= 1e-5 * expected_grad.norm() + 1e-4


def test_experts_compute_in_the_dtype_of_autocast(build_model, input_ids):
    model = build_model(num_experts=4)
    model.set_experts_implementation("grouped_mm")
    with Operators() as products:
        model(input_ids, labels=input_ids).loss.backward()
    # Two layers with two products each, and one operator for the gradients of each.
    assert products.grouped_dtypes == [{torch.float32}] * 8
    with Operators() as products:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids, labels=input_ids).loss
        loss.backward()
    assert products.grouped_dtypes == [{torch.bfloat16}] * 8
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_an_expert_without_tokens_has_a_zero_gradient(build_model, input_ids, implementation):
    """The gradient must exist: a rank without it would make the others hang."""
    model = build_model(num_experts=4, num_experts_per_tok=1)
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1:] = layer.mlp.gate.weight[:1]
    model(input_ids, labels=input_ids).ce_loss.backward()
    for layer in model.model.layers:
        used = layer.mlp.experts.gate_up_proj.grad.flatten(1).any(-1)
        assert used.sum() == 1

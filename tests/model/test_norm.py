"""RMSNorm against its formula, and its gradients against autograd's."""

import pytest
import torch

from hf_pretrain.model.norm import MiniMindRMSNorm


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 3, 4, 16), (7, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_and_its_gradients_equal_the_formulas(shape, dtype):
    torch.manual_seed(0)
    norm = MiniMindRMSNorm(16, eps=0.1).to(dtype)
    torch.nn.init.uniform_(norm.weight)
    # Different sizes of rows, so that the norm and its epsilon matter.
    states = (torch.randn(shape) * torch.rand(shape[:-1]).unsqueeze(-1)).to(dtype).requires_grad_()
    result, gradient = norm(states), torch.randn(shape).to(dtype)
    result.backward(gradient)
    exact, weight = (tensor.detach().double().requires_grad_() for tensor in (states, norm.weight))
    expected = weight * exact / (exact.square().mean(-1, keepdim=True) + 0.1).sqrt()
    expected.backward(gradient.double())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    for found, wanted in ((result, expected), (states.grad, exact.grad), (norm.weight.grad, weight.grad)):
        torch.testing.assert_close(found.double(), wanted, **tolerance)


def test_a_backward_pass_under_autocast_computes_in_float32():
    torch.manual_seed(0)
    norm, states, gradient = MiniMindRMSNorm(16, eps=1e-6), torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)
    (expected,) = torch.autograd.grad(norm(states), states, gradient)
    result = norm(states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(result, states, gradient)
    assert torch.equal(found, expected)


def test_a_frozen_weight_gets_no_gradient():
    norm = MiniMindRMSNorm(16, eps=1e-6).requires_grad_(False)
    states = torch.randn(3, 16, requires_grad=True)
    norm(states).sum().backward()
    assert norm.weight.grad is None and states.grad.abs().sum() > 0


def test_autocast_gets_its_dtype_from_a_norm_in_float32():
    norm, states = MiniMindRMSNorm(16, eps=1e-6), torch.randn(3, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = norm(states)
    expected = states.float() / states.float().square().mean(-1, keepdim=True).sqrt()
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected.bfloat16(), rtol=0.01, atol=0.01)


def test_a_second_derivative_raises():
    norm, states = MiniMindRMSNorm(4, eps=1e-3), torch.randn(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(states).square().sum(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()

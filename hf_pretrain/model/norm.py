"""RMSNorm, and a faster implementation of it for CPUs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .packed_attention import compute_dtype


class MiniMindRMSNorm(nn.Module):
    """RMSNorm: `weight * x / sqrt(mean(x ** 2) + eps)`, in float32 (https://huggingface.co/papers/1910.07467)."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; the result has the dtype that the next matrix product uses."""
        # Compute in the weight's dtype, which under autocast is float32.
        hidden_states = hidden_states.to(self.weight.dtype)
        # A compiler fuses `F.rms_norm` by itself, and in half precision only `F.rms_norm` computes in float32.
        is_eager_cpu = hidden_states.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_eager_cpu and hidden_states.dtype == torch.float32:
            normed = _CPURMSNorm.apply(hidden_states, self.weight, self.eps)
        else:
            normed = F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
        # Cast once here. Autocast would cast again for each projection that reads the result.
        return normed.to(compute_dtype(normed))

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class _CPURMSNorm(torch.autograd.Function):
    """
    RMSNorm with fewer passes over memory.

    torch has no fused kernel for CPUs: autograd runs `F.rms_norm` backward operator by operator. With `n = x / rms(x)`
    and the gradient `g` of the result, the gradients are

        grad_weight = sum of g * n over tokens
        grad_x      = (g * weight - n * mean(g * n * weight)) / rms(x)
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, eps):
        squares = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True).square_()
        inverse_rms = squares.div_(len(weight)).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden_states, weight, inverse_rms)
        return (hidden_states * inverse_rms).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden_states, weight, inverse_rms = ctx.saved_tensors
        normed = hidden_states * inverse_rms
        products = gradient * normed
        # (..., hidden_size) -> (hidden_size,)
        grad_weight = products.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        # A caller may run the backward pass under autocast, which would compute the product in half precision.
        with torch.autocast("cpu", enabled=False):
            mean = (products @ weight).unsqueeze(-1)
        grad_hidden = (gradient * weight).addcmul_(normed, mean, value=-1 / len(weight)).mul_(inverse_rms)
        return grad_hidden, grad_weight, None


__all__ = ["MiniMindRMSNorm"]

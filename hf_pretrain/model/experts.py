"""The feed-forward part of a decoder layer: a SwiGLU, or a mixture of experts with a router."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward, use_experts_implementation

from .configuration_minimind import MiniMindConfig
from .packed_attention import compute_dtype


class MiniMindResidualProjection(nn.Linear):
    """Last matrix of a residual branch, `o_proj` or `down_proj`. `zero_init_residual` initialises it to zero."""


class MiniMindMLP(nn.Module):
    """SwiGLU: `down(act(gate(x)) * up(x))` (https://huggingface.co/papers/2002.05202)."""

    def __init__(self, config: MiniMindConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = MiniMindResidualProjection(intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `(..., hidden_size)` to `(..., hidden_size)`."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class MiniMindTopKRouter(nn.Module):
    """Router that scores the experts by a softmax and keeps the top k."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        # transformers' own routers use a bare parameter instead of `nn.Linear` too. Checkpoints name it `gate.weight`.
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Choose the experts of each token.

        Args:
            hidden_states (`torch.Tensor` of shape `(num_tokens, hidden_size)`)

        Returns:
            `tuple` of three tensors: router logits of shape `(num_tokens, num_experts)`, weights of the chosen experts
            of shape `(num_tokens, top_k)` in the dtype of `hidden_states`, and their indices of shape `(num_tokens,
            top_k)`.
        """
        router_logits = F.linear(hidden_states, self.weight)
        # Probabilities in float32: half precision would make close experts tie.
        weights, experts = router_logits.float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            # MiniMind adds the same epsilon; without it a converted model would differ in the last bits.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return router_logits, weights.type_as(hidden_states), experts


def grouped_mm_in_autocast(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    Compute the experts with transformers' grouped matrix products, in autocast's dtype where autocast is on.

    Args:
        module (`nn.Module`): the experts.
        hidden_states (`torch.Tensor` of shape `(num_tokens, hidden_size)`)
        top_k_index, top_k_weights (`torch.Tensor` of shape `(num_tokens, top_k)`)

    Returns:
        `torch.Tensor` of shape `(num_tokens, hidden_size)`.
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        # NOTE: autocast has no rule for grouped products, so transformers casts the tokens to the dtype of the
        # weights. If that is float32, a compiled graph falls back to a loop over experts that waits for the device.
        module = _CastExperts(module, compute_dtype(hidden_states))
    return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)


class _CastExperts:
    """Stand-in for a module of experts: the attributes that transformers reads, with the weights in another dtype."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype):
        self.gate_up_proj = experts.gate_up_proj.to(dtype)
        self.down_proj = experts.down_proj.to(dtype)
        self.num_experts = experts.num_experts
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self.is_transposed = False
        self._is_expert_parallel = experts._is_expert_parallel
        # NOTE: transformers' decorator adds this method to the experts' class.
        self._apply_gate = experts._apply_gate


# A separate interface: an entry in transformers' global one would change the experts of other models in this process.
EXPERTS_FUNCTIONS = ExpertsInterface()
EXPERTS_FUNCTIONS["grouped_mm"] = grouped_mm_in_autocast


@use_experts_implementation(experts_interface=EXPERTS_FUNCTIONS)
class MiniMindExperts(nn.Module):
    """
    All experts as two stacked parameters.

    With stacked parameters every rank runs the same operations, whatever the router chose. transformers' experts
    interface replaces `forward` by grouped or batched matrix products; the loop here is the reference.

    Parameters:
        gate_up_proj of shape `(num_experts, 2 * moe_intermediate_size, hidden_size)`: the gate rows, then the up rows.
        down_proj of shape `(num_experts, hidden_size, moe_intermediate_size)`.
    """

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """
        Sum the outputs of the chosen experts, each multiplied by its weight.

        Args:
            hidden_states (`torch.Tensor` of shape `(num_tokens, hidden_size)`)
            top_k_index, top_k_weights (`torch.Tensor` of shape `(num_tokens, top_k)`)

        Returns:
            `torch.Tensor` of shape `(num_tokens, hidden_size)`.
        """
        output = torch.zeros_like(hidden_states)
        dtype = compute_dtype(hidden_states)
        # `unbind` writes the gradients of all experts in one pass. Indexing would write a gradient of the whole
        # parameter for each expert, zero outside of its slice.
        gate_up_projs, down_projs = self.gate_up_proj.to(dtype).unbind(), self.down_proj.to(dtype).unbind()
        for expert in range(self.num_experts):
            # Every expert runs, possibly on no tokens: under ZeRO-3 a rank that skips one makes the others hang.
            tokens, slots = torch.where(top_k_index == expert)
            # The backward pass of `hidden_states[tokens]` would be several times as slow on a CPU.
            gate, up = F.linear(hidden_states.index_select(0, tokens), gate_up_projs[expert]).chunk(2, dim=-1)
            expert_output = F.linear(self.act_fn(gate) * up, down_projs[expert])
            output = output.index_add(0, tokens, (expert_output * top_k_weights[tokens, slots, None]).type_as(output))
        return output


class MiniMindSparseMoeBlock(nn.Module):
    """
    Routed experts plus shared experts that process every token.

    One SwiGLU of `n` times the width computes the sum of `n` shared experts.
    """

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.gate = MiniMindTopKRouter(config)
        self.experts = MiniMindExperts(config)
        self.shared_experts = (
            MiniMindMLP(config, config.num_shared_experts * config.moe_intermediate_size)
            if config.num_shared_experts
            else None
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `(batch_size, seq_len, hidden_size)` to the same shape. A hook on the router records its logits."""
        # (batch_size, seq_len, hidden_size) -> (batch_size * seq_len, hidden_size)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, experts = self.gate(tokens)
        output = self.experts(tokens, experts, weights)
        if self.shared_experts is not None:
            output = output + self.shared_experts(tokens)
        return output.reshape(hidden_states.shape)

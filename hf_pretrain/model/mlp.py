"""The feed-forward part of a decoder layer: a SwiGLU, or a mixture of experts with a router."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

from .configuration_minimind import MiniMindConfig
from .packed_attention import compute_dtype


class MiniMindResidualProjection(nn.Linear):
    """Last matrix of a residual branch, `o_proj` or `down_proj`. `zero_init_residual` initialises it to zero."""


def project_together(hidden_states: torch.Tensor, *projections: nn.Linear) -> tuple[torch.Tensor, ...]:
    """
    Return the outputs of linear layers without biases that share an input. A compiled graph joins their weights as it
    casts them, and computes one product instead of one for each, forward and backward.

    Args:
        hidden_states (`torch.Tensor` of shape `(..., hidden_size)`)
        projections (`nn.Linear` of shape `(width, hidden_size)`)

    Returns:
        `tuple` of `torch.Tensor` of shape `(..., width)`.
    """
    # Adapters and float8 replace a layer. Tensor parallelism, ZeRO-3 and users hook into its call.
    is_plain = not any(
        type(each) is not nn.Linear or each._forward_pre_hooks or each._forward_hooks or each._backward_hooks
        for each in projections
    )
    # Without gradients, as in generation, joining the weights would cost more than it saves.
    if not (is_plain and torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return tuple(each(hidden_states) for each in projections)
    weight = torch.cat([each.weight for each in projections])
    return F.linear(hidden_states, weight).split([each.out_features for each in projections], dim=-1)


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
        gate, up = project_together(hidden_states, self.gate_proj, self.up_proj)
        return self.down_proj(self.act_fn(gate) * up)


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


def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """
    Return whether torch multiplies groups of rows in one kernel. Elsewhere it loops over the groups, and each product,
    forward and backward, waits for the device to learn their sizes.
    """
    has_kernel = dtype == torch.bfloat16 and device.type == "cuda"
    return has_kernel and torch.cuda.get_device_capability(device)[0] in (9, 10)


def grouped_experts_forward(
    module: "MiniMindExperts", hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    Compute the experts by products over tokens that are sorted by expert, in autocast's dtype where autocast is on.

    Without a kernel for groups, the host reads the sizes of the groups once, and all products use them. So a layer
    waits once for the device, and with the kernel never.

    Args:
        module ([`MiniMindExperts`]): the experts.
        hidden_states (`torch.Tensor` of shape `(num_tokens, hidden_size)`)
        top_k_index, top_k_weights (`torch.Tensor` of shape `(num_tokens, top_k)`). Under expert parallelism, the
            index `num_experts` stands for an expert of another rank, and its weight is zero.

    Returns:
        `torch.Tensor` of shape `(num_tokens, hidden_size)`.
    """
    # Autocast has no rule for grouped products.
    dtype, top_k = compute_dtype(hidden_states), top_k_index.shape[-1]
    expert_ids, order = top_k_index.flatten().sort(stable=True)
    # Copy each token for each of its experts. Then backward adds the copies up in a fixed order, which `index_select`
    # with repeated indices would not.
    copies = hidden_states.to(dtype).unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
    # (num_experts,): end of each expert's rows
    experts = torch.arange(module.num_experts, device=expert_ids.device)
    ends = torch.searchsorted(expert_ids, experts, right=True, out_int32=True)
    # torch's kernel leaves the rows of other ranks' experts uninitialised, and transformers' operator writes zeros.
    if has_grouped_kernel(hidden_states.device, dtype) and not module._is_expert_parallel:
        multiply = partial(F.grouped_mm, offs=ends)
    else:
        # NOTE: this operator of transformers reads `offs` in forward and backward. On the host, reading costs nothing.
        multiply = partial(torch.ops.transformers.grouped_mm_fallback, offs=ends.cpu())
    gate, up = multiply(copies.index_select(0, order), module.gate_up_proj.to(dtype).mT).chunk(2, dim=-1)
    outputs = multiply(module.act_fn(gate) * up, module.down_proj.to(dtype).mT)
    # Back to the order of the tokens: (num_tokens * top_k, hidden_size) -> (num_tokens, top_k, hidden_size)
    outputs = torch.empty_like(outputs).index_copy(0, order, outputs).unflatten(0, top_k_index.shape)
    return (outputs * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


# A separate interface: an entry in transformers' global one would change the experts of other models in this process.
EXPERTS_FUNCTIONS = ExpertsInterface()
EXPERTS_FUNCTIONS["grouped_mm"] = grouped_experts_forward


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
        width = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = MiniMindMLP(config, width) if width else None

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map `(batch_size, seq_len, hidden_size)` to the same shape, and return it with the router logits."""
        # (batch_size, seq_len, hidden_size) -> (batch_size * seq_len, hidden_size)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        router_logits, weights, experts = self.gate(tokens)
        output = self.experts(tokens, experts, weights)
        if self.shared_experts is not None:
            output = output + self.shared_experts(tokens)
        return output.reshape(hidden_states.shape), router_logits

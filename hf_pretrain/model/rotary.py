"""The complex rotary table of MiniMind, and the rotation of queries and keys by it."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_minimind import MiniMindConfig


def precompute_pos_cis(config: MiniMindConfig) -> torch.Tensor:
    """
    Compute the rotary table `pos_cis[p, i] = scale * exp(1j * p / theta ** (2 * i / head_dim))`.

    The formula comes from RoFormer (https://huggingface.co/papers/2104.09864). If `rope_parameters` names YaRN or
    another static type, transformers rescales the frequencies.

    Args:
        config ([`MiniMindConfig`]): the model's configuration.

    Returns:
        `torch.Tensor` of shape `(max_position_embeddings, head_dim // 2)`, complex64, on the CPU.

    Raises:
        `ValueError`: for a `rope_type` whose frequencies change with the length of the input.
    """
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f'rope_type="{rope_type}" depends on the length of the input, and MiniMind keeps one table. Use "yarn".'
        )
    # NOTE: under DeepSpeed's zero.Init, constructors of float tensors return DeepSpeed's dtype. So build integer
    # ranges and convert them. Compute on the CPU, so that every device holds the same bits.
    with torch.device("cpu"):
        if rope_type == "default":
            exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
            frequencies, scale = 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies.float())
        return torch.polar(torch.full_like(angles, scale), angles)


def apply_rotary_pos_emb(states: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """
    Rotate neighbouring channels `(2i, 2i + 1)` of each head as one complex number, in float32.

    Args:
        states (`torch.Tensor` of shape `(batch_size, seq_len, num_heads, head_dim)`): queries or keys.
        rotation (`torch.FloatTensor` of shape `(batch_size, seq_len, 1, head_dim // 2, 2)`): real view of rows of
            `pos_cis`.

    Returns:
        `torch.Tensor` of the shape and dtype of `states`.
    """
    # (batch_size, seq_len, num_heads, head_dim) -> (batch_size, seq_len, num_heads, head_dim // 2, 2)
    pairs = states.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # NOTE: Inductor generates no code for complex numbers, so compiled graphs write the product out.
        (real, imaginary), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return turned.flatten(-2).type_as(states)


class MiniMindRotaryEmbedding(nn.Module):
    """
    Module that holds the complex rotary table.

    Buffers:
        pos_cis (`torch.Tensor` of shape `(max_position_embeddings, head_dim // 2)`, complex64): the table. Checkpoints
            do not contain it: building or loading a model recomputes it. It moves between devices but is never cast.
    """

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.table_key = str((config.rope_parameters, config.head_dim, config.max_position_embeddings))
        self.register_buffer("pos_cis", precompute_pos_cis(config), persistent=False)

    def _apply(self, fn: Callable, recurse: bool = True):
        # NOTE: `module.to(torch.bfloat16)` casts complex64 to a real dtype and drops the imaginary part. Apply `fn` to
        # an empty tensor and take nothing but the device from it.
        device = fn(torch.empty(0, device=self.pos_cis.device)).device
        table = precompute_pos_cis(self.config) if self.pos_cis.is_meta else self.pos_cis
        self.pos_cis = table.to(device)
        return self

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """
        Return the rotations of the given positions.

        Args:
            position_ids (`torch.LongTensor` of shape `(batch_size, seq_len)`)

        Returns:
            `torch.FloatTensor` of shape `(batch_size, seq_len, 1, head_dim // 2, 2)`: real and imaginary parts.
        """
        return self._real_table(self.table_key)[position_ids].unsqueeze(2)

    # NOTE: Inductor generates no code for complex numbers. The decorator makes Dynamo take the real view of `pos_cis`
    # (the same memory) outside the graph. Dynamo compares `table_key` on each call, so a compiled graph never reuses
    # the table of another configuration.
    @torch.compiler.assume_constant_result
    def _real_table(self, table_key: str) -> torch.Tensor:
        return torch.view_as_real(self.pos_cis)

"""
Names and layouts of the weights of this package, of MiniMind's three generations, and of transformers' architectures.

The generations are releases of https://github.com/jingyaogong/minimind. v1 rotates neighbouring channels by a complex
`pos_cis`, as this package does. v2 and v3 rotate the channels `(i, i + head_dim / 2)`, as Llama does. A permutation of
the rows of the query and key projections (and of v3's query and key norms) converts one form into the other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..model.configuration_minimind import MiniMindConfig


def to_half_split(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Move the rows `(2i, 2i + 1)` of each head to `(i, i + head_dim / 2)`. Shape `(num_heads * head_dim, ...)`."""
    # (num_heads * head_dim, ...) -> (num_heads, head_dim / 2, 2, ...) -> (num_heads, 2, head_dim / 2, ...)
    return tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_interleaved(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Invert [`to_half_split`]."""
    return tensor.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def is_rotated(name: str) -> bool:
    """Return whether our tensor `name` is a projection or a norm of queries or keys, which the rotation follows."""
    return re.search(r"\.[qk]_(proj|norm)\.", name) is not None


@dataclass(frozen=True)
class WeightLayout:
    """
    Names and shapes of one program's weights.

    Args:
        has_qk_norm (`bool`): whether the attention has query and key norms.
        half_split (`bool`): whether the channels `(i, i + head_dim / 2)` rotate together; otherwise neighbours do.
        lists_shared_experts (`bool`): whether shared experts are a list; otherwise they are one MLP of their summed
            width.
        lacks (`frozenset[str]`): the features of [`find_features`] that it cannot hold.
        renames (`tuple`): pairs of a part of this package's tensor names and its replacement, applied in order.
    """

    has_qk_norm: bool = False
    half_split: bool = True
    lists_shared_experts: bool = False
    lacks: frozenset[str] = frozenset()
    renames: tuple[tuple[str, str], ...] = ()

    def name(self, name: str) -> str:
        """Return this layout's name of our tensor `name`."""
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        return name

    def split(self, name: str, tensor: torch.Tensor, config: MiniMindConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Yield the names and tensors of this layout that hold our tensor `name`.

        Stacked experts `(num_experts, ...)` become one matrix per expert, because all other programs store them so.
        """
        if self.half_split and is_rotated(name):
            # Projections have the shape (num_heads * head_dim, hidden_size), and norms (head_dim,): one head.
            yield self.name(name), to_half_split(tensor, config.head_dim)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stem, _, stacked = name.rpartition(".")
            names = ("gate_proj", "up_proj") if stacked == "gate_up_proj" else (stacked,)
            for expert, parts in enumerate(tensor):
                for part, weight in zip(names, parts.chunk(len(names)), strict=True):
                    yield self.name(f"{stem}.{expert}.{part}.weight"), weight
        elif self.lists_shared_experts and "shared_experts." in name:
            # The width is the rows of gate_proj and up_proj, but the columns of down_proj.
            widths = tensor.chunk(config.num_shared_experts, dim=int("down_proj" in name))
            for expert, weight in enumerate(widths):
                yield self.name(name.replace("shared_experts.", f"shared_experts.{expert}.")), weight
        else:
            yield self.name(name), tensor

    def join(self, name: str, parts: list[torch.Tensor], config: MiniMindConfig) -> torch.Tensor:
        """Return our tensor `name` from its parts, in the order in which [`split`] yields them."""
        if self.half_split and is_rotated(name):
            return to_interleaved(parts[0], config.head_dim)
        if name.endswith("experts.gate_up_proj"):
            return torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)])
        if name.endswith("experts.down_proj"):
            return torch.stack(parts)
        # Shared experts join along their width: the rows of gate_proj and up_proj, the columns of down_proj.
        return torch.cat(parts, dim=int("down_proj" in name)) if len(parts) > 1 else parts[0]


# The order matters: "model.embed_tokens" must be renamed before "model." is removed.
_V1_NAMES = (
    ("model.embed_tokens", "tok_embeddings"),
    ("model.", ""),
    ("lm_head", "output"),
    ("self_attn.", "attention."),
    *((f"{letter}_proj", f"w{letter}") for letter in "qkvo"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.", "feed_forward."),
    ("gate_proj", "w1"),
    ("down_proj", "w2"),
    ("up_proj", "w3"),
)
_V2_LACKS = {"an untied output head", "a head_dim other than hidden_size / num_attention_heads"}
# v2 never normalises at top-1, because normalising would make every weight 1.
_V2_LACKS |= {"normalised top-1 routing", "scaled rotary positions"}
LAYOUTS = {
    "v1": WeightLayout(half_split=False, renames=_V1_NAMES),
    "v2": WeightLayout(lists_shared_experts=True, lacks=frozenset(_V2_LACKS)),
    "v3": WeightLayout(has_qk_norm=True, lacks=frozenset({"shared experts", "scaled rotary positions"})),
    "llama": WeightLayout(lacks=frozenset({"experts", "q/k norms"})),
    "qwen3": WeightLayout(has_qk_norm=True, lacks=frozenset({"experts", "attention without q/k norms"})),
    "qwen3_moe": WeightLayout(
        has_qk_norm=True,
        lacks=frozenset({"dense layers (no experts)", "attention without q/k norms", "shared experts"}),
    ),
    "ernie4_5_moe": WeightLayout(half_split=False, lacks=frozenset({"dense layers (no experts)", "q/k norms"})),
}
# llama.cpp always normalises the routing weights, and a GGUF file holds the weights of a stock architecture.
GGUF_LACKS = frozenset({"routing weights that are not normalised", "scaled rotary positions", "the activation {}"})
GENERATIONS = {"v1", "v2", "v3"}


def describe_layout(layout: str) -> str:
    """Return the name of a layout for messages."""
    return f"MiniMind {layout}" if layout in GENERATIONS else layout


def stock_layout(config: MiniMindConfig) -> str:
    """Return the transformers architecture that is nearest to the model, a key of `LAYOUTS`."""
    if config.num_experts:
        return "qwen3_moe" if config.qk_norm else "ernie4_5_moe"
    return "qwen3" if config.qk_norm else "llama"


def upstream_layout(config: MiniMindConfig) -> str:
    """Return the generation of MiniMind, a key of `LAYOUTS`, that has the model's attention. v2 holds what v1 does."""
    return "v3" if config.qk_norm else "v2"


def find_features(config: MiniMindConfig) -> dict[str, bool]:
    """Return the features that a layout may lack, and whether the model has them. `{}` stands for the activation."""
    has_experts = config.num_experts > 0
    width = config.head_dim * config.num_attention_heads
    return {
        "experts": has_experts,
        "dense layers (no experts)": not has_experts,
        "q/k norms": config.qk_norm,
        "attention without q/k norms": not config.qk_norm,
        "shared experts": has_experts and config.num_shared_experts > 0,
        "an untied output head": not config.tie_word_embeddings,
        "a head_dim other than hidden_size / num_attention_heads": width != config.hidden_size,
        "normalised top-1 routing": has_experts and config.num_experts_per_tok == 1 and config.norm_topk_prob,
        "routing weights that are not normalised": has_experts and not config.norm_topk_prob,
        "scaled rotary positions": config.rope_parameters["rope_type"] != "default",
        "the activation {}": config.hidden_act != "silu",
    }

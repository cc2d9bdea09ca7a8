"""Base class of the MiniMind models."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_minimind import MiniMindConfig
from .decoder_layer import MiniMindAttention, MiniMindDecoderLayer
from .mlp import MiniMindExperts, MiniMindResidualProjection, MiniMindTopKRouter
from .rotary import MiniMindRotaryEmbedding, precompute_pos_cis


# NOTE: transformers' `register` does not write this table. Trainer's label smoothing shifts labels only if it names
# the class, and lm-eval warns about other model types.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(MiniMindConfig.model_type, "MiniMindForCausalLM")


class MiniMindPreTrainedModel(PreTrainedModel):
    """Base class of the MiniMind models: initialisation, and the flags that tell transformers what is supported."""

    config: MiniMindConfig
    config_class = MiniMindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MiniMindDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    # NOTE: transformers' flash attention keeps packed documents apart only in batches of one row.
    _supports_flash_attn = False
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": MiniMindDecoderLayer, "attentions": MiniMindAttention}
    # Every rank computes the same table, so DDP need not broadcast it. NCCL has refused complex tensors
    # (https://github.com/pytorch/pytorch/issues/71613).
    _ddp_params_and_buffers_to_ignore = {"rotary_emb.pos_cis", "model.rotary_emb.pos_cis"}
    # Whether the weights come from a file of another program whose query and key rows are half-split. The files of its
    # adapters then have that order, too.
    half_split_adapters = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, MiniMindExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=self.config.initializer_range)
            init.normal_(module.down_proj, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, MiniMindTopKRouter):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, MiniMindRotaryEmbedding):
            # NOTE: `from_pretrained` builds the model on the meta device and replaces this buffer by uninitialised
            # memory, which gives finite but wrong logits.
            init.copy_(module.pos_cis, precompute_pos_cis(self.config))
        if self.config.zero_init_residual:
            if isinstance(module, MiniMindExperts):
                init.zeros_(module.down_proj)
            elif isinstance(module, MiniMindResidualProjection):
                init.zeros_(module.weight)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict | None = None, **kwargs):
        """
        Enable activation checkpointing as transformers does.

        Raises:
            `ValueError`: for `use_reentrant=True` with experts, where the gradient of the router loss would be lost.
        """
        if self.config.num_experts and (activation_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True runs the layers without autograd and loses the gradient of the router loss. Pass "
                '{"use_reentrant": False} (the default), or train a model without experts.'
            )
        super().activation_checkpointing_enable(activation_checkpointing_kwargs, **kwargs)

"""
The MiniMind model (https://github.com/jingyaogong/minimind).

A decoder with grouped-query attention, rotary positions from a complex table, SwiGLU, RMSNorm, and optionally a
mixture of experts. From a token to the loss:

    embed_tokens -> layers x (input_layernorm -> self_attn -> post_attention_layernorm -> mlp) -> norm -> lm_head
    -> masked cross-entropy + router_aux_loss_coef * router loss

The files in `CODE_FILES` (`configuration_minimind.py`) travel to the Hub with every checkpoint. They import each other
and nothing else of the package.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_minimind import MiniMindConfig

# NOTE: `set_experts_implementation` of transformers works only if the source of this file holds the text
# `@use_experts_implementation`. The decorator stands in mlp.py, so transformers finds it in this comment.
from .decoder_layer import CACHE_NAME, MiniMindDecoderLayer, MiniMindRMSNorm
from .inputs import check_names, check_positions, unmask_packed_rows
from .loss import LossParts, MiniMindLMHead, TokenLoss, prediction_weights, whole_loss
from .packed_attention import ENGINES, find_visible
from .pretrained import MiniMindPreTrainedModel
from .rotary import MiniMindRotaryEmbedding
from .router_loss import find_documents, router_loss


class MiniMindModel(MiniMindPreTrainedModel):
    """Decoder without a head: maps token ids or embeddings to the hidden states after the last norm."""

    # NOTE: vLLM 0.32 replaces `__call__` of this class, reads this name, and sets it on its own model. In the same
    # process, as with TRL's colocate mode, the model that trains runs through that `__call__`, too.
    do_not_compile = True

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MiniMindDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = MiniMindRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # `from_pretrained` sets fields of a config that exists already, so this cannot happen in the config.
        config.extend_positions()
        self.rotary_emb = MiniMindRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    # NOTE: `capture_outputs` adds hidden states and attentions to the output by hooks on the modules in
    # `_can_record_outputs`. It installs the hooks when they are first asked for; compiled layers then run in pieces.
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeModelOutputWithPast:
        """
        Compute the hidden states after the last norm.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, seq_len)`)
            attention_mask (`torch.Tensor` of shape `(batch_size, past_len + seq_len)`, *optional*): 0 for padding.
            position_ids (`torch.LongTensor` of shape `(batch_size, seq_len)`, *optional*): a restart at 0 begins a new
                document, which does not attend to the one before.
            past_key_values ([`Cache`], *optional*): keys and values of earlier tokens; the name of transformers 5.23.
            inputs_embeds (`torch.FloatTensor` of shape `(batch_size, seq_len, hidden_size)`, *optional*): used instead
                of `input_ids`.
            use_cache (`bool`, *optional*): create and return a cache where none is given.
            cache ([`Cache`], *optional*): the name of transformers 5.24 for `past_key_values`.
            output_router_logits (`bool`, *optional*): return the router logits of every layer.
            cu_seq_lens_q (`torch.IntTensor` of shape `(num_documents + 1,)`, *optional*): start of each document in
                the flattened batch, and its end.
            max_length_q (`int`, *optional*): length of the longest document, or more.
            packed_documents ([`~packed_attention.PackedDocuments`], *optional*): the documents of the rows, if the
                caller has found them already. They replace the documents that `position_ids` imply.

        Returns:
            [`MoeModelOutputWithPast`]: with `last_hidden_state` of shape `(batch_size, seq_len, hidden_size)`.

        Raises:
            `ValueError`: for both or neither of `input_ids` and `inputs_embeds`, two caches, a position past the
                rotary table, packed sequences without `position_ids`, or packed positions together with padding in
                `attention_mask`.
            `TypeError`: for an argument that this code does not know, see [`~model.inputs.check_names`].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        if past_key_values is not None and cache is not None:
            raise ValueError("Pass the cache once, as past_key_values or as cache.")
        cache = past_key_values if cache is None else cache
        check_names(kwargs, has_positions=position_ids is not None)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        seq_len = inputs_embeds.shape[1]
        past_len = 0 if cache is None else cache.get_seq_length()

        if position_ids is None:
            position_ids = (torch.arange(seq_len, device=inputs_embeds.device) + past_len).unsqueeze(0)
        elif attention_mask is not None and attention_mask.shape == position_ids.shape:
            if not torch.compiler.is_compiling():
                attention_mask = unmask_packed_rows(attention_mask, position_ids)
        # Engines lay requests behind each other in one row, so its length says nothing, and bound each request.
        if self.config._attn_implementation not in ENGINES:
            check_positions(position_ids, length=seq_len, limit=self.config.max_position_embeddings)

        causal_mask = None
        lengths = {"cu_seq_lens": kwargs.pop("cu_seq_lens_q", None), "max_length": kwargs.pop("max_length_q", None)}
        if kwargs.get("packed_documents") is None:
            # NOTE: this must run before the cache is created. Given a cache, even an empty one, transformers does not
            # look for packed documents.
            causal_mask, kwargs["packed_documents"] = find_visible(
                self.config, inputs_embeds, position_ids, attention_mask, cache, is_training=self.training, **lengths
            )
        if use_cache and cache is None:
            # The mask above does not depend on this cache: it is empty, so every visible token lies in the input.
            cache = DynamicCache(config=self.config)

        position_embeddings = self.rotary_emb(position_ids)
        hidden_states = self.dropout(inputs_embeds)
        # The slice lets `num_hidden_layers` be lowered after loading, as in transformers' models.
        all_router_logits: list[torch.Tensor] = []
        for layer in self.layers[: self.config.num_hidden_layers]:
            outputs = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=causal_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
            # Under pipeline parallelism, engines replace the layers of other ranks by modules that return their input.
            hidden_states, router_logits = outputs if isinstance(outputs, tuple) else (outputs, None)
            if router_logits is not None:
                all_router_logits.append(router_logits)
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        return MoeModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            router_logits=tuple(all_router_logits) if output_router_logits else None,
            **{CACHE_NAME: cache},
        )


@dataclass
class MiniMindCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """
    transformers' output for language models with experts, plus `ce_loss`.

    Args:
        loss (`torch.FloatTensor`, scalar): `ce_loss + router_aux_loss_coef * aux_loss`, in nats. With a `token_loss`,
            `(1 - share) * ce_loss + share * token_loss` stands in place of `ce_loss`.
        ce_loss (`torch.FloatTensor`, scalar): the masked cross-entropy, without the router loss.
        token_loss (`torch.FloatTensor`, scalar): the caller's [`TokenLoss`], divided as `ce_loss` is.
        aux_loss (`torch.FloatTensor`, scalar): the router loss, not multiplied by its coefficient.
    """

    ce_loss: torch.FloatTensor | None = None
    token_loss: torch.FloatTensor | None = None


class MiniMindForCausalLM(MiniMindPreTrainedModel, GenerationMixin):
    """MiniMind with a language-modelling head, the masked loss and the router loss."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # transformers shards the head by these plans; the config holds the plans of the decoder.
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = MiniMindLMHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def gather_sharded_state_dict_for_save(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        # NOTE: DeepSpeed and FSDP gather copies, so transformers no longer recognises the tied matrix and would save
        # it twice.
        state_dict = super().gather_sharded_state_dict_for_save(*args, **kwargs)
        if self.config.tie_word_embeddings:
            state_dict.pop("lm_head.weight", None)
        return state_dict

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if type(self.lm_head) is nn.Linear:
            # NOTE: transformers replaces an untied head by a plain one, which computes all logits.
            self.lm_head.__class__ = MiniMindLMHead
        return embeddings

    def generate(self, *args, **kwargs):
        """Generate as transformers does, but without the compiled graphs of single layers."""
        # NOTE: each layer of a cache would compile a separate graph. Past its recompile limit, the compiler falls back
        # to eager execution, for training as well.
        # torch has no public way to ask whether `module.compile()` was called.
        is_compiled = self.model.layers[0]._compiled_call_impl is not None
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            return super().generate(*args, **kwargs)

    def _predict(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        *,
        logits_to_keep: int | torch.Tensor,
        skip_logits: bool,
        token_loss: TokenLoss | None,
        **weighting: Any,
    ) -> tuple[torch.Tensor | None, LossParts | None]:
        """
        Return the logits `(batch_size, kept, vocab_size)` of hidden states `(batch_size, seq_len, hidden_size)`, and
        the loss of `labels` `(batch_size, seq_len)`. Each may be `None`.
        """
        # The fused loss reads the whole weight matrix. An adapter may have wrapped the head, and tensor parallelism
        # splits it.
        is_whole_head = isinstance(self.lm_head, MiniMindLMHead) and (self.tp_size or 1) == 1
        if skip_logits and labels is not None and is_whole_head:
            return None, self.lm_head(hidden_states, labels, token_loss=token_loss, **weighting)
        # `slice(-0, None)` keeps all positions.
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, positions])
        return logits, None if labels is None else whole_loss(logits, labels, token_loss=token_loss, **weighting)

    def _router_loss(
        self,
        outputs: MoeModelOutputWithPast,
        labels: torch.Tensor | None,
        *,
        loss_mask: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | float | None,
        num_documents_in_batch: torch.Tensor | float | None,
        **rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Return this call's part of the router loss of a batch, not multiplied by the coefficient. `rows` holds position
        ids and attention mask.
        """
        hidden_states = outputs.last_hidden_state
        shape, device = hidden_states.shape[:2], hidden_states.device
        # Documents, not rows, so that packing does not change the router loss.
        documents = find_documents(shape, device=device, labels=labels, loss_mask=loss_mask, **rows)
        level, top_k = self.config.router_aux_loss_level, self.config.num_experts_per_tok
        aux_loss = router_loss(outputs.router_logits, top_k, documents, level=level)
        # MaskedLossTrainer passes the number of documents, which is exact. transformers' Trainer counts only tokens;
        # then the share of tokens approximates the share of documents.
        if num_documents_in_batch is not None:
            return aux_loss * (documents.count / num_documents_in_batch)
        if num_items_in_batch is not None and labels is not None:
            return aux_loss * (prediction_weights(labels, loss_mask).sum() / num_items_in_batch)
        return aux_loss

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        loss_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        num_documents_in_batch: torch.Tensor | float | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        token_loss: TokenLoss | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MiniMindCausalLMOutputWithPast:
        """
        Compute logits and, given labels, the loss.

        Args:
            labels (`torch.LongTensor` of shape `(batch_size, seq_len)`, *optional*): unshifted token ids, -100 where
                nothing is trained. With labels, `use_cache` defaults to `False`.
            loss_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): non-negative weight of predicting
                each label.
            num_items_in_batch (scalar, *optional*): divisor of the cross-entropy: the sum of the weights over all
                micro-batches of all ranks. The default is the sum over this call.
            num_documents_in_batch (scalar, *optional*): divisor of the router loss, in documents. If the caller passes
                only `num_items_in_batch`, the router loss is multiplied by this call's share of the items.
            output_router_logits (`bool`, *optional*): return the router logits of every layer, and `aux_loss` also
                without `labels` while the model does not train.
            logits_to_keep (`int` or `torch.Tensor`, defaults to 0): compute logits only for the last positions, or for
                these indices; 0 means all.
            skip_logits (`bool`, defaults to `False`): with `labels`, return the loss without logits. The logits are
                then never in memory all at once.
            token_loss ([`TokenLoss`], *optional*): with `labels`, a loss that replaces a share of the cross-entropy.

        See [`MiniMindModel.forward`] for the other arguments.

        Returns:
            [`MiniMindCausalLMOutputWithPast`]

        Raises:
            `ValueError`: if `loss_mask` and `labels` differ in shape, or for the reasons in [`MiniMindModel.forward`].
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        if labels is not None and use_cache is None:
            # Nobody continues a text whose loss is computed, and training must not keep keys and values.
            use_cache = False
        # A training loop of one's own may compute the cross-entropy itself, without labels.
        trains = labels is not None or (self.training and torch.is_grad_enabled())
        needs_router_loss = bool(self.config.num_experts) and (trains or output_router_logits)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            output_router_logits=needs_router_loss,
            **kwargs,
        )
        weighting = {"loss_mask": loss_mask, "num_items_in_batch": num_items_in_batch}
        options: dict[str, Any] = {
            "logits_to_keep": logits_to_keep,
            "skip_logits": skip_logits,
            "token_loss": token_loss,
        }
        logits, parts = self._predict(outputs.last_hidden_state, labels, **options, **weighting)
        loss, ce_loss, token_loss = parts or (None, None, None)
        aux_loss = None
        if needs_router_loss:
            rows = {"position_ids": position_ids, "attention_mask": attention_mask}
            aux_loss = self._router_loss(
                outputs, labels, num_documents_in_batch=num_documents_in_batch, **weighting, **rows
            )
            if labels is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss

        return MiniMindCausalLMOutputWithPast(
            loss=loss,
            ce_loss=ce_loss,
            token_loss=token_loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
            router_logits=outputs.router_logits if output_router_logits else None,
        )


class MiniMindForSequenceClassification(GenericForSequenceClassification, MiniMindPreTrainedModel):
    """MiniMind with one score per sequence, for reward models. It has no router loss."""

    # NOTE: Trainer takes `**kwargs` in `forward` for a sign that it divides by `num_items_in_batch`. It does not, so
    # Trainer must divide by the number of micro-batches.
    accepts_loss_kwargs = False

    def __init__(self, config: MiniMindConfig):
        # NOTE: skip the constructor of the generic class. It builds the model with AutoModel, which asks the user a
        # second time whether to run this code from the Hub.
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = MiniMindModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

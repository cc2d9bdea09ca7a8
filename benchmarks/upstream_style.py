"""
A training program in the style of MiniMind's own scripts, and the model and data of a checkout of MiniMind.

Each document is padded or cut to the row length. The model rotates queries and keys by complex products, repeats keys
and values for each query head, and computes the logits of all positions. A loss mask excludes padding.
"""

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerFast

from hf_pretrain import MiniMindConfig


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class Block(nn.Module):
    """Decoder layer: attention and SwiGLU, each after a norm and with a residual."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.wq = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.num_heads * self.head_dim, width, bias=False)
        self.w1 = nn.Linear(width, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, width, bias=False)
        self.w3 = nn.Linear(width, config.intermediate_size, bias=False)
        self.attention_norm, self.ffn_norm = (Norm(width, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: torch.Tensor, pos_cis: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x), pos_cis)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))

    def attend(self, x: torch.Tensor, pos_cis: torch.Tensor) -> torch.Tensor:
        batch_size, seq_len, _ = x.shape
        # (batch_size, seq_len, num_heads, head_dim) until `transpose` moves the heads before the positions
        q = self.wq(x).view(batch_size, seq_len, self.num_heads, self.head_dim)
        k = self.wk(x).view(batch_size, seq_len, self.num_kv_heads, self.head_dim)
        v = self.wv(x).view(batch_size, seq_len, self.num_kv_heads, self.head_dim)
        q, k = rotate(q, pos_cis), rotate(k, pos_cis)
        repeats = self.num_heads // self.num_kv_heads
        # MiniMind copies keys and values for each query head instead of using grouped-query attention.
        k, v = (states.repeat_interleave(repeats, dim=2) for states in (k, v))
        q, k, v = (states.transpose(1, 2).to(v.dtype) for states in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(output.transpose(1, 2).reshape(batch_size, seq_len, -1))


def rotate(x: torch.Tensor, pos_cis: torch.Tensor) -> torch.Tensor:
    """
    Rotate neighbouring pairs of `x` `(batch_size, seq_len, num_heads, head_dim)` by `pos_cis` `(positions, pairs)`.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * pos_cis[None, : x.shape[1], None]).flatten(3).type_as(x)


class UpstreamStyleModel(nn.Module):
    """Decoder with a tied head. `forward` returns the logits `(batch_size, seq_len, vocab_size)`."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.output.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        angles = torch.outer(torch.arange(2048), 1e6 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim))
        self.register_buffer("pos_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, self.pos_cis)
        return self.output(self.norm(x))


def logits_of(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits `(batch_size, seq_len, vocab_size)` of a model that returns them, alone or in an output."""
    output = model(input_ids)
    return output if isinstance(output, torch.Tensor) else output.logits


class UpstreamStyleTrainer:
    """Train one step per call, on padded token ids of shape `(batch_size, seq_len + 1)`, and return the loss."""

    def __init__(self, model: nn.Module, device: torch.device, pad_token_id: int, *, bf16: bool):
        self.model = model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        self.device, self.pad_token_id, self.bf16 = device, pad_token_id, bf16

    def __call__(self, input_ids: torch.Tensor) -> float:
        input_ids = input_ids.to(self.device)
        x, y = input_ids[:, :-1], input_ids[:, 1:]
        # The mask excludes padding from the loss only after the logits of all positions have been computed.
        loss_mask = y != self.pad_token_id
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            logits = logits_of(self.model, x)
            losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), reduction="none")
            loss = (losses * loss_mask.reshape(-1)).sum() / loss_mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


class PaddedDocuments:
    """Padded token ids of the documents of MiniMind's `PretrainDataset`, whose items are `(input_ids, labels)`."""

    def __init__(self, documents: Any):
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.documents[index][0]


def load_checkout(
    path: Path,
    config: MiniMindConfig,
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int,
    output_dir: Path,
) -> tuple[nn.Module, PaddedDocuments]:
    """
    Return the model and the data set of a checkout of MiniMind (https://github.com/jingyaogong/minimind, from 2026).

    Args:
        path (`Path`): the checkout.
        config ([`MiniMindConfig`]): shape of the model.
        documents ([`~datasets.Dataset`]): documents with a column `text`.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): the tokenizer of the documents.
        max_length (`int`): tokens per row.
        output_dir (`Path`): directory for the file that the data set reads.
    """
    sys.path.insert(0, str(path))
    model_module, data_module = map(importlib.import_module, ("model.model_minimind", "dataset.lm_dataset"))
    names: tuple[str, ...] = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    names += ("intermediate_size", "rms_norm_eps")
    model = model_module.MiniMindForCausalLM(
        model_module.MiniMindConfig(**{name: getattr(config, name) for name in names})
    )
    # MiniMind pads on the right, as its own tokenizer does.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "right"
    documents.to_json(output_dir / "documents.jsonl", force_ascii=False)
    return model, PaddedDocuments(
        data_module.PretrainDataset(str(output_dir / "documents.jsonl"), tokenizer, max_length)
    )

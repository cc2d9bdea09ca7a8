"""A toy model that has memorized a few answers: with reasoning, with a tool call, with neither."""

from pathlib import Path
from typing import Any

import torch
from transformers.utils import get_json_schema

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer


def get_weather(city: str) -> str:
    """
    Weather.

    Args:
        city: A city.
    """
    return "rain" if city == "Oslo" else "sun"


TOOL = get_json_schema(get_weather)
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
WEATHER = [
    {"role": "user", "content": "weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains in Oslo."},
]
SUM = [
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "reasoning_content": "add them", "content": "It is four."},
]
# The tokenizer has no token for any of these letters, so each needs several.
CHINESE = [{"role": "user", "content": "你好吗"}, {"role": "assistant", "content": "我很好，谢谢😀。"}]
CONVERSATIONS = [
    (SUM, {}),
    (CHINESE, {}),
    (SUM, {"enable_thinking": False}),
    (WEATHER, {"tools": [TOOL]}),
    (
        [
            {"role": "system", "content": "Answer in capitals."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "HELLO YOU"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "HELLO AGAIN"},
        ],
        {},
    ),
]


def train_talker(path: Path, *, num_steps: int = 150, tool: dict[str, Any] = TOOL) -> None:
    """
    Train on the assistant's tokens of `CONVERSATIONS` until the model reproduces them; save model and tokenizer. The
    prompts describe `tool`.
    """
    texts = [str(messages) for messages, _ in CONVERSATIONS if messages is not CHINESE] * 3
    tokenizer = train_tokenizer(texts, vocab_size=500)
    rows = [
        tokenizer.apply_chat_template(
            messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **options | ({"tools": [tool]} if "tools" in options else {}),
        )
        for messages, options in CONVERSATIONS
    ]
    length = max(len(row["input_ids"]) for row in rows)
    input_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), -100)
    for number, row in enumerate(rows):
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["assistant_masks"]).bool()
        input_ids[number, : len(ids)] = ids
        labels[number, : len(ids)] = ids.masked_fill(~mask, -100)
    torch.manual_seed(0)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    model = MiniMindForCausalLM(
        MiniMindConfig(
            **{"vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"max_position_embeddings": 1024} | special,
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(num_steps):
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.02, loss
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_rambler(path: Path, talker: Path, *, hidden_size: int = 512, num_hidden_layers: int = 24) -> None:
    """Save a model that never ends its answer, and needs about a twentieth of a second for a token."""
    tokenizer = load_tokenizer(talker)
    torch.manual_seed(0)
    model = MiniMindForCausalLM(
        MiniMindConfig.from_pretrained(
            talker,
            hidden_size=hidden_size,
            num_hidden_layers=num_hidden_layers,
            max_position_embeddings=4096,
            initializer_range=0.3,
        )
    )
    # No stop token, and nothing that the page would show apart.
    model.generation_config.suppress_tokens = sorted(tokenizer.added_tokens_decoder)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_speaker(path: Path, talker: Path, start: int, text: str, *, is_endless: bool = False, **sizes) -> None:
    """
    Save a model that says `text` after the token `start`, on every machine: the embedding of a token holds its place,
    and the head gives the next token. If it `is_endless`, the text begins again at its end.
    """
    tokenizer = load_tokenizer(talker)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len({start, *ids}) == len(ids) + 1, tokenizer.convert_ids_to_tokens(ids)
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig.from_pretrained(talker, tie_word_embeddings=False, **sizes))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data.zero_()
    model.lm_head.weight.data.zero_()
    for place, (token, following) in enumerate(zip([start, *ids], [*ids, ids[0] if is_endless else 2], strict=True)):
        model.model.embed_tokens.weight.data[token, place] = 1.0
        model.lm_head.weight.data[following, place] = 4.0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)

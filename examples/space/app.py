"""
A chat page for a Space on the Hub. It loads the model with the name of the Space, or of `MODEL`.

    hf upload me/mine-llama examples/space --repo-type space
    MODEL=out/llama python examples/space/app.py
"""

import os
from collections.abc import Iterator
from threading import Thread
from typing import Any

import gradio as gr
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer


# The Hub sets SPACE_ID.
MODEL = os.environ.get("MODEL") or os.environ["SPACE_ID"]
MAX_NEW_TOKENS = 512
tokenizer = AutoTokenizer.from_pretrained(MODEL)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto").to(device)


def as_text(content: Any) -> str:
    """Return the text of a message. gradio gives a list of its parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def answer(question: str, history: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the answer as it grows."""
    messages = [{"role": turn["role"], "content": as_text(turn["content"])} for turn in history]
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    options = {"max_new_tokens": MAX_NEW_TOKENS, "streamer": streamer, "pad_token_id": tokenizer.pad_token_id}
    Thread(target=model.generate, kwargs={**inputs.to(device), **options}).start()
    text = ""
    for piece in streamer:
        text += piece
        yield text


if __name__ == "__main__":
    gr.ChatInterface(answer, title=MODEL.rpartition("/")[2], api_name="chat").launch()

"""
Sum up the nats of answers under nanochat's chat model, for `from_scratch_nanochat.py`. nanochat's own Python runs this
file in a checkout of nanochat, and uses nanochat's loader, tokenizer and chat format.
"""

import json
import sys
from pathlib import Path

import torch
from nanochat.checkpoint_manager import load_model


@torch.inference_mode()
def main(conversations: str, result: str) -> None:
    model, tokenizer, _ = load_model("sft", torch.device("cpu"), phase="eval")
    end = tokenizer.encode_special("<|assistant_end|>")
    nats, end_nats, num_tokens = 0.0, 0.0, 0
    for line in Path(conversations).read_text(encoding="utf-8").splitlines():
        ids, mask = tokenizer.render_conversation(json.loads(line))
        assert len(ids) <= model.config.sequence_len
        # (seq_len - 1,)
        losses = model(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]), loss_reduction="none").flatten().double()
        is_answer, is_end = torch.tensor(mask[1:]) == 1, torch.tensor(ids[1:]) == end
        nats += losses[is_answer & ~is_end].sum().item()
        end_nats += losses[is_answer & is_end].sum().item()
        num_tokens += int((is_answer & ~is_end).sum())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    figures = {"nats": nats, "end_nats": end_nats, "answer_tokens": num_tokens}
    Path(result).write_text(json.dumps(figures | {"parameters": parameters, "vocabulary": tokenizer.get_vocab_size()}))


if __name__ == "__main__":
    main(*sys.argv[1:])

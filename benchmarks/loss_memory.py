"""Memory of the losses of all stages for large vocabularies, for `real_model.py`. It needs Linux or CUDA."""

import copy
import math
import multiprocessing
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.stages.distillation import DistillationArguments, TeacherTerm


LOSSES = ("stock Llama", "SFT", "SFT, LoRA", "DPO, GRPO", "distillation")
SHAPE = (4, 1024)


def reset_peak(device: torch.device) -> None:
    """Begin a new measurement of the peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # This resets the peak of the resident set: proc(5).
        Path("/proc/self/clear_refs").write_text("5")


def read_peak(device: torch.device) -> int:
    """Return the peak memory in bytes since the last reset."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else read_status("VmHWM")


def read_status(name: str) -> int:
    """Return a size of this process in bytes."""
    return 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def loss_of(path: str, vocab_size: int, device: torch.device) -> Callable[[], None]:
    """Return a function that computes the loss of a model with one layer of SmolLM2's width, and its gradients."""
    shape: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": 576, "num_hidden_layers": 1}
    shape |= {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    shape["tie_word_embeddings"] = True
    ids = torch.randint(3, vocab_size, SHAPE, device=device)
    if path == "stock Llama":
        llama = LlamaForCausalLM(LlamaConfig(**shape)).to(device)
        return lambda: llama(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model = MiniMindForCausalLM(MiniMindConfig(**shape)).to(device)
    model.set_attn_implementation("packed")
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if path in ("SFT", "SFT, LoRA"):
        # An adapter freezes the head, which is the embedding.
        model.get_input_embeddings().requires_grad_(path == "SFT")
        return lambda: model(**inputs, skip_logits=True).loss.backward()
    if path == "DPO, GRPO":
        from accelerate import Accelerator
        from trl.trainer.utils import add_fused_lm_head

        from hf_pretrain.stages.log_probs import replace_head

        add_fused_lm_head(model)
        if device.type == "cpu":
            replace_head(model, accelerator=Accelerator(cpu=True), temperature=1.0, figures=("log_probs",))
        return lambda: model(**inputs, fused_lm_head=True).log_probs.sum().backward()
    # The term uses these three settings alone.
    settings: Any = SimpleNamespace(device=device, bf16=False, fp16=False)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    term = TeacherTerm(teacher, DistillationArguments(teacher_name_or_path="a teacher"), settings)

    def distil() -> None:
        model(**inputs, token_loss=term(inputs), skip_logits=True).loss.backward()

    return distil


def measure_loss(path: str, vocab_size: int, device_type: str, threads: int, results: Any) -> None:
    """Report the bytes that a loss and its gradients need in addition to the model, in a process of its own."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device = torch.device(device_type)
    step = loss_of(path, vocab_size, device)
    reset_peak(device)
    before = torch.cuda.memory_allocated() if device_type == "cuda" else read_status("VmRSS")
    step()
    results.put(read_peak(device) - before)


def loss_memory(
    losses: Sequence[str], vocabularies: Sequence[int], *, device: str, threads: int
) -> dict[str, dict[str, float]]:
    """Return the memory of each loss in GiB, by vocabulary; under `whole logits`, the size of one copy of them."""
    context = multiprocessing.get_context("spawn")
    table: dict[str, dict[str, float]] = {}
    for vocab_size in vocabularies:
        row = table[str(vocab_size)] = {"whole logits": 4 * math.prod(SHAPE) * vocab_size / 2**30}
        for path in losses:
            results = context.Queue()
            process = context.Process(target=measure_loss, args=(path, vocab_size, device, threads, results))
            process.start()
            process.join()
            if process.exitcode:
                raise RuntimeError(f"The loss of {path} failed with the status {process.exitcode}.")
            row[path] = results.get() / 2**30
            print(f"{path}, {vocab_size:,} tokens: {row[path]:.2f} GiB", flush=True)
    return table

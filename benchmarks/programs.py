"""
The programs that `bench.py` compares.

All programs use the same documents and tokenizer. A call runs some steps and returns the seconds and the useful tokens
of each step. Useful tokens are tokens of documents that the program trains on; padding and truncated tokens do not
count.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from benchmarks.upstream_style import UpstreamStyleModel, UpstreamStyleTrainer
from hf_pretrain import MaskedLossTrainer, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.rows.collators import DataCollatorForPackedRows
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.training.training_arguments import LMTrainingArguments


Steps = list[tuple[float, int]]
# The first steps of a run are slower and do not count.
NUM_WARMUP_STEPS = 2


@dataclass
class Setting:
    """
    Settings that all programs share.

    Args:
        documents ([`~datasets.Dataset`]): documents with a column `text`.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): the tokenizer of all programs.
        config ([`MiniMindConfig`]): shape of the model.
        max_length (`int`): tokens per row.
        batch_size (`int`): rows per step.
        output_dir (`Path`): scratch directory.
        bf16 (`bool`): train under bfloat16 autocast instead of in float32.
        learning_rate (`float`): peak learning rate.
        seed (`int`): seed of the weights and of the order of the rows.
    """

    documents: Dataset
    tokenizer: PreTrainedTokenizerFast
    config: MiniMindConfig
    max_length: int
    batch_size: int
    output_dir: Path
    bf16: bool
    learning_rate: float = 5e-4
    seed: int = 0

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def training(self) -> dict[str, Any]:
        """Training arguments for both the stock Trainer and ours."""
        return {
            "output_dir": str(self.output_dir),
            "per_device_train_batch_size": self.batch_size,
            # The programs compare loops, so all of them train with AdamW.
            "optim": TrainingArguments.default_optim,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "constant",
            "seed": self.seed,
            "logging_steps": 10,
            "save_strategy": "no",
            "eval_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "bf16": self.bf16,
            "use_cpu": self.device.type == "cpu",
        }

    @cached_property
    def packed_rows(self) -> Dataset:
        rows, _ = prepare_rows(self.documents, self.tokenizer, max_length=self.max_length)
        return rows

    @cached_property
    def concatenated_rows(self) -> Dataset:
        """Rows in the style of transformers' `run_clm.py`: all documents concatenated, and cut into full rows."""
        ids = [token for document in self.tokenized_documents["input_ids"][:] for token in document]
        # Without the last row, which is not full: default_data_collator does not pad.
        rows = [ids[i : i + self.max_length] for i in range(0, len(ids) - self.max_length + 1, self.max_length)]
        return Dataset.from_dict({"input_ids": rows, "labels": rows})

    @cached_property
    def tokenized_documents(self) -> Dataset:
        return self.documents.map(
            lambda batch: {"input_ids": encode_documents(batch["text"], self.tokenizer)},
            batched=True,
            remove_columns=["text"],
        )

    @cached_property
    def padded_rows(self) -> torch.Tensor:
        """One row of `max_length + 1` token ids per document, padded or cut, in the style of MiniMind's scripts."""
        documents = self.tokenized_documents["input_ids"][:]
        rows = torch.full((len(documents), self.max_length + 1), self.tokenizer.pad_token_id)
        for row, ids in enumerate(documents):
            kept = ids[: self.max_length + 1]
            rows[row, : len(kept)] = torch.tensor(kept)
        return rows


class Clock(TrainerCallback):
    """Record the time at the end of each step of a Trainer."""

    def __init__(self):
        self.times: list[float] = []

    def on_train_begin(self, *args, **kwargs):
        self.times = []

    def on_step_end(self, args, state, control, **kwargs):
        wait_for(args.device)
        self.times.append(time.perf_counter())


def wait_for(device: torch.device) -> None:
    """Wait until all kernels have finished. CUDA kernels run asynchronously, and a step ends with its last one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TrainerProgram:
    """Program that runs some steps of `Trainer.train()` per call, and counts the useful tokens of their batches."""

    def __init__(self, trainer: Trainer, pad_token_id: int):
        self.trainer, self.clock = trainer, Clock()
        # On the device: to read them in a step would wait for it. On GPUs, the collator runs in other processes.
        self.num_tokens: list[torch.Tensor] = []
        trainer.add_callback(self.clock)
        self.dynamo_plugin = trainer.accelerator.state.dynamo_plugin
        get_batches = trainer.get_batch_samples

        def counting(*args, **kwargs):
            batches, num_items = get_batches(*args, **kwargs)
            self.num_tokens += [(batch["input_ids"] != pad_token_id).sum() for batch in batches]
            return batches, num_items

        trainer.get_batch_samples = counting

    def __call__(self, num_steps: int) -> Steps:
        self.num_tokens.clear()
        # NOTE: accelerate keeps one state for all trainers of a process, and each new trainer overwrites it.
        self.trainer.accelerator.state.dynamo_plugin = self.dynamo_plugin
        self.trainer.args.max_steps = num_steps + NUM_WARMUP_STEPS
        self.trainer.train()
        # Measure between the ends of two steps, which excludes the start and the end of `train()`.
        times = self.clock.times[NUM_WARMUP_STEPS - 1 :]
        seconds = [end - start for start, end in zip(times, times[1:], strict=False)]
        # One batch per step.
        return list(zip(seconds, map(int, self.num_tokens[NUM_WARMUP_STEPS:]), strict=False))


def _model(setting: Setting) -> MiniMindForCausalLM:
    """Return a MiniMind with random weights and the attention and experts implementations that the recipes choose."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(setting.config)
    model.set_attn_implementation("packed")
    # Choose the same implementation as the recipes do on CPUs (`loading/model_arguments.py`).
    if setting.device.type == "cpu" and setting.config.num_experts:
        model.set_experts_implementation("eager")
    return model


def ours(setting: Setting, rows: Dataset | None = None, **arguments: Any) -> TrainerProgram:
    """Return `MaskedLossTrainer` on packed rows."""
    model = _model(setting)
    pad_token_id = setting.tokenizer.pad_token_id
    trainer = MaskedLossTrainer(
        model=model,
        args=LMTrainingArguments(**setting.training | arguments),
        data_collator=DataCollatorForPackedRows(pad_token_id),
        train_dataset=setting.packed_rows if rows is None else rows,
        processing_class=setting.tokenizer,
    )
    return TrainerProgram(trainer, pad_token_id)


def bare_loop(setting: Setting) -> Callable[[int], Steps]:
    """Return a minimal training loop with the model, rows and optimizer of `ours`, to show the overhead of Trainer."""
    model = _model(setting).to(setting.device).train()
    decays = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95), fused=True)
    pad_token_id = setting.tokenizer.pad_token_id
    collator: Any = DataCollatorForPackedRows(pad_token_id)

    def run(num_steps: int) -> Steps:
        loader = DataLoader(
            setting.packed_rows,
            batch_size=setting.batch_size,
            shuffle=True,
            collate_fn=collator,
            pin_memory=setting.device.type == "cuda",
        )
        times, num_tokens = [], []
        for _, batch in zip(range(num_steps + NUM_WARMUP_STEPS), loader, strict=False):
            num_tokens.append(int((batch["input_ids"] != pad_token_id).sum()))
            batch = send_to_device(batch, setting.device, non_blocking=True)
            with torch.autocast(setting.device.type, dtype=torch.bfloat16, enabled=setting.bf16):
                loss = model(**batch, use_cache=False, skip_logits=True).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            wait_for(setting.device)
            times.append(time.perf_counter())
        seconds = [end - start for start, end in zip(times, times[1:], strict=False)]
        return list(zip(seconds, num_tokens[1:], strict=False))[NUM_WARMUP_STEPS - 1 :]

    return run


def _llama(setting: Setting) -> LlamaForCausalLM:
    names: tuple[str, ...] = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    names += (
        "num_key_value_heads",
        "intermediate_size",
        "rms_norm_eps",
        "tie_word_embeddings",
        "max_position_embeddings",
    )
    torch.manual_seed(setting.seed)
    config = LlamaConfig(**{name: getattr(setting.config, name) for name in names})
    # Llama is the stock architecture nearest to MiniMind's dense models.
    config.rope_parameters = setting.config.rope_parameters
    return LlamaForCausalLM(config)


def stock_trainer(setting: Setting, **arguments: Any) -> TrainerProgram:
    """Return transformers' `Trainer` with a Llama of the same shape on concatenated rows."""
    trainer = Trainer(
        model=_llama(setting),
        args=TrainingArguments(**setting.training | arguments),
        data_collator=default_data_collator,
        train_dataset=setting.concatenated_rows,
    )
    return TrainerProgram(trainer, setting.tokenizer.pad_token_id)


def trl_sft(setting: Setting, **arguments: Any) -> TrainerProgram:
    """Return TRL's `SFTTrainer` with a Llama of the same shape and TRL's own packing."""
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        **setting.training | arguments,
        packing=True,
        packing_strategy="wrapped",
        max_length=setting.max_length,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=_llama(setting), args=args, train_dataset=setting.tokenized_documents, processing_class=setting.tokenizer
    )
    return TrainerProgram(trainer, setting.tokenizer.pad_token_id)


def upstream_style(setting: Setting) -> Callable[[int], Steps]:
    """Return a program in the style of MiniMind's own scripts, on documents padded or cut to the row length."""
    torch.manual_seed(setting.seed)
    pad_token_id = setting.tokenizer.pad_token_id
    model = UpstreamStyleModel(setting.config)
    step = UpstreamStyleTrainer(model, setting.device, pad_token_id, bf16=setting.bf16)
    rows = setting.padded_rows[torch.randperm(len(setting.padded_rows))]
    batches = rows.split(setting.batch_size)
    # Count the mean over all batches: the useful tokens of a few batches vary a lot, and the time of a padded step
    # does not depend on them.
    tokens_a_batch = int((rows != pad_token_id).sum() / len(rows) * setting.batch_size)
    position = 0

    def run(num_steps: int) -> Steps:
        nonlocal position
        steps = []
        for number in range(num_steps + 1):
            # The last batch is smaller and never used.
            batch = batches[position % (len(batches) - 1)]
            position += 1
            start = time.perf_counter()
            step(batch)
            wait_for(setting.device)
            # The first step of a call warms up.
            if number > 0:
                steps.append((time.perf_counter() - start, tokens_a_batch))
        return steps

    return run

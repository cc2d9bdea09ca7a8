"""
This package beside TRL on a real model, SmolLM2-135M-Instruct: `make real-model`, or

    taskset -c 1 python -m benchmarks.real_model
    python -m benchmarks.real_model --stages sft sft-lora --steps 6 --output scratch.json
    python -m benchmarks.real_model --device cuda --bf16

TRL's trainers train stock transformers' `LlamaForCausalLM`, and this package's trainers train its own model, with the
same weights, rows, order, optimizer and schedule. Each of the two runs in a process of its own, and they take turns
after each step, so that a busy machine slows both. A step includes the data. On a CPU, its time is the time that the
process ran: other programs disturb it less. The first steps are not timed.

The memory of a stage is the peak of the process while it trains (of torch's allocator on a GPU). The benchmark also
measures the memory of the losses with two vocabularies, for 4 sequences of 1,024 tokens.
"""

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import queue
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from benchmarks.bench import ROOT, environment
from benchmarks.programs import NUM_WARMUP_STEPS, wait_for
from hf_pretrain import MaskedLossTrainer, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.data.chat_arguments import ChatArguments
from hf_pretrain.data.corpora import load_embedded
from hf_pretrain.data.data_arguments import SourceArguments
from hf_pretrain.data.encoding import encode_conversation
from hf_pretrain.data.preparation import load_rows
from hf_pretrain.stages.distillation import DistillationArguments, TeacherTerm
from hf_pretrain.tokenizer.pretrained import load_tokenizer, save_tokenizer
from hf_pretrain.training.training_arguments import SFTTrainingArguments
from hf_pretrain.weights.adapters import AdapterArguments, add_adapter, load_adapter
from hf_pretrain.weights.exporting import export
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.model_arguments import ModelArguments, load_model


MODEL = "embedded:smollm2"
# The model's own chat template, with marks around the answers and their stop token.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + "
    "message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + "
    "'<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIDES = ("ours", "TRL")
LENGTH, GROUP, ANSWER_LENGTH = 256, 4, 48
VOCABULARIES = (49_152, 151_936)
LOSSES = ("stock Llama", "SFT", "SFT, LoRA", "DPO, GRPO", "distillation")
LOSS_SHAPE = (4, 1024)


@dataclass
class Stage:
    """
    A comparison.

    Args:
        trainer (`str`): sft, dpo or grpo.
        batch_size (`int`): rows per step; with GRPO, completions.
        uses_peft (`bool`): train an adapter.
        packing (`str`): of SFT: none or bfd.
    """

    trainer: str
    batch_size: int
    uses_peft: bool = False
    packing: str = "none"


STAGES = {
    "sft": Stage("sft", 4),
    "sft-packed": Stage("sft", 2, packing="bfd"),
    "sft-lora": Stage("sft", 4, uses_peft=True),
    "dpo": Stage("dpo", 2),
    "dpo-lora": Stage("dpo", 2, uses_peft=True),
    "grpo": Stage("grpo", 2 * GROUP),
}


def write_inputs(directory: Path, num_records: int) -> None:
    """Write the model for both sides, the first weights of an adapter, and the data."""
    tokenizer, model = load_tokenizer(MODEL), load_upstream(MODEL, dtype=torch.float32)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(directory / "ours")
    export(model, str(directory / "TRL"), "llama", tokenizer=tokenizer)
    for side in SIDES:
        save_tokenizer(tokenizer, directory / side)
    model = load_model(ModelArguments(model_name_or_path=str(directory / "ours")), tokenizer)
    torch.manual_seed(0)
    # Half of an adapter is zero at first, and the other half sees no rows of rotated heads, so it fits both models.
    add_adapter(model, AdapterArguments(use_peft=True)).save_pretrained(directory / "adapter")
    for schema in ("conversation", "preference"):
        records = itertools.islice(fitting_records(tokenizer, schema), num_records)
        lines = [json.dumps(record) + "\n" for record in records]
        (directory / f"{schema}.jsonl").write_text("".join(lines), encoding="utf-8")


def fitting_records(tokenizer: Any, schema: str) -> Iterator[dict[str, Any]]:
    """Yield conversations or preferences that fit into a row, and are longer than a quarter of it."""
    for record in load_embedded("chitchat", schema=schema):
        if schema == "conversation":
            # Without a question at the end.
            record["messages"] = record["messages"][: len(record["messages"]) // 2 * 2]
        answers = [record[name] for name in ("messages", "chosen", "rejected") if name in record]
        lengths = [len(encode_conversation(tokenizer, record.get("prompt", []) + answer)[0]) for answer in answers]
        if LENGTH / 4 < min(lengths) and max(lengths) <= LENGTH:
            yield record


def training_arguments(args: argparse.Namespace, stage: Stage, output_dir: Path) -> dict[str, Any]:
    """Return the arguments that both sides share."""
    arguments: dict[str, Any] = {"output_dir": str(output_dir), "max_steps": args.steps, "warmup_steps": 2}
    arguments |= {"lr_scheduler_type": "linear", "learning_rate": 2e-4 if stage.uses_peft else 1e-5}
    arguments |= {"per_device_train_batch_size": stage.batch_size, "max_grad_norm": 1.0, "weight_decay": 0.0}
    arguments |= {"adam_beta2": 0.999, "optim": "adamw_torch_fused", "train_sampling_strategy": "sequential"}
    arguments |= {"save_strategy": "no", "eval_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments |= {"bf16": args.bf16, "use_cpu": args.device == "cpu", "logging_steps": 1, "seed": 0}
    if stage.trainer == "grpo":
        arguments |= {"num_generations": GROUP, "max_completion_length": ANSWER_LENGTH, "beta": 0.04}
        arguments |= {"shuffle_dataset": False}
    elif stage.trainer == "dpo":
        arguments |= {"max_length": LENGTH}
    return arguments


def rows_of(stage: Stage, directory: Path, args: SFTTrainingArguments, tokenizer: Any) -> Any:
    """Return the rows of SFT or DPO as this package prepares them."""
    reading: dict[str, Any] = {"validation_fraction": 0.0, "num_proc": 1}
    if stage.trainer == "dpo":
        return load_rows(SourceArguments([str(directory / "preference.jsonl")], **reading), args, tokenizer)
    reading |= {"packing": stage.packing, "max_length": LENGTH}
    return load_rows(ChatArguments([str(directory / "conversation.jsonl")], **reading), args, tokenizer)


def questions(directory: Path) -> list[dict[str, Any]]:
    """Return the prompts of GRPO: the first question of each conversation."""
    lines = (directory / "preference.jsonl").read_text(encoding="utf-8").splitlines()
    return [{"prompt": json.loads(line)["prompt"][:1]} for line in lines]


class FixedAnswers:
    """
    Answers of GRPO that depend only on the prompt and on the place in its group, in place of `generate`.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): the tokenizer.
        directory (`Path`): holds the data, whose answers it takes.

    Attributes:
        num_tokens (`list[int]`): tokens of prompts and answers of each call.
    """

    def __init__(self, tokenizer: Any, directory: Path):
        lines = (directory / "preference.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["chosen"][0]["content"] + tokenizer.eos_token for line in lines]
        self.answers = [ids[:ANSWER_LENGTH] for ids in tokenizer(texts)["input_ids"]]
        self.pad_token_id, self.num_tokens = tokenizer.pad_token_id, list[int]()

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        places = [sum(ids[-10:]) + row % GROUP for row, ids in enumerate(input_ids.tolist())]
        chosen = [self.answers[place % len(self.answers)] for place in places]
        self.num_tokens.append(int(attention_mask.sum()) + sum(map(len, chosen)))
        padded = [ids + [self.pad_token_id] * (ANSWER_LENGTH - len(ids)) for ids in chosen]
        return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)


def brevity(completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward answers of GRPO by their length."""
    return [-abs(len(completion[0]["content"]) - 60) / 60 for completion in completions]


def build_ours(stage: Stage, args: argparse.Namespace, directory: Path) -> tuple[Trainer, Any]:
    """Return this package's trainer, as its recipe builds it, and its rows."""
    tokenizer = load_tokenizer(str(directory / "ours"))
    model = load_model(ModelArguments(model_name_or_path=str(directory / "ours")), tokenizer)
    if stage.uses_peft:
        model = load_adapter(model, directory / "adapter")
    arguments = training_arguments(args, stage, directory / "out-ours")
    how: dict[str, Any] = {"processing_class": tokenizer}
    if stage.trainer == "sft":
        settings = SFTTrainingArguments(**arguments, eval_on_start=False)
        data = rows_of(stage, directory, settings, tokenizer)
        how |= {"train_dataset": data.train, "data_collator": data.collator}
        return MaskedLossTrainer(model, settings, **how), data.train[:]
    if stage.trainer == "dpo":
        from hf_pretrain.stages.dpo import DPOTrainingArguments, MiniMindDPOTrainer

        settings = DPOTrainingArguments(**arguments, eval_on_start=False)
        rows = rows_of(stage, directory, settings, tokenizer).train
        reference = ModelArguments(model_name_or_path=str(directory / "ours"))
        how["ref_model"] = None if stage.uses_peft else load_model(reference, tokenizer)
        return MiniMindDPOTrainer(model, args=settings, train_dataset=rows, **how), rows[:]
    from hf_pretrain.stages.reinforcement import GRPOTrainingArguments, MiniMindGRPOTrainer

    rows = Dataset.from_list(questions(directory))
    settings = GRPOTrainingArguments(**arguments)
    return MiniMindGRPOTrainer(model, args=settings, train_dataset=rows, reward_funcs=[brevity], **how), rows[:]


def build_trl(stage: Stage, args: argparse.Namespace, directory: Path) -> tuple[Trainer, Any]:
    """Return TRL's trainer of a stock Llama, and its rows."""
    import trl

    tokenizer = load_tokenizer(str(directory / "TRL"))
    load = partial(LlamaForCausalLM.from_pretrained, directory / "TRL", dtype=torch.float32)
    model: Any = load()
    # Llama gives the input embedding of its padding token no gradient. In SmolLM2, that is `<|im_end|>`, which ends
    # each message, so a run of stock Llama does not train it there. Ours does.
    model.get_input_embeddings().padding_idx = None
    if stage.uses_peft:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(directory / "adapter"), is_trainable=True)
    # Off, because it is off in our recipes.
    arguments = training_arguments(args, stage, directory / "out-TRL") | {"gradient_checkpointing": False}
    how: dict[str, Any] = {"processing_class": tokenizer}
    if stage.trainer == "grpo":
        rows = Dataset.from_list(questions(directory))
        settings: Any = trl.GRPOConfig(**arguments)
        return trl.GRPOTrainer(model, [brevity], args=settings, train_dataset=rows, **how), rows[:]
    from hf_pretrain.stages.dpo import DPOTrainingArguments

    # Its maximum length is that of DPO. The one of SFT is an argument of the data.
    ours = DPOTrainingArguments(
        str(directory / "rows"), use_cpu=args.device == "cpu", report_to="none", max_length=LENGTH
    )
    if stage.trainer == "dpo":
        # TRL would also score the newline after an answer, so it gets our rows.
        rows = rows_of(stage, directory, ours, tokenizer).train
        trainer_class = type("DPOTrainer", (trl.DPOTrainer,), {"_prepare_dataset": lambda self, rows, *args: rows})
        how["ref_model"] = None if stage.uses_peft else load()
        return trainer_class(model, args=trl.DPOConfig(**arguments), train_dataset=rows, **how), rows[:]
    arguments |= {"max_length": LENGTH, "assistant_only_loss": stage.packing == "none"}
    if stage.packing == "none":
        rows = Dataset.from_json(str(directory / "conversation.jsonl"))
    else:
        # The packing of both sides is best fit decreasing, but they order the rows differently.
        rows = rows_of(stage, directory, ours, tokenizer).train.map(_with_labels, remove_columns=["loss_mask"])
        arguments |= {"packing": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = trl.SFTTrainer(model, args=trl.SFTConfig(**arguments), train_dataset=rows, **how)
    return trainer, trainer.train_dataset[:]


def _with_labels(row: dict[str, Any]) -> dict[str, Any]:
    return {"labels": [x if weight else -100 for x, weight in zip(row["input_ids"], row["loss_mask"], strict=True)]}


class Turns(TrainerCallback):
    """
    Wait for the turn before each step, and give it to the other process after the step. Record the seconds of a step:
    on a CPU, those that the process ran, because other programs disturb these less.
    """

    def __init__(self, mine: Any, others: Any, barrier: Any):
        self.mine, self.others, self.barrier = mine, others, barrier
        self.seconds: list[float] = []
        self.now = time.perf_counter if torch.cuda.is_available() else time.process_time

    def on_train_begin(self, args, state, control, **kwargs):
        # Begin when both sides are ready.
        self.barrier.wait()
        self.mine.acquire()
        reset_peak(args.device)
        self.start = self.now()

    def on_step_end(self, args, state, control, **kwargs):
        wait_for(args.device)
        self.seconds.append(self.now() - self.start)
        self.others.release()
        if state.global_step < state.max_steps:
            self.mine.acquire()
            self.start = self.now()
        else:
            self.peak = read_peak(args.device)
            # The end of a run must not disturb the last step of the other side.
            self.barrier.wait()


def reset_peak(device: torch.device) -> None:
    """Begin a new measurement of the peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        # See proc(5): this resets the peak of the resident set.
        Path("/proc/self/clear_refs").write_text("5")


def read_peak(device: torch.device) -> int:
    """Return the peak memory in bytes since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return read_status("VmHWM") if sys.platform == "linux" else 0


def read_status(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def comparable(rows: dict[str, list]) -> dict[str, list]:
    """Return rows as both sides have them: with labels instead of weights."""
    rows = {name: column for name, column in rows.items() if name not in ("seq_lengths", "messages")}
    if "loss_mask" in rows:
        pairs = zip(rows["input_ids"], rows.pop("loss_mask"), strict=True)
        rows["labels"] = [_with_labels({"input_ids": ids, "loss_mask": mask})["labels"] for ids, mask in pairs]
    return rows


def count_tokens(rows: dict[str, list], batch_size: int, steps: int) -> list[int]:
    """Return the tokens of each step of SFT or DPO, without padding."""
    lengths = {name: [len(ids) for ids in column] for name, column in rows.items() if name != "labels"}
    # A pair has its prompt twice.
    per_row = [sum(row) + row[0] * (len(row) - 1) // 2 for row in zip(*lengths.values(), strict=True)]
    return [sum(per_row[step * batch_size :][:batch_size]) for step in range(steps)]


def record_steps() -> dict[str, list[float]]:
    """Record the loss of each `backward` and the norm of each gradient that is clipped, in the result."""
    recorded: dict[str, list[float]] = {"loss": [], "gradient norm": []}
    backward, clip = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_

    def recording(loss: torch.Tensor, *words: Any, **kwargs: Any) -> None:
        recorded["loss"].append(loss.item())
        backward(loss, *words, **kwargs)

    def clip_recording(*words: Any, **kwargs: Any) -> torch.Tensor:
        norm = clip(*words, **kwargs)
        recorded["gradient norm"].append(float(norm))
        return norm

    torch.Tensor.backward = recording  # type: ignore[method-assign]
    torch.nn.utils.clip_grad_norm_ = clip_recording
    return recorded


def take_part(
    side: str, name: str, args: argparse.Namespace, directory: Path, turns: tuple[Any, Any, Any], results: Any
) -> None:
    """Train one side of a stage in a process of its own, and report losses, norms, seconds, memory and rows."""
    torch.set_num_threads(args.threads)
    recorded, stage = record_steps(), STAGES[name]
    answers = FixedAnswers(load_tokenizer(str(directory / side)), directory)
    if stage.trainer == "grpo":
        GenerationMixin.generate = lambda model, *words, **kwargs: answers(*words, **kwargs)  # type: ignore
    trainer, rows = (build_ours if side == "ours" else build_trl)(stage, args, directory)
    clock = Turns(*turns)
    trainer.add_callback(clock)
    trainer.train()
    rows = comparable(rows)
    tokens = answers.num_tokens or count_tokens(rows, stage.batch_size, args.steps)
    found = {**recorded, "seconds": clock.seconds, "tokens": tokens, "peak_bytes": clock.peak, "rows": rows}
    results.put((side, found))


def run_stage(name: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train both sides of a stage in turn. Raise `RuntimeError` if one of them fails."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    gates = dict(zip(SIDES, (context.Semaphore(1), context.Semaphore(0)), strict=True))
    processes = {}
    for side, other in zip(SIDES, SIDES[::-1], strict=True):
        turns = (gates[side], gates[other], barrier)
        words = (side, name, args, directory, turns, results)
        processes[side] = context.Process(target=take_part, args=words, daemon=True)
        processes[side].start()
    found: dict[str, Any] = {}
    while len(found) < len(SIDES):
        try:
            side, result = results.get(timeout=1)
            found[side] = result
        except queue.Empty:
            if failed := [side for side, process in processes.items() if process.exitcode]:
                # The other one may wait for its turn for ever.
                for process in processes.values():
                    process.terminate()
                raise RuntimeError(f"{name}: {failed[0]} failed. Its error stands above.") from None
    for process in processes.values():
        process.join()
    return summarize(name, found)


def summarize(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a stage. Raise `RuntimeError` if the sides trained on different rows."""
    ours, theirs = (found[side] for side in SIDES)
    for what in ("rows", "tokens"):
        if ours.pop(what) != theirs[what]:
            raise RuntimeError(f"{name}: the {what} of both sides differ.")
    theirs.pop("rows")
    tokens = theirs.pop("tokens")
    for result in (ours, theirs):
        timed = slice(NUM_WARMUP_STEPS, None)
        result["tokens_per_second"] = sum(tokens[timed]) / sum(result["seconds"][timed])
    differences = {
        measure: max(abs(a - b) for a, b in zip(ours[measure], theirs[measure], strict=True))
        for measure in ("loss", "gradient norm")
    }
    ratios = {what: ours[what] / theirs[what] for what in ("tokens_per_second", "peak_bytes")}
    steps = {"steps": len(tokens), "tokens": tokens}
    return {"setting": asdict(STAGES[name]), **steps, "differences": differences, "ratios": ratios} | found


def loss_of(path: str, vocab_size: int, device: torch.device) -> Callable[[], None]:
    """Return a function that computes the loss of a model with one layer of SmolLM2's width, and its gradients."""
    shape: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": 576, "num_hidden_layers": 1}
    shape |= {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    shape["tie_word_embeddings"] = True
    ids = torch.randint(3, vocab_size, LOSS_SHAPE, device=device)
    if path == "stock Llama":
        llama = LlamaForCausalLM(LlamaConfig(**shape)).to(device)
        return lambda: llama(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model = MiniMindForCausalLM(MiniMindConfig(**shape)).to(device)
    model.set_attn_implementation("packed")
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if path == "SFT":
        return lambda: model(**inputs, skip_logits=True).loss.backward()
    if path == "SFT, LoRA":
        model.get_input_embeddings().requires_grad_(False)
        return lambda: model(**inputs, skip_logits=True).loss.backward()
    if path == "DPO, GRPO":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)
        return lambda: model(**inputs, fused_lm_head=True).log_probs.sum().backward()
    # The term uses these three settings alone.
    settings: Any = SimpleNamespace(device=device, bf16=False, fp16=False)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    term = TeacherTerm(teacher, DistillationArguments(teacher_name_or_path="a teacher"), settings)

    def distil() -> None:
        outputs = model(**inputs)
        (outputs.loss + term(outputs, inputs)).backward()

    return distil


def measure_loss(path: str, vocab_size: int, args: argparse.Namespace, results: Any) -> None:
    """Report the bytes that a loss and its gradients need in addition to the model, in a process of its own."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    step = loss_of(path, vocab_size, device)
    reset_peak(device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else read_status("VmRSS")
    step()
    results.put(read_peak(device) - before)


def loss_memory(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the memory of each loss in GiB, by vocabulary; under `whole logits`, the size of one copy of them."""
    context, table = multiprocessing.get_context("spawn"), {}
    for vocab_size in args.vocabularies:
        table[str(vocab_size)] = {"whole logits": 4 * math.prod(LOSS_SHAPE) * vocab_size / 2**30}
        for path in args.losses:
            results = context.Queue()
            process = context.Process(target=measure_loss, args=(path, vocab_size, args, results))
            process.start()
            process.join()
            if process.exitcode:
                raise RuntimeError(f"The loss of {path} failed with the status {process.exitcode}.")
            table[str(vocab_size)][path] = results.get() / 2**30
            print(f"{path}, {vocab_size:,} tokens: {table[str(vocab_size)][path]:.2f} GiB", flush=True)
    return table


def write(path: Path, results: dict[str, Any]) -> None:
    rounded = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.8g}"))
    path.write_text(json.dumps(rounded) + "\n", encoding="utf-8")


def print_table(results: dict[str, Any]) -> None:
    print(
        f"\n{'stage':12}{'loss':>10}{'norm':>10}{'tokens/s':>12}{'TRL':>8}{'ratio':>8}{'GiB':>8}{'TRL':>8}{'ratio':>8}"
    )
    for name, found in results["stages"].items():
        line = f"{name:12}{found['differences']['loss']:10.1e}{found['differences']['gradient norm']:10.1e}"
        for what, unit, form in (("tokens_per_second", 1, ".0f"), ("peak_bytes", 2**30, ".2f")):
            ours, theirs = (found[side][what] / unit for side in SIDES)
            line += f"{ours:{'12' if unit == 1 else '8'}{form}}{theirs:8{form}}{found['ratios'][what]:8.2f}"
        print(line)
    for vocab_size, row in results["loss_gib"].items():
        print(
            f"\nGiB of the loss with {int(vocab_size):,} tokens: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES), help="stages to compare")
    parser.add_argument("--vocabularies", nargs="*", type=int, default=VOCABULARIES, help="sizes for the losses")
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=LOSSES, help="losses whose memory to measure")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast; by default float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/real-model.json")
    args = parser.parse_args()
    # The results of other stages and vocabularies stay.
    results = json.loads(args.output.read_text()) if args.output.exists() else {"stages": {}, "loss_gib": {}}
    results |= environment() | {"precision": "bf16" if args.bf16 else "float32", "threads": args.threads}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        if args.stages:
            write_inputs(directory, max(stage.batch_size for stage in STAGES.values()) * args.steps)
        for name in args.stages:
            results["stages"][name] = run_stage(name, args, directory)
            print(name, results["stages"][name]["differences"], results["stages"][name]["ratios"], flush=True)
            write(args.output, results)
    for size, row in loss_memory(args).items():
        results["loss_gib"][size] = results["loss_gib"].get(size, {}) | row
    write(args.output, results)
    print_table(results)


if __name__ == "__main__":
    main()

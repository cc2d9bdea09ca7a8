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
import itertools
import json
import multiprocessing
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationMixin, LlamaForCausalLM, Trainer, TrainerCallback

from benchmarks.bench import ROOT, environment
from benchmarks.loss_memory import LOSSES, loss_memory, read_peak, reset_peak
from benchmarks.programs import NUM_WARMUP_STEPS, wait_for
from hf_pretrain import MaskedLossTrainer
from hf_pretrain.data.corpora import load_embedded
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter, load_adapter
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.data_arguments import PreferenceArguments
from hf_pretrain.rows.encoding import encode_conversation
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.rows.preparation import PreparedData, load_rows
from hf_pretrain.tokenizer.pretrained import load_tokenizer, save_tokenizer
from hf_pretrain.training.training_arguments import SFTTrainingArguments
from hf_pretrain.weights.exporting import export
from hf_pretrain.weights.importing import load_upstream


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
    for record in load_embedded("chitchat", kind=schema):
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


def rows_of(stage: Stage, directory: Path, args: argparse.Namespace, tokenizer: Any) -> PreparedData:
    """Return the rows of SFT or DPO as this package prepares them."""
    from hf_pretrain.stages.dpo import DPOTrainingArguments

    # The maximum length is that of DPO. The one of SFT is an argument of the data.
    settings = DPOTrainingArguments(str(directory / "rows"), use_cpu=args.device == "cpu", max_length=LENGTH)
    reading: dict[str, Any] = {"validation_fraction": 0.0, "num_proc": 1}
    if stage.trainer == "dpo":
        preferences = PreferenceArguments([str(directory / "preference.jsonl")], **reading)
        return load_rows(preferences, settings, tokenizer, prepare=prepare_pairs)
    reading |= {"packing": stage.packing, "max_length": LENGTH}
    return load_rows(ChatArguments([str(directory / "conversation.jsonl")], **reading), settings, tokenizer)


def preferences(directory: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (directory / "preference.jsonl").read_text(encoding="utf-8").splitlines()))


def questions(directory: Path) -> Dataset:
    """Return the prompts of GRPO: the first question of each conversation."""
    return Dataset.from_list([{"prompt": record["prompt"][:1]} for record in preferences(directory)])


def fixed_answers(tokenizer: Any, directory: Path) -> Callable[..., torch.Tensor]:
    """Return a stand-in for `generate`, whose answers depend only on the prompt and on the place in its group."""
    texts = [record["chosen"][0]["content"] + tokenizer.eos_token for record in preferences(directory)]
    answers = [ids[:ANSWER_LENGTH] for ids in tokenizer(texts)["input_ids"]]
    answers = [ids + [tokenizer.pad_token_id] * (ANSWER_LENGTH - len(ids)) for ids in answers]

    def generate(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        places = [sum(ids[-10:]) + row % GROUP for row, ids in enumerate(input_ids.tolist())]
        chosen = [answers[place % len(answers)] for place in places]
        return torch.cat([input_ids, torch.tensor(chosen, device=input_ids.device)], dim=1)

    return generate


def brevity(completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward answers of GRPO by their length."""
    return [-abs(len(completion[0]["content"]) - 60) / 60 for completion in completions]


def build_ours(stage: Stage, args: argparse.Namespace, directory: Path) -> Trainer:
    """Return this package's trainer, as its recipe builds it."""
    tokenizer, where = (
        load_tokenizer(str(directory / "ours")),
        ModelArguments(model_name_or_path=str(directory / "ours")),
    )
    model = load_model(where, tokenizer)
    if stage.uses_peft:
        model = load_adapter(model, directory / "adapter")
    arguments = training_arguments(args, stage, directory / "out-ours")
    how: dict[str, Any] = {"processing_class": tokenizer}
    if stage.trainer == "grpo":
        from hf_pretrain.stages.reinforcement import GRPOTrainingArguments, MiniMindGRPOTrainer

        how |= {"args": GRPOTrainingArguments(**arguments), "train_dataset": questions(directory)}
        return MiniMindGRPOTrainer(model, reward_funcs=[brevity], **how)
    data = rows_of(stage, directory, args, tokenizer)
    how["train_dataset"] = data.train
    if stage.trainer == "sft":
        how |= {"args": SFTTrainingArguments(**arguments, eval_on_start=False), "data_collator": data.collator}
        return MaskedLossTrainer(model, **how)
    from hf_pretrain.stages.dpo import DPOTrainingArguments, MiniMindDPOTrainer

    how["args"] = DPOTrainingArguments(**arguments, eval_on_start=False)
    return MiniMindDPOTrainer(model, ref_model=None if stage.uses_peft else load_model(where, tokenizer), **how)


def build_trl(stage: Stage, args: argparse.Namespace, directory: Path) -> Trainer:
    """Return TRL's trainer of a stock Llama."""
    import trl

    model, tokenizer = load_llama(directory), load_tokenizer(str(directory / "TRL"))
    if stage.uses_peft:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(directory / "adapter"), is_trainable=True)
    # TRL's default is on.
    arguments = training_arguments(args, stage, directory / "out-TRL") | {"gradient_checkpointing": False}
    how: dict[str, Any] = {"processing_class": tokenizer}
    if stage.trainer == "grpo":
        settings: Any = trl.GRPOConfig(**arguments)
        return trl.GRPOTrainer(model, [brevity], args=settings, train_dataset=questions(directory), **how)
    if stage.trainer == "dpo":
        # TRL would also score the newline after an answer, so it gets our rows.
        rows = rows_of(stage, directory, args, tokenizer).train
        trainer_class = type("DPOTrainer", (trl.DPOTrainer,), {"_prepare_dataset": lambda self, rows, *args: rows})
        how["ref_model"] = None if stage.uses_peft else load_llama(directory)
        return trainer_class(model, args=trl.DPOConfig(**arguments), train_dataset=rows, **how)
    arguments |= {"max_length": LENGTH, "assistant_only_loss": stage.packing == "none"}
    if stage.packing == "none":
        rows = Dataset.from_json(str(directory / "conversation.jsonl"))
    else:
        # Both sides pack by best fit decreasing, but they order the rows differently.
        rows = rows_of(stage, directory, args, tokenizer).train.map(_with_labels, remove_columns=["loss_mask"])
        arguments |= {"packing": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
    return trl.SFTTrainer(model, args=trl.SFTConfig(**arguments), train_dataset=rows, **how)


def load_llama(directory: Path) -> Any:
    model = LlamaForCausalLM.from_pretrained(directory / "TRL", dtype=torch.float32)
    # Llama drops the gradient of the input embedding of its padding token. In SmolLM2, this token is `<|im_end|>`,
    # which ends each message. With the gradient, both sides train the same weights.
    model.get_input_embeddings().padding_idx = None
    return model


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

    def on_train_begin(self, args, state, control, **kwargs):
        # Begin when both sides are ready.
        self.barrier.wait()
        self.mine.acquire()
        reset_peak(args.device)
        self.now = time.perf_counter if args.device.type == "cuda" else time.process_time
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


def take_part(
    side: str, name: str, args: argparse.Namespace, directory: Path, turns: tuple[Any, Any, Any], results: Any
) -> None:
    """Train one side of a stage in a process of its own, and report its log, seconds and memory."""
    torch.set_num_threads(args.threads)
    if STAGES[name].trainer == "grpo":
        GenerationMixin.generate = fixed_answers(load_tokenizer(str(directory / side)), directory)  # type: ignore
    trainer = (build_ours if side == "ours" else build_trl)(STAGES[name], args, directory)
    clock = Turns(*turns)
    trainer.add_callback(clock)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    found: dict[str, Any] = {measure: [entry[measure] for entry in log] for measure in ("loss", "grad_norm")}
    # Both count the tokens so far, without padding.
    counts = [0, *(entry.get("num_tokens", entry.get("num_input_tokens_seen")) for entry in log)]
    found["tokens"] = [int(end - start) for start, end in itertools.pairwise(counts)]
    results.put((side, found | {"seconds": clock.seconds, "peak_bytes": clock.peak}))


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
    """Return the figures of a stage. Raise `RuntimeError` if the sides trained on different numbers of tokens."""
    ours, theirs = (found[side] for side in SIDES)
    tokens = ours.pop("tokens")
    if tokens != (others := theirs.pop("tokens")):
        raise RuntimeError(f"{name}: both sides must have the same rows, but their tokens are {tokens} and {others}.")
    timed = slice(NUM_WARMUP_STEPS, None)
    for result in (ours, theirs):
        result["tokens_per_second"] = sum(tokens[timed]) / sum(result["seconds"][timed])
    differences = {
        measure: max(abs(a - b) for a, b in zip(ours[measure], theirs[measure], strict=True))
        for measure in ("loss", "grad_norm")
    }
    # A step of one side follows the same step of the other. The median leaves out steps that something disturbed.
    pairs = zip(ours["seconds"][timed], theirs["seconds"][timed], strict=True)
    ratios = {"tokens_per_second": statistics.median(their / our for our, their in pairs)}
    ratios["peak_bytes"] = ours["peak_bytes"] / theirs["peak_bytes"]
    return {"setting": asdict(STAGES[name]), "tokens": tokens, "differences": differences, "ratios": ratios} | found


def write(path: Path, results: dict[str, Any]) -> None:
    rounded = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.8g}"))
    path.write_text(json.dumps(rounded) + "\n", encoding="utf-8")


def print_table(results: dict[str, Any]) -> None:
    print(
        f"\n{'stage':12}{'loss':>10}{'norm':>10}{'tokens/s':>12}{'TRL':>8}{'ratio':>8}{'GiB':>8}{'TRL':>8}{'ratio':>8}"
    )
    for name, found in results["stages"].items():
        line = f"{name:12}{found['differences']['loss']:10.1e}{found['differences']['grad_norm']:10.1e}"
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
    for size, row in loss_memory(args.losses, args.vocabularies, device=args.device, threads=args.threads).items():
        results["loss_gib"][size] = results["loss_gib"].get(size, {}) | row
    write(args.output, results)
    print_table(results)


if __name__ == "__main__":
    main()

"""
Run the training scripts of a checkout of MiniMind and our recipes side by side, and compare the loss of each step.

    git clone https://github.com/jingyaogong/minimind ../minimind
    python -m benchmarks.upstream_parity --upstream ../minimind --output benchmarks/results/upstream-parity.json

Both train the same tiny weights on the same records in the same order, in float32 on the CPU with AdamW. A child
process runs each script as it is, and records the loss of each `backward`. Three settings of MiniMind have no flag, so
its child changes them: no weight decay, a cosine that starts at its first step as ours does, and the first weights of
LoRA, which ours takes, too.
"""

import argparse
import json
import math
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_pretrain.tokenizer.chat_template import add_marks
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.adapters import AdapterArguments, add_adapter
from hf_pretrain.weights.importing import load_native_checkpoint, load_upstream


ROOT = Path(__file__).resolve().parents[1]
WIDTH, BATCH_SIZE, LENGTH, RATE, SEED = 64, 4, 96, 1e-3, 42
SCRIPTS = {
    "pretrain": ("train_pretrain", "pretrain"),
    "pretrain-moe": ("train_pretrain", "pretrain"),
    "sft": ("train_full_sft", "sft"),
    "lora": ("train_lora", "sft"),
    "dpo": ("train_dpo", "dpo"),
    "distillation": ("train_distillation", "distill"),
}
# MiniMind also trains the newline after the stop token. With this change of its chat template, ours does, too.
NEWLINE = ("{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}", "{{- '<|im_end|>\\n' }}{%- endgeneration %}")


def record_losses(script: Path, arguments: list[str], output: Path, lora: str | None) -> None:
    """Run a script in this process, and write the loss of each call of `backward`."""
    losses: list[float] = []
    backward = torch.Tensor.backward

    def recording(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.item())
        backward(loss, *args, **kwargs)

    torch.Tensor.backward = recording  # type: ignore[method-assign]
    if script.parent.name == "trainer":
        _equalize(script.parent.parent, lora)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    output.write_text(json.dumps(losses))


def _equalize(upstream: Path, lora: str | None) -> None:
    """Change what MiniMind has no flag for, before its script imports it."""
    sys.path.insert(0, str(upstream))
    from model import model_lora  # type: ignore[import-not-found]
    from trainer import trainer_utils  # type: ignore[import-not-found]

    get_lr, apply_lora = trainer_utils.get_lr, model_lora.apply_lora
    trainer_utils.get_lr = lambda step, total, rate: get_lr(step - 1, total, rate)
    torch.optim.AdamW = partial(torch.optim.AdamW, weight_decay=0.0)  # type: ignore[misc]

    def apply(model: Any, **kwargs: Any) -> None:
        apply_lora(model, **kwargs)
        model_lora.load_lora(model, lora)

    model_lora.apply_lora = apply


def write_data(directory: Path, num_steps: int) -> None:
    """
    Write records for MiniMind, and for ours in the order in which MiniMind shuffles them. All chats have a system
    message and thoughts, without which MiniMind draws at random.
    """
    rng = random.Random(0)
    words = "天气 数学 a river of stars 因为 所以 the quick fox 北京 上海 seven ideas 模型 学习 and then".split()
    draw = lambda low, high: " ".join(rng.choices(words, k=rng.randint(low, high)))  # noqa: E731

    def chat(question: str) -> list[dict[str, str]]:
        answer = {"role": "assistant", "content": draw(5, 20), "reasoning_content": draw(3, 8)}
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}, answer]

    number = num_steps * BATCH_SIZE
    questions = [f"{draw(3, 10)} {index}" for index in range(number)]
    records: dict[str, list[Any]] = {
        "pretrain": [{"text": f"{question} {draw(5, 20)}"} for question in questions],
        "sft": [{"conversations": chat(question)} for question in questions],
        "dpo": [{"chosen": chat(question), "rejected": chat(question)} for question in questions],
    }
    torch.manual_seed(SEED)
    order = torch.randperm(number).tolist()
    for name, rows in records.items():
        for suffix, ordered in (("upstream", rows), ("ours", [rows[index] for index in order])):
            lines = [json.dumps(row, ensure_ascii=False) for row in ordered]
            (directory / f"{name}-{suffix}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_models(upstream: Path, directory: Path) -> None:
    """Write base, teacher and LoRA for both programs, and chat templates with and without the trained newline."""
    tokenizer = load_tokenizer(str(upstream / "model"))
    template = add_marks(tokenizer.chat_template)
    assert NEWLINE[0] in template, "MiniMind's chat template has changed."
    for labels, text in (("own", template), ("same", template.replace(*NEWLINE))):
        tokenizer.chat_template = text
        tokenizer.save_pretrained(directory / labels)
    sys.path.insert(0, str(upstream))
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM  # type: ignore[import-not-found]

    (upstream / "out").mkdir(exist_ok=True)
    for seed, (name, suffix) in enumerate((("base", ""), ("teacher", ""), ("base", "_moe"))):
        torch.manual_seed(seed)
        model = MiniMindForCausalLM(MiniMindConfig(hidden_size=WIDTH, num_hidden_layers=2, use_moe=bool(suffix)))
        file = upstream / f"out/{name}_{WIDTH}{suffix}.pth"
        torch.save(model.state_dict(), file)
        name += suffix
        config = {"num_experts_per_tok": 1} if suffix else None
        load_upstream(file, config=config).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    arguments = AdapterArguments(use_peft=True, lora_r=16, lora_alpha=16, lora_target_modules=["q_proj", "o_proj"])
    adapted = add_adapter(load_native_checkpoint(directory / "base", dtype=torch.float32), arguments)
    adapted.save_pretrained(directory / "adapter")
    tokenizer.save_pretrained(directory / "adapter")
    tensors = {}
    for name, tensor in adapted.state_dict().items():
        stem, found, letter = (
            name.removeprefix("base_model.model.").removesuffix(".default.weight").rpartition(".lora_")
        )
        if found:
            # B is zero at first, so the order of its rows does not matter.
            tensors[f"{stem}.lora.{letter}.weight"] = tensor
    torch.save(tensors, directory / "lora.pth")


def upstream_flags(stage: str, data: Path) -> list[str]:
    """Return the flags of MiniMind's script."""
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "from_weight": "base",
        "use_moe": int("moe" in stage),
    }
    if stage == "distillation":
        sizes = {"teacher_use_moe": 0, "from_student_weight": "base", "from_teacher_weight": "teacher"}
        sizes |= {f"{who}_hidden_size": WIDTH for who in ("student", "teacher")}
        sizes |= {f"{who}_num_layers": 2 for who in ("student", "teacher")}
    flags: dict[str, Any] = {
        "epochs": 1,
        "batch_size": BATCH_SIZE,
        "learning_rate": RATE,
        "device": "cpu",
        "dtype": "float32",
    }
    flags |= {"num_workers": 0, "accumulation_steps": 1, "grad_clip": 1.0, "max_seq_len": LENGTH, "data_path": data}
    return [word for name, value in (flags | sizes).items() for word in (f"--{name}", str(value))]


def our_flags(stage: str, data: Path, directory: Path, labels: str) -> list[str]:
    """Return the flags of our recipe, as docs/from-minimind.md lists them."""
    base = directory / {"lora": "adapter", "pretrain-moe": "base_moe"}.get(stage, "base")
    flags: dict[str, Any] = {
        "model_name_or_path": base,
        "dataset_name": data,
        "output_dir": directory / f"{stage}-{labels}",
    }
    flags |= {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    flags |= {"optim_preset": "adamw", "learning_rate": RATE, "adam_beta2": 0.999, "weight_decay": 0}
    flags |= {"warmup_steps": 0, "max_grad_norm": 1.0, "max_length": LENGTH, "validation_fraction": 0}
    flags |= {"train_sampling_strategy": "sequential", "use_cpu": "true", "bf16": "false", "report_to": "none"}
    flags |= {"eval_strategy": "no", "save_strategy": "no", "tokenizer_name_or_path": directory / labels}
    if stage != "dpo":
        flags["packing"] = "none"
    if stage == "dpo":
        flags |= {"beta": 0.15}
    if stage == "distillation":
        flags |= {"teacher_name_or_path": directory / "teacher", "temperature": 1.5, "ce_weight": 0.5}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def run(script: Path, arguments: list[str], directory: Path, name: str) -> list[float]:
    """Return the losses of a script, which a child process runs."""
    output = directory / f"{name}.json"
    command = [sys.executable, __file__, "--child", str(script), "--output", str(output)]
    command += ["--lora", str(directory / "lora.pth"), "--", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}")
    return [round(loss, 7) for loss in json.loads(output.read_text())]


def compare(upstream: Path, directory: Path, num_steps: int) -> dict[str, dict[str, Any]]:
    """Return the losses of both programs for each stage, and their largest difference."""
    write_data(directory, num_steps)
    write_models(upstream, directory)
    results: dict[str, dict[str, Any]] = {}
    for stage, (script, recipe) in SCRIPTS.items():
        kind = next((kind for kind in ("pretrain", "dpo") if stage.startswith(kind)), "sft")
        flags = upstream_flags(stage, directory / f"{kind}-upstream.jsonl")
        theirs = run(upstream / f"trainer/{script}.py", flags, directory, f"{stage}-theirs")
        for labels in ("own",) if kind == "pretrain" else ("same", "own"):
            data = directory / f"{kind}-ours.jsonl"
            ours = run(ROOT / f"recipes/{recipe}.py", our_flags(stage, data, directory, labels), directory, stage)
            assert len(ours) == len(theirs) == num_steps, (stage, len(ours), len(theirs))
            difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            name = f"{stage}, with MiniMind's labels" if labels == "same" else stage
            results[name] = {"minimind": theirs, "ours": ours, "largest_difference": difference}
            print(f"\n{name}: largest difference {difference:.2e}\nstep   MiniMind       ours", flush=True)
            for step in range(0, num_steps, math.ceil(num_steps / 10)):
                print(f"{step + 1:>4}{theirs[step]:>11.6f}{ours[step]:>11.6f}", flush=True)
    return results


def main(args: argparse.Namespace) -> None:
    if args.child:
        record_losses(args.child, args.arguments, args.output, args.lora)
        return
    with tempfile.TemporaryDirectory() as scratch:
        # MiniMind's scripts write into their checkout.
        upstream = Path(scratch, "minimind")
        for name in ("model", "dataset", "trainer"):
            shutil.copytree(args.upstream / name, upstream / name)
        results = compare(upstream, Path(scratch), args.steps)
    settings = {"hidden_size": WIDTH, "batch_size": BATCH_SIZE, "max_length": LENGTH, "learning_rate": RATE}
    if args.output:
        content = {"minimind": args.commit, "steps": args.steps, **settings, "stages": results}
        args.output.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, help="a checkout of MiniMind")
    parser.add_argument("--commit", help="its commit, for the results")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    for hidden in ("--child", "--lora"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    main(parser.parse_args())

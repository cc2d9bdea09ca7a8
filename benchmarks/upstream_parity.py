"""
Run the training scripts of a checkout of MiniMind and our recipes side by side, and compare the loss of each step.

    git clone https://github.com/jingyaogong/minimind ../minimind
    python -m benchmarks.upstream_parity --upstream ../minimind --output benchmarks/results/upstream-parity.json

Both train the same tiny weights on the same records in the same order, in float32 on the CPU with AdamW. A child
process runs each script as it is, and records the loss of each `backward` and the norm of each gradient that is
clipped. Three settings of MiniMind have no flag, so its child changes them: no weight decay, a cosine that starts at
its first step as ours does, and the first weights of LoRA, which ours takes, too.

GRPO samples its answers, so both children replace `generate`: it returns tokens that depend only on the prompt and on
their place in the group. MiniMind's rules reward them, without a reward model.
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
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationMixin

from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.tokenizer.chat_template import add_marks
from hf_pretrain.tokenizer.pretrained import load_tokenizer
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
    "grpo": ("train_grpo", "grpo"),
    "grpo-moe": ("train_grpo", "grpo"),
    "cispo": ("train_grpo", "grpo"),
}
# What to compare instead of only the loss. The policy term of GRPO is zero: only its gradient trains. The loss that
# matches MiniMind's CISPO has another value and the same gradient.
MEASURES = {stage: ["loss", "gradient norm"] for stage in ("grpo", "grpo-moe")} | {"cispo": ["gradient norm"]}
GROUP, ANSWER_LENGTH, BETA, ROUTER_COEFFICIENT = 4, 32, 0.1, 5e-4
# TRL divides advantages by the sample deviation, MiniMind by the population deviation.
DEVIATIONS = math.sqrt((GROUP - 1) / GROUP)
REWARDS = ["--rewards", "length", "thought_length", "closed_thought", "repetition"]
# Padding, the stop token and `</think>` in MiniMind's vocabulary.
PAD, STOP, END_OF_THOUGHT = 0, 2, 26
# MiniMind also trains the newline after the stop token. With this change of its chat template, ours does, too.
NEWLINE = ("{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}", "{{- '<|im_end|>\\n' }}{%- endgeneration %}")


def record_losses(script: Path, arguments: list[str], output: Path, lora: str | None) -> None:
    """Run a script in this process, and write the loss of each call of `backward` and the norm of each gradient."""
    recorded: dict[str, list[float]] = {"loss": [], "gradient norm": []}
    backward, clip = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_

    def recording(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        recorded["loss"].append(loss.item())
        backward(loss, *args, **kwargs)

    def clip_recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        norm = clip(*args, **kwargs)
        recorded["gradient norm"].append(norm.item())
        return norm

    torch.Tensor.backward = recording  # type: ignore[method-assign]
    torch.nn.utils.clip_grad_norm_ = clip_recording
    if script.stem == "grpo":
        GenerationMixin.generate = fixed_answers  # type: ignore[method-assign]
    if script.parent.name == "trainer":
        _equalize(script.parent.parent, lora)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    output.write_text(json.dumps(recorded))


def fixed_answers(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """
    Append answers that depend only on the prompt and on their place in its group, in place of `generate`. Some contain
    a thought, some repeat themselves, and long ones are cut before their stop token.
    """
    places: Counter[str] = Counter()
    answers = []
    for ids in input_ids.tolist():
        prompt = str([token for token in ids if token != PAD])
        rng = random.Random(f"{prompt} {places[prompt]}")
        places[prompt] += 1
        answer = rng.choices(range(300, rng.choice((304, 6000))), k=rng.randint(3, ANSWER_LENGTH + 8))
        if rng.random() < 0.5:
            answer[len(answer) // 2] = END_OF_THOUGHT
        answers.append([*answer, STOP, *[PAD] * ANSWER_LENGTH][:ANSWER_LENGTH])
    return torch.cat([input_ids, torch.tensor(answers)], dim=1)


def _equalize(upstream: Path, lora: str | None) -> None:
    """Change what MiniMind has no flag for, before its script imports it."""
    sys.path.insert(0, str(upstream))
    from model import model_lora, model_minimind  # type: ignore[import-not-found]
    from trainer import trainer_utils  # type: ignore[import-not-found]

    model_minimind.MiniMindForCausalLM.generate = fixed_answers
    reward_model = SimpleNamespace(get_score=lambda messages, answer: 0.0)
    trainer_utils.LMForRewardModel = lambda *args, **kwargs: reward_model

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
    tokens = ["<|endoftext|>", "<|im_end|>", "</think>"]
    assert tokenizer.convert_tokens_to_ids(tokens) == [PAD, STOP, END_OF_THOUGHT], "MiniMind's vocabulary has changed."
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


def is_grpo(stage: str) -> bool:
    return SCRIPTS[stage][1] == "grpo"


def as_words(flags: dict[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


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
    if is_grpo(stage):
        flags |= {"loss_type": stage.removesuffix("-moe"), "num_generations": GROUP, "max_gen_len": ANSWER_LENGTH}
        flags |= {"beta": BETA, "thinking_ratio": 1}
    return as_words(flags | sizes)


def our_flags(stage: str, data: Path, directory: Path, labels: str) -> list[str]:
    """Return the flags of our recipe, as docs/from-minimind.md lists them."""
    base = directory / {"lora": "adapter"}.get(stage, "base_moe" if "moe" in stage else "base")
    flags: dict[str, Any] = {
        "model_name_or_path": base,
        "dataset_name": data,
        "output_dir": directory / f"{stage}-{labels}",
    }
    flags |= {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    flags |= {"optim_preset": "adamw", "learning_rate": RATE, "adam_beta2": 0.999, "weight_decay": 0}
    flags |= {"warmup_steps": 0, "max_grad_norm": 1.0, "validation_fraction": 0}
    flags |= {"train_sampling_strategy": "sequential", "use_cpu": "true", "bf16": "false", "report_to": "none"}
    flags |= {"eval_strategy": "no", "save_strategy": "no", "tokenizer_name_or_path": directory / labels}
    if not is_grpo(stage):
        flags |= {"max_length": LENGTH} | ({"beta": 0.15} if stage == "dpo" else {"packing": "none"})
    if stage == "distillation":
        flags |= {"teacher_name_or_path": directory / "teacher", "temperature": 1.5, "ce_weight": 0.5}
    if is_grpo(stage):
        flags |= {"num_generations": GROUP, "per_device_train_batch_size": BATCH_SIZE * GROUP, "beta": BETA}
        flags |= {"max_completion_length": ANSWER_LENGTH, "thinking_ratio": 1, "shuffle_dataset": "false"}
        flags |= {"loss_type": "cispo", "epsilon_high": 5} if stage == "cispo" else {"loss_type": "grpo"}
        if labels == "same":
            flags |= {"loss_type": "grpo", "use_bias_correction_kl": "false"}
            # The advantages are smaller by this factor. With all other terms scaled by it, too, the whole loss is.
            flags |= {"beta": BETA * DEVIATIONS, "max_grad_norm": DEVIATIONS}
            if "moe" in stage:
                flags["router_aux_loss_coef"] = ROUTER_COEFFICIENT * DEVIATIONS
        return [*REWARDS, *as_words(flags)]
    return as_words(flags)


def run(script: Path, arguments: list[str], directory: Path, name: str) -> dict[str, list[float]]:
    """Return the losses and gradient norms of a script, which a child process runs."""
    output = directory / f"{name}.json"
    command = [sys.executable, __file__, "--child", str(script), "--output", str(output)]
    command += ["--lora", str(directory / "lora.pth"), "--", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}")
    return json.loads(output.read_text())


def compare(upstream: Path, directory: Path, num_steps: int, stages: list[str]) -> dict[str, dict[str, Any]]:
    """Return the curves of both programs for each stage, and their largest difference."""
    write_data(directory, num_steps)
    write_models(upstream, directory)
    results: dict[str, dict[str, Any]] = {}
    for stage in stages:
        script, recipe = SCRIPTS[stage]
        kind = next((kind for kind in ("pretrain", "dpo") if stage.startswith(kind)), "sft")
        flags = upstream_flags(stage, directory / f"{kind}-upstream.jsonl")
        theirs = run(upstream / f"trainer/{script}.py", flags, directory, f"{stage}-theirs")
        for labels in ("own",) if kind == "pretrain" else ("same", "own"):
            data = directory / f"{kind}-ours.jsonl"
            ours = run(ROOT / f"recipes/{recipe}.py", our_flags(stage, data, directory, labels), directory, stage)
            matched = f", with MiniMind's {'loss' if is_grpo(stage) else 'labels'}" if labels == "same" else ""
            scale = DEVIATIONS if is_grpo(stage) and matched else 1.0
            for measure in MEASURES.get(stage, ["loss"]):
                name = f"{stage}{matched}" + (f", {measure}" if measure != "loss" else "")
                ours[measure] = [value / scale for value in ours[measure]]
                results[name] = report(name, theirs[measure], ours[measure], num_steps)
    return results


def report(name: str, theirs: list[float], ours: list[float], num_steps: int) -> dict[str, Any]:
    """Print two curves and return them, with their largest difference."""
    assert len(ours) == len(theirs) == num_steps, (name, len(ours), len(theirs))
    theirs, ours = ([round(value, 7) for value in curve] for curve in (theirs, ours))
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"\n{name}: largest difference {difference:.2e}\nstep   MiniMind       ours", flush=True)
    for step in range(0, num_steps, math.ceil(num_steps / 10)):
        print(f"{step + 1:>4}{theirs[step]:>11.6f}{ours[step]:>11.6f}", flush=True)
    return {"minimind": theirs, "ours": ours, "largest_difference": difference}


def main(args: argparse.Namespace) -> None:
    if args.child:
        record_losses(args.child, args.arguments, args.output, args.lora)
        return
    with tempfile.TemporaryDirectory() as scratch:
        # MiniMind's scripts write into their checkout.
        upstream = Path(scratch, "minimind")
        for name in ("model", "dataset", "trainer"):
            shutil.copytree(args.upstream / name, upstream / name)
        results = compare(upstream, Path(scratch), args.steps, args.stages)
    settings = {"hidden_size": WIDTH, "batch_size": BATCH_SIZE, "max_length": LENGTH, "learning_rate": RATE}
    if args.output:
        kept = json.loads(args.output.read_text())["stages"] if args.output.exists() else {}
        content = {"minimind": args.commit, "steps": args.steps, **settings, "stages": kept | results}
        args.output.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, help="a checkout of MiniMind")
    parser.add_argument("--commit", help="its commit, for the results")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stages", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="stages to compare")
    parser.add_argument("--output", type=Path, help="JSON file for the results; it keeps those of other stages")
    for hidden in ("--child", "--lora"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    main(parser.parse_args())

"""Mistakes on command lines: numbers out of bounds, flags of MiniMind without a meaning, and unused GPUs."""

from functools import cache

from hf_pretrain.runtime import devices
from hf_pretrain.runtime.minimind_flags import translate_minimind
from hf_pretrain.runtime.named import load_named
from hf_pretrain.runtime.parser import recipe_parser
from hf_pretrain.training.training_arguments import LMTrainingArguments
from hf_pretrain.weights import localizing
from tests.invariants.launching import ROOT
from tests.mistakes import Mistake


# Words without which a recipe does not parse its numbers.
NEEDED = {"data": ["inspect", "a.jsonl"], "generate": ["--input", "a.jsonl", "--output", "b.jsonl"]}
NEEDED |= {"convert": ["--from", "a", "--to", "b"], "compare": ["a"]}
parser_of = cache(lambda recipe: recipe_parser(ROOT / f"recipes/{recipe}.py"))


def number(recipe, flag, value, words):
    parse = lambda: parser_of(recipe).parse_args([*NEEDED.get(recipe, []), f"--{flag}={value}"])  # noqa: E731
    return Mistake(rf"^--{flag} {value} must be {words}\. Give another value, or leave the flag out", parse)


def minimind(says, stage, line):
    return Mistake(says, lambda: translate_minimind(line.split(), stage))


def train_on_an_unused_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "find_unused_gpu", lambda: "torch cannot use it.")
    LMTrainingArguments(output_dir=str(tmp_path))


def answer_without_the_file_of_a_lora(talker, tmp_path, monkeypatch):
    monkeypatch.setattr(localizing, "COPIES", tmp_path / "copies")
    (tmp_path / "sft").symlink_to(talker)
    translate_minimind(["--save_dir", str(tmp_path), "--weight", "full_sft", "--lora_weight", "lora_x"], "serve")


def name_several_files(tmp_path):
    for size in (512, 768):
        (tmp_path / f"full_sft_{size}.pth").touch()
    translate_minimind(["--save_dir", str(tmp_path), "--from_weight", "full_sft"], "dpo")


MISTAKES = [
    number("from_scratch", "minutes", "-1.0", "above 0"),
    number("generate", "batch_size", "-1", "at least 1"),
    number("chat", "temperature", "-0.5", "at least 0"),
    number("chat", "top_p", "0.0", "above 0 and at most 1"),
    number("pretrain", "adam_beta1", "1.0", "at least 0 and below 1"),
    number("pretrain", "seed", "4294967296", "at least 0 and at most 4294967295"),
    number("pretrain", "dataset_weights", "-1.0", "above 0"),
    number("dpo", "label_smoothing", "5.0", "at least 0 and at most 0.5"),
    number("data", "max_length", "7", "at least 8"),
    # MiniMind
    minimind("--device cuda:1 means nothing here: CUDA_VISIBLE_DEVICES", "pretrain", "--device cuda:1"),
    minimind("--vf_coef means nothing here: there is no PPO", "pretrain", "--vf_coef 0.5"),
    minimind("--max_seq_len means nothing here: TRL takes prompts whole", "grpo", "--max_seq_len 512"),
    minimind("sglang means nothing here: TRL's engine is vLLM", "grpo", "--rollout_engine sglang"),
    minimind("--max_total_len means nothing here: it limits rollouts with --tools", "grpo", "--max_total_len 9"),
    Mistake("/lora_x.pth: no such file or directory", answer_without_the_file_of_a_lora),
    Mistake("Several files have the name full_sft: .*_512.pth, .*_768.pth. Pass one with --model", name_several_files),
    # The machine and the code
    Mistake("torch cannot use it. To use the CPU, pass --use_cpu", train_on_an_unused_gpu),
    Mistake("load_nothing", lambda: load_named("hf_pretrain.runtime.named:load_nothing"), AttributeError),
]

"""Every YAML file, two steps of every recipe, every launcher, and the targets of the Makefile."""

import json
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser as torchrun_parser
from transformers import HfArgumentParser

from hf_pretrain import PRESETS, MiniMindForCausalLM
from hf_pretrain.data.chat_arguments import ChatArguments
from hf_pretrain.data.data_arguments import DataArguments, SourceArguments
from hf_pretrain.runtime.parser import recipe_parser
from hf_pretrain.stages.distillation import DistillationArguments
from hf_pretrain.stages.dpo import DPOTrainingArguments
from hf_pretrain.stages.eval_tasks import EvalTaskArguments
from hf_pretrain.stages.reinforcement import GRPOTrainingArguments, TaskArguments
from hf_pretrain.stages.reward_training import RewardTrainingArguments
from hf_pretrain.stages.rewards import load_reward_functions
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.parsing import parse_args, read_config
from hf_pretrain.training.training_arguments import (
    DistillationTrainingArguments,
    LMTrainingArguments,
    SFTTrainingArguments,
    complete_learning_rate,
)
from hf_pretrain.weights.adapters import AdapterArguments
from hf_pretrain.weights.models import ModelArguments
from tests.invariants.launching import ROOT, free_port, launcher_command, start
from tests.toys import EXPERTS, toy_model, write_jsonl


RECIPE = str(ROOT / "recipes/pretrain.py")
STAGES = {
    "pretrain": (ModelArguments, AdapterArguments, DataArguments, EvalTaskArguments, LMTrainingArguments),
    "sft": (ModelArguments, AdapterArguments, ChatArguments, EvalTaskArguments, SFTTrainingArguments),
    "dpo": (ModelArguments, AdapterArguments, SourceArguments, DPOTrainingArguments),
    "reward": (ModelArguments, SourceArguments, RewardTrainingArguments),
    "distill": (ModelArguments, AdapterArguments, DistillationArguments, ChatArguments, DistillationTrainingArguments),
    "grpo": (ModelArguments, AdapterArguments, TaskArguments, GRPOTrainingArguments),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """Return a directory with toy checkpoints, a few sentences, conversations and preferences."""
    path = tmp_path_factory.mktemp("recipes")
    generator = random.Random(0)
    words = ["river", "stone", "green", "light", "walks", "under", "seven", "quiet"]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 12))) for _ in range(40)]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    for name, fields in (("toy", {}), ("toy-moe", EXPERTS), ("toy-long", {"max_position_embeddings": 512})):
        toy_model(vocab_size=320, **fields).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    write_jsonl(path / "train.jsonl", texts)
    write_jsonl(path / "chats.jsonl", [{"prompt": f"{text}?", "completion": text} for text in texts])
    write_jsonl(path / "pairs.jsonl", [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)])
    return path


def toy_arguments(workspace: Path, output_dir: str) -> list[str]:
    return [
        *("--model_name_or_path", str(workspace / "toy"), "--dataset_name", str(workspace / "train.jsonl")),
        *("--max_length", "32", "--validation_fraction", "0.1", "--max_steps", "2", "--logging_steps", "1"),
        *("--save_strategy", "no", "--bf16", "false", "--output_dir", str(workspace / output_dir)),
    ]


def log_history(output_dir: Path) -> list[dict]:
    return json.loads((output_dir / "trainer_state.json").read_text())["log_history"]


# YAML files


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_yaml_parses(stage, preset, tmp_path):
    path = ROOT / f"recipes/{preset}/{stage}.yaml"
    argv = ["--config", str(path), "--output_dir", str(tmp_path), "--bf16", "false"]
    content = read_config(path)
    if stage == "distill" and "teacher_name_or_path" not in content:  # no preset is larger
        argv += ["--teacher_name_or_path", "out/mine"]
    model, *_, training = parse_args(*STAGES[stage], stage=stage, argv=argv)
    if stage == "pretrain":
        assert model.model_preset == preset
        complete_learning_rate(training, PRESETS[preset]["hidden_size"])
        # Muon's rate falls with the width: 192, 512, 640, then 768, 1280 and 2048. minimind-large has MiniMind's own.
        rates = {"tiny": 8e-3, "minimind2-small": 3e-3, "minimind2-moe": 2.4e-3, "minimind-large": 2e-4}
        rates |= {"0.5B": 1.2e-3, "1B": 7.5e-4}
        assert training.learning_rate == pytest.approx(rates.get(preset, 2e-3), rel=1e-3)
        return
    # The tiny student starts from random weights and is smaller than its teacher.
    base = (
        None if (stage, preset) == ("distill", "tiny") else f"out/{'pretrain' if stage == 'sft' else 'sft'}-{preset}"
    )
    assert model.model_name_or_path == base
    assert training.learning_rate == float(content["learning_rate"])
    if stage == "grpo":
        load_reward_functions([content["rewards"]] if isinstance(content["rewards"], str) else content["rewards"])
    # Shared flags mean the same in all recipes.
    assert not training.gradient_checkpointing and training.save_total_limit == 2


@pytest.mark.parametrize("recipe", ["convert", "from_scratch", "serve"])
def test_every_flag_of_a_recipe_without_a_trainer_is_read(recipe):
    path = ROOT / f"recipes/{recipe}.py"
    text = path.read_text(encoding="utf-8")
    for action in runpy.run_path(str(path))["make_parser"]()._actions:
        assert f"args.{action.dest}" in text or action.dest.startswith("help"), action.dest


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_help_and_a_directory_of_its_own(stage):
    # A percent sign in one help text would break the whole output.
    assert "--learning_rate" in HfArgumentParser(STAGES[stage]).format_help()
    # No preset applies to a model from elsewhere, so the classes give the defaults.
    argv = ["--model_name_or_path", "owner/model", "--use_cpu", "--bf16", "false"]
    argv += ["--teacher_name_or_path", "owner/teacher"] if stage == "distill" else []
    assert parse_args(*STAGES[stage], stage=stage, argv=argv)[-1].output_dir == f"out/{stage}"


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_configs_leave_everything_to_the_trainer(path):
    config = json.loads(path.read_text())
    assert not config.keys() & {"optimizer", "scheduler"}
    names = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    assert {config[name] for name in names} == {"auto"}
    assert config["bf16"]["enabled"] == config["fp16"]["enabled"] == "auto"
    assert config["zero_optimization"]["stage"] == int(path.stem[4])


@pytest.mark.parametrize("name", ["slurm.sbatch", "skypilot.yaml", "trainjob.yaml"])
def test_the_files_for_clusters_start_torchrun_with_flags_of_the_recipe(name):
    text = (ROOT / "recipes/clusters" / name).read_text(encoding="utf-8")
    if name == "trainjob.yaml":
        trainer = yaml.safe_load(text)["spec"]["trainer"]
        words = trainer["command"] + trainer["args"]
    else:
        script = yaml.safe_load(text)["run"] if name == "skypilot.yaml" else text
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        (line,) = (
            line for line in script.replace("\\\n", " ").splitlines() if "torchrun " in line and "#" not in line
        )
        # The script's own variables stand for words; `$@` and `&` end the command.
        words = shlex.split(line[line.index("torchrun ") :].split(' "$@"')[0])
    recipe = next(position for position, word in enumerate(words) if word.endswith("recipes/pretrain.py"))
    options = [re.sub(r"\$.*", "2", word) for word in words[1:recipe]]
    torchrun_parser().parse_args([*options, RECIPE])
    flags = [word.replace("/workspace/", f"{ROOT}/") for word in words[recipe + 1 :]]
    _, unknown = recipe_parser(Path(RECIPE)).parse_known_args(flags)
    assert not unknown and any("recipes/minimind2/pretrain.yaml" in flag for flag in flags)


# Runs

# The lines that a redirected run prints before its report.
PROGRESS = (
    r"\d process\(es\) on CPU, float32.*",
    r"[a-z].* \.\.\.",
    r"(Training|Validation): \d+ documents, [\d,]+ tokens in \d+ sequences, [\d.]+% filled, 0 tokens cut at .* 32",
    r"step [12]/2: loss \d\.\d{4}, [\d,]+ tokens/s",
    r"step [12]/2: validation loss \d\.\d{4}, bits per byte \d\.\d{4}",
    r"step [12]/2: '.*' -> '.*'",
    "",
)


def check_lines(output: str, *own: str) -> None:
    """Check that a run prints no progress bars, no terminal codes, and no messages of other libraries."""
    assert not set("\r\x1b") & set(output), output
    for line in re.split("^(?:Checkpoint|Model) ", output, flags=re.MULTILINE)[0].splitlines():
        assert any(re.fullmatch(pattern, line) for pattern in (*PROGRESS, *own)), (line, output)


def test_mistakes_leave_a_directory_as_it_was_and_the_recipe_trains_saves_and_reports(workspace):
    command = [*launcher_command("python"), RECIPE, *toy_arguments(workspace, "plain"), "--report_to", "none"]
    for mistake, message in (
        (["--dataset_name", "nope.jsonl"], "There is no file or directory nope.jsonl"),
        (["--validation_fraction", "2"], "validation_fraction=2.0 must be"),
        (["--text_column", "nope"], "no column 'nope'"),
    ):
        failed = start([*command, *mistake])
        assert failed.returncode == 2 and message in failed.stdout, failed.stdout
    result, run = start(command), workspace / "plain"
    output = result.stdout
    assert result.returncode == 0, output
    check_lines(output)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (run / name).is_file(), name
    (*_, final) = [entry for entry in log_history(run) if "eval_loss" in entry]
    for words in (
        "1 process(es) on CPU, float32; 8 rows per step; torch ",
        f"Validation loss    {final['eval_loss']:.4f}",
        f"Bits per byte      {final['eval_bits_per_byte']:.4f}",
        f"hf-pretrain sft --model_name_or_path {run} --output_dir {run}-sft",
    ):
        assert words in output
    assert output.count("Sample ") == 3
    *_, entry = json.loads((run / "run.json").read_text())
    assert entry["recipe"] == "pretrain" and entry["steps"] == 2 and "--max_steps 2" in entry["command"]
    assert entry["data"]["names"] == [str(workspace / "train.jsonl")] and entry["data"]["counts"]
    # The run continues a model of width 32, from which the rate of Muon follows.
    assert entry["arguments"]["learning_rate"] == pytest.approx(8e-3 * 192 / 32)
    assert f"Optimizer          muon, learning rate {8e-3 * 192 / 32:g}" in output
    assert entry["metrics"]["eval_loss"] == final["eval_loss"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert f"{final['eval_loss']:.4f} nats per token" in page and "bad lines" not in page
    again = start(command)
    assert again.returncode == 2 and "is not empty" in again.stdout


# The flags of each stage beside those of `toy_arguments`, and the lines that only this stage prints.
FLAGS_AND_LINES = {
    "pretrain": ("--streaming true", [r"(Training|Validation): .*"]),
    "sft": ("--dataset_name chats.jsonl", [r"(Training|Validation): .* tokens count in the loss.*"]),
    "distill": ("--teacher_name_or_path toy --dataset_kind text", []),
    "dpo": (
        "--dataset_name pairs.jsonl",
        [r"(Training|Validation): \d+ pairs, .*", r"step \d/2: loss \d\.\d{4}, [\d,]+ tokens/s"],
    ),
    "reward": (
        "--dataset_name pairs.jsonl --save_strategy steps --save_steps 1",
        [r"(Training|Validation): \d+ pairs, .*", r"step \d/2: loss \d\.\d{4}, [\d,]+ tokens/s"],
    ),
    "grpo": (
        "--dataset_name embedded:answer-format --model_name_or_path toy-long --num_generations 2 "
        "--max_completion_length 8 --per_device_train_batch_size 4 --eval_steps 2",
        [r"step \d/2: loss -?\d\.\d{4}, reward \d\.\d{4}, [\d,]+ tokens/s", r"step \d/2: mean reward \d\.\d{4}"],
    ),
    "evaluate": ("", []),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", FLAGS_AND_LINES)
def test_a_redirected_stage_prints_only_its_own_lines(workspace, stage):
    words, own = FLAGS_AND_LINES[stage]
    flags = toy_arguments(workspace, f"lines-{stage}")
    if stage == "grpo":
        # Its answers have a length, and its prompts have none.
        position = flags.index("--max_length")
        del flags[position : position + 2]
    command = [*launcher_command("python"), str(ROOT / f"recipes/{stage}.py"), *flags, *words.split()]
    result = start([*command, "--report_to", "none"], cwd=workspace)
    assert result.returncode == 0, result.stdout
    check_lines(result.stdout, r"step \d/2: validation loss \d.*", r"step \d/2: .* -> .*", *own)


@pytest.mark.parametrize("options", [[], ["--use_peft"]], ids=["plain", "adapter"])
def test_sft_reports_the_change_of_the_loss(workspace, options):
    output_dir = workspace / f"sft{''.join(options)}"
    arguments = [
        *("--model_name_or_path", str(workspace / "toy"), "--dataset_name", str(workspace / "chats.jsonl")),
        *("--max_length", "64", "--validation_fraction", "0.2", "--max_steps", "3", "--bf16", "false"),
        *("--learning_rate", "1e-2", "--output_dir", str(output_dir), "--use_cpu", *options),
    ]
    result = start([sys.executable, str(ROOT / "recipes/sft.py"), *arguments])
    assert result.returncode == 0, result.stdout[-3000:]
    losses = [entry["eval_loss"] for entry in log_history(output_dir) if "eval_loss" in entry]
    report = re.search(r"Validation loss +([\d.]+) nats per token \(([\d.]+) before\)", result.stdout)
    assert [float(number) for number in report.groups()] == [round(losses[-1], 4), round(losses[0], 4)]
    assert losses[-1] < losses[0] and "Talk to it" in result.stdout
    assert (output_dir / "adapter_model.safetensors").is_file() == (options == ["--use_peft"])
    flags = [*arguments[2:8], *("--model_name_or_path", str(output_dir), "--dataset_kind", "auto", "--use_cpu")]
    assert start([sys.executable, str(ROOT / "recipes/evaluate.py"), *flags, "--bf16", "false"]).returncode == 0
    last = [entry for entry in log_history(output_dir) if "eval_repeated_4grams" in entry][-1]
    found = json.loads((output_dir / "evaluation.json").read_text())["held_out"]
    assert found == pytest.approx({key: last[key] for key in found}) and len(found) == 7


def test_sft_previews_the_trained_tokens(workspace):
    command = [sys.executable, str(ROOT / "recipes/sft.py"), "--model_name_or_path", str(workspace / "toy")]
    chats = workspace / "chats.jsonl"
    result = start([*command, "--dataset_name", str(chats), "--preview", "2", "--output_dir", str(workspace / "none")])
    assert result.returncode == 0, result.stdout[-3000:]
    assert result.stdout.count("--- a row of") == 2 and not (workspace / "none").exists()
    coloured = re.findall("\033\\[32m(.*?)\033\\[0m", result.stdout, flags=re.DOTALL)
    completions = [json.loads(line)["completion"] + "<|im_end|>" for line in chats.read_text().splitlines()]
    assert coloured and set(coloured) <= set(completions)


# The Makefile and its launchers


def test_make_prints_help_and_refuses_an_unknown_device():
    # Under `make test`, a make within a make would also print the directories that it enters.
    words = ["make", "--no-print-directory"]
    output = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.startswith("make pretrain   ") and "\nmake clean   " in output and "PYTHON" not in output
    result = subprocess.run([*words, "-n", "pretrain", "DEVICE=gpu"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0 and "use cuda, cpu or auto" in result.stderr


def test_make_clean_leaves_models_and_other_environments(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    mine = ["out/sft-tiny/model.safetensors", "gpu-check.json", "env/bin/python", "recipes/my/pretrain.yaml"]
    built = ["build/lib/a.o", "dist/a.whl", "a.egg-info/PKG-INFO", ".pytest_cache/a", "tests/__pycache__/a.pyc"]
    for name in [*mine, *built, "hf_pretrain/a.py", "benchmarks/a.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "clean", "VENV=env"], cwd=tmp_path, check=True)
    assert all((tmp_path / name).is_file() for name in [*mine, "hf_pretrain/a.py"])
    assert not any((tmp_path / name).exists() for name in built)


# The default rate of so narrow a model would turn the differences of Muon into large ones.
RATE = ["--learning_rate", "3e-3"]


def make(workspace: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    # make uses an installed environment as it is.
    (Path(sys.prefix) / ".installed").touch()
    arguments = " ".join([*toy_arguments(workspace, name), *RATE, "--per_device_train_batch_size 2 --report_to none"])
    words = ("make", "pretrain", f"VENV={sys.prefix}", "GPUS=2", "DEVICE=cpu", *words, f"ARGS={arguments}")
    return start(list(words), TORCHDYNAMO_DISABLE="")


@pytest.fixture(scope="module")
def one_process(workspace) -> list[float]:
    """Return the losses of the run of [`make`] in one process."""
    words = [*toy_arguments(workspace, "alone"), *RATE, "--per_device_train_batch_size", "4", "--use_cpu"]
    result = start([sys.executable, RECIPE, "--config", str(ROOT / "recipes/tiny/pretrain.yaml"), *words])
    assert result.returncode == 0, result.stdout[-3000:]
    return losses(workspace / "alone")


def losses(output_dir: Path) -> list[float]:
    return [entry.get("loss", entry.get("eval_loss")) for entry in log_history(output_dir)[:-1]]


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate ACCELERATE=ddp", "accelerate"])
def test_make_runs_two_processes(workspace, one_process, launcher):
    """The losses are those of one process, and torchrun, deepspeed and accelerate alone add no lines."""
    name = re.sub(r"\W", "-", launcher)
    words = [] if launcher == "torchrun" else [f"MASTER_PORT={free_port()}"]
    # accelerate launches DeepSpeed, too.
    words += ["ACCELERATE=zero3"] if launcher == "accelerate" else []
    result = make(workspace, name, *words, *f"LAUNCHER={launcher}".split())
    assert result.returncode == 0, result.stdout[-3000:]
    assert "2 process(es) on CPU" in result.stdout
    if launcher != "accelerate":
        started = (r"\$ .*", r"\S*python hf_pretrain_cli.py .*", r"make.*: (Entering|Leaving) directory.*")
        check_lines(result.stdout, *started, r"DeepSpeed \S+ built successfully")
    assert losses(workspace / name) == pytest.approx(one_process, abs=2e-4)


# Launches of a model with experts, and the optimizer of each.
LAYOUTS = {
    "fsdp-ep": (["--fsdp_size", "2", "--ep_size", "2"], "muon"),
    "zero2": (["--deepspeed", "ds_configs/zero2.json", "--optim_preset", "adamw"], "adamw_torch_fused"),
    "zero3_offload": (["--deepspeed", "ds_configs/zero3_offload.json"], "muon"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_sharded_run_equals_an_uninterrupted_one(layout, workspace):
    flags, optimizer = LAYOUTS[layout]
    whole, resumed = (workspace / f"{layout}-{name}" for name in ("whole", "resumed"))
    for output_dir in (whole, resumed):
        arguments = toy_arguments(workspace, output_dir.name)
        arguments[arguments.index("--save_strategy") + 1] = "steps"
        arguments[arguments.index(str(workspace / "toy"))] = str(workspace / "toy-moe")
        arguments += ["--save_steps", "1", "--lr_scheduler_type", "constant", "--max_steps", "3", *flags]
        command = [*launcher_command("torchrun"), RECIPE, *arguments, "--resume_from_checkpoint", "auto"]
        result = start(command)
        assert result.returncode == 0, result.stdout[-3000:]
        assert re.search(rf"^Optimizer +{optimizer}, learning rate", result.stdout, re.MULTILINE)
        if output_dir == whole:
            resumed.mkdir()
            shutil.move(whole / "checkpoint-2", resumed)
    assert "Resuming from" in result.stdout and "step 2/3" not in result.stdout
    assert len(losses(whole)) > 3 and losses(whole) == losses(resumed)
    first, second = (load_file(path / "model.safetensors") for path in (whole, resumed))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    # Every layout writes the same files as one process.
    assert MiniMindForCausalLM.from_pretrained(resumed).config.num_experts == 4

"""Two steps of every recipe, every launcher, the files for clusters, and the targets of the Makefile."""

import json
import os
import re
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

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.checkpoints.manifest import find_damage
from hf_pretrain.runtime.parser import recipe_parser
from tests.invariants.launching import ROOT, free_port, launcher_command, make_output, start
from tests.matrix import CHATS, call, launch_of
from tests.toys import write_jsonl


RECIPE = str(ROOT / "recipes/pretrain.py")


def toy_arguments(workspace: Path, output_dir: str, model: str = "dense") -> list[str]:
    return [
        *("--model_name_or_path", str(workspace / model), "--dataset_name", str(workspace / "train.jsonl")),
        *("--max_length", "32", "--validation_fraction", "0.1", "--max_steps", "2", "--logging_steps", "1"),
        *("--save_strategy", "no", "--bf16", "false", "--output_dir", str(workspace / output_dir)),
    ]


def log_history(output_dir: Path) -> list[dict]:
    return json.loads((output_dir / "trainer_state.json").read_text())["log_history"]


# Arguments


@pytest.mark.parametrize("recipe", ["convert", "from_scratch", "serve"])
def test_every_flag_of_a_recipe_without_a_trainer_is_read(recipe):
    path = ROOT / f"recipes/{recipe}.py"
    text = path.read_text(encoding="utf-8")
    for name in recipe_parser(path).flags:
        assert f"args.{name}" in text, name


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
        # The script's own variables stand for words; `$@` and `&` end the command.
        (line,) = re.findall(r'^[^#\n]*\b(torchrun .*?)(?: "\$@".*)?$', script.replace("\\\n", " "), re.MULTILINE)
        words = shlex.split(line)
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
    r"step \d+/\d+: loss \d\.\d{4}, [\d,]+ tokens/s",
    r"step \d/\d: validation loss \d\.\d{4}, bits per byte \d\.\d{4}.*",
    r"step \d/\d: '.*' -> '.*'",
    "",
)
# The lines that only the stage of a run prints.
CHAT_LINES = [r"(Training|Validation): .* tokens count in the loss.*", r"[\d.]+% of \d\d conversations .*"]
PAIR_LINES = [r"(Training|Validation): \d+ pairs, .*", r"step \d+/\d+: validation loss \d.*", r"step \d/\d: .* -> .*"]
LINES = {
    "pretrain-muon": [],
    "pretrain-stream": [r"(Training|Validation): .*"],
    "sft": CHAT_LINES,
    "distill": CHAT_LINES,
    "dpo": PAIR_LINES,
    "judge": PAIR_LINES,
    "grpo": [
        r"step \d/\d: loss -?\d\.\d{4}, reward -?\d\.\d{4}, [\d,]+ tokens/s",
        r"step \d/\d: mean reward -?\d\.\d{4}",
    ],
}


def check_lines(output: str, *own: str) -> None:
    """Check that a run prints no progress bars, no terminal codes, and no messages of other libraries."""
    assert not set("\r\x1b") & set(output), output
    for line in re.split("^(?:Checkpoint|Model) ", output, flags=re.MULTILINE)[0].splitlines():
        assert any(re.fullmatch(pattern, line) for pattern in (*PROGRESS, *own)), (line, output)


@pytest.mark.parametrize("name", LINES)
def test_a_redirected_stage_prints_only_its_own_lines(trained, name):
    check_lines(trained(name).output, *LINES[name])


@pytest.mark.parametrize("name", LINES)
def test_a_run_leaves_intact_checkpoints_a_record_and_a_page(trained, name):
    run = trained(name)
    checkpoints = list(run.directory.glob("checkpoint-*"))
    assert len(checkpoints) == 2 and not any(map(find_damage, checkpoints))
    # Trainer's own file holds the token.
    assert not [*run.directory.rglob("training_args.bin"), *run.directory.glob(".saving*")]
    (entry,) = json.loads(run.text("run.json"))
    assert entry["recipe"] == launch_of(name)[0] and entry["ended"] and entry["steps"] == run.log[-1]["step"]
    assert "</html>" in run.text("report.html")


def test_pretraining_saves_reports_and_records(trained):
    run = trained("pretrain-muon")
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= {
        *os.listdir(run.directory)
    }
    (*_, final) = [entry for entry in run.log if "eval_loss" in entry]
    for words in (
        "1 process(es) on CPU, float32; 8 rows per step; torch ",
        f"Validation loss    {final['eval_loss']:.4f}",
        f"Bits per byte      {final['eval_bits_per_byte']:.4f}",
        "hf-pretrain sft --model_name_or_path pretrain-muon --output_dir sft-muon",
    ):
        assert words in run.output
    assert run.output.count("Sample ") == 3
    (entry,) = json.loads(run.text("run.json"))
    assert entry["recipe"] == "pretrain" and entry["steps"] == 4 and "--max_steps 4" in entry["command"]
    assert entry["data"]["names"] == ["train.jsonl"] and entry["data"]["counts"]
    # The run continues a model of width 32, from which the rate of Muon follows.
    assert entry["arguments"]["learning_rate"] == pytest.approx(8e-3 * 192 / 32)
    assert f"Optimizer          muon, learning rate {8e-3 * 192 / 32:g}" in run.output
    assert entry["metrics"]["eval_loss"] == final["eval_loss"]
    page = run.text("report.html")
    assert f'{final["eval_loss"]:.4f} <span lang="en">nats per token' in page and "bad lines" not in page


@pytest.mark.parametrize("name", ["sft", "sft-lora"])
def test_sft_reports_the_change_of_the_loss_that_an_evaluation_finds(trained, toys, name):
    run = trained(name)
    losses = run.series("eval_loss")
    report = re.search(r"Validation loss +([\d.]+) nats per token \(([\d.]+) before\)", run.output)
    assert [float(number) for number in report.groups()] == [round(losses[-1], 4), round(losses[0], 4)]
    assert losses[-1] < losses[0] and "Talk to it" in run.output
    assert (run.directory / "adapter_model.safetensors").is_file() == (name == "sft-lora")
    # The evaluation takes the kind of data from the record of the run.
    flags = f"{CHATS} --model_name_or_path {name} --validation_fraction 0.2 --bf16 false --use_cpu"
    evaluation = call(toys, "python", "evaluate", flags)
    check_lines(evaluation.partition("Data ")[0], *CHAT_LINES)
    assert "Data      conversations of " in evaluation
    last = [entry for entry in run.log if "eval_repeated_4grams" in entry][-1]
    found = json.loads(run.text("evaluation.json"))["held_out"]
    assert found == pytest.approx({key: last[key] for key in found}) and len(found) == 7


def test_sft_previews_the_trained_tokens(toys):
    output = call(toys, "python", "sft", f"{CHATS} --preview 2 --output_dir none")
    assert output.count("--- a row of") == 2 and not (toys / "none").exists()
    coloured = re.findall("\033\\[32m(.*?)\033\\[0m", output, flags=re.DOTALL)
    completions = [json.loads(line)["completion"] + "<|im_end|>" for line in (toys / "chats.jsonl").open()]
    assert coloured and set(coloured) <= set(completions)


@pytest.mark.parametrize(
    ("stage", "data", "length", "row"),
    [
        (
            "dpo",
            "pairs.jsonl",
            "max_length",
            r"prompt_ids: <\|im_start\|>user\n\d+\?.*\nchosen_ids: yes.*\nrejected_ids: no",
        ),
        # A task keeps all columns of a stranger's file.
        (
            "grpo",
            "tasks.jsonl",
            "max_completion_length",
            r"prompt: \[\{.*'content': '1\+1\?'.*answer: 2.*question_ids: q1",
        ),
    ],
)
def test_a_preview_shows_preferences_and_tasks_and_leaves_a_run_alone(toys, tmp_path, stage, data, length, row):
    run = tmp_path / "ended"
    run.mkdir()
    (run / "config.json").touch()
    shutil.copy(toys / "pairs.jsonl", tmp_path)
    task = {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2", "question_ids": "q1"}
    write_jsonl(tmp_path / "tasks.jsonl", [task] * 4)
    # Only GRPO reads the model, whose positions limit the tasks.
    left_out = ["model.safetensors"] if stage == "dpo" else []
    shutil.copytree(toys / "dense", tmp_path / "toy", ignore=lambda *_: left_out)
    flags = f"--model_name_or_path toy --dataset_name {data} --{length} 64 --preview 2 --output_dir ended"
    flags += " --rewards length --validation_fraction 0" if stage == "grpo" else ""
    output = call(tmp_path, "python", stage, flags)
    assert output.count("--- a row\n") == 2 and re.search(row, output, re.DOTALL)
    assert [path.name for path in run.iterdir()] == ["config.json"]


# The Makefile and its launchers


def test_make_prints_help_and_refuses_an_unknown_device():
    output = make_output()
    assert output.startswith("make pretrain   ") and "\nmake clean   " in output and "PYTHON" not in output
    result = subprocess.run(["make", "-n", "pretrain", "DEVICE=gpu"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0 and "use cuda, cpu or auto" in result.stderr


def test_make_evaluate_installs_what_its_arguments_need(tmp_path):
    for args, extras in (
        *(("", "corpora"), ("--limit 2 --tasks tool_call", "corpora")),
        *(("--tasks blimp,tool_call", "corpora,eval"), ("--tasks=hellaswag", "corpora,eval")),
    ):
        output = make_output("-n", "evaluate", f"VENV={tmp_path}", f"ARGS={args}")
        assert re.findall(r'-e "\.\[(.*)\]"', output)[-1:] == [extras]


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


def make(toys: Path, name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # make uses an installed environment as it is.
    (Path(sys.prefix) / ".installed").touch()
    arguments = " ".join([*toy_arguments(toys, name), *RATE, "--per_device_train_batch_size 2 --report_to none"])
    words = ("make", "pretrain", f"VENV={sys.prefix}", "GPUS=2", "DEVICE=cpu", *words, f"ARGS={arguments}")
    return start(list(words), **environment)


@pytest.fixture(scope="module")
def one_process(toys, tmp_path_factory) -> list[float]:
    """Return the losses of the run of [`make`] in one process."""
    # Not in `toys`, which all workers share.
    directory = tmp_path_factory.mktemp("alone")
    words = [*toy_arguments(toys, str(directory)), *RATE, "--per_device_train_batch_size", "4", "--use_cpu"]
    result = start([sys.executable, RECIPE, "--config", str(ROOT / "recipes/tiny/pretrain.yaml"), *words])
    assert result.returncode == 0, result.stdout[-3000:]
    return losses(directory)


def losses(output_dir: Path) -> list[float]:
    return [entry.get("loss", entry.get("eval_loss")) for entry in log_history(output_dir)[:-1]]


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate ACCELERATE=ddp", "accelerate"])
def test_make_runs_two_processes(toys, one_process, launcher):
    """The losses are those of one process, and torchrun, deepspeed and accelerate alone add no lines."""
    name = re.sub(r"\W", "-", launcher)
    words = [] if launcher == "torchrun" else [f"MASTER_PORT={free_port()}"]
    # accelerate launches DeepSpeed, too.
    words += ["ACCELERATE=zero3"] if launcher == "accelerate" else []
    # What is compiled prints nothing either. Muon's update, which DeepSpeed compiles, takes a minute.
    compiled = {"TORCHDYNAMO_DISABLE": ""} if launcher != "accelerate" else {}
    result = make(toys, name, *words, *f"LAUNCHER={launcher}".split(), **compiled)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "2 process(es) on CPU" in result.stdout
    if launcher != "accelerate":
        started = (r"\$ .*", r"\S*python hf_pretrain_cli.py .*", r"make.*: (Entering|Leaving) directory.*")
        # Another test may build the same kernel. Two ranks may write into one line, and leave the next one empty.
        check_lines(result.stdout, *started, r"(DeepSpeed \S+ built successfully)*", r"Waiting for \S+/lock\. .*")
    assert losses(toys / name) == pytest.approx(one_process, abs=2e-4)


# Launches of a model with experts, and the optimizer of each.
LAYOUTS = {
    "fsdp-ep": (["--fsdp_size", "2", "--ep_size", "2"], "muon"),
    "zero2": (["--deepspeed", "ds_configs/zero2.json", "--optim_preset", "adamw"], "adamw_torch_fused"),
    "zero3_offload": (["--deepspeed", "ds_configs/zero3_offload.json"], "muon"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_sharded_run_equals_an_uninterrupted_one(layout, toys):
    flags, optimizer = LAYOUTS[layout]
    whole, resumed = (toys / f"{layout}-{name}" for name in ("whole", "resumed"))
    for output_dir in (whole, resumed):
        arguments = toy_arguments(toys, output_dir.name, "moe")
        arguments[arguments.index("--save_strategy") + 1] = "steps"
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

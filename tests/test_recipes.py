"""Every YAML file, every row of the launcher table, and common mistakes in launch commands."""

import json
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser as torchrun_parser
from transformers import HfArgumentParser

import hf_pretrain_cli
from hf_pretrain import PRESETS, MiniMindForCausalLM
from hf_pretrain.data.arguments import ChatArguments, DataArguments, SourceArguments
from hf_pretrain.runtime.recipe_parsers import recipe_parser
from hf_pretrain.stages.distillation import DistillationArguments
from hf_pretrain.stages.preferences import DPOTrainingArguments
from hf_pretrain.stages.reinforcement import GRPOTrainingArguments, TaskArguments
from hf_pretrain.stages.rewards import load_reward_functions
from hf_pretrain.tokenizer.loading import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.arguments import DistillationTrainingArguments, LMTrainingArguments, SFTTrainingArguments
from hf_pretrain.training.optimizer_choice import keep_optimizer
from hf_pretrain.training.parsing import parse_args, read_config
from hf_pretrain.weights.adapters import AdapterArguments
from hf_pretrain.weights.model_arguments import ModelArguments
from tests.invariants.launching import BIN, ROOT, cpu_environment, free_port, launcher_command, start
from tests.toys import EXPERTS, toy_model, write_jsonl


RECIPE = str(ROOT / "recipes/pretrain.py")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """Return a directory with a toy checkpoint and a few sentences."""
    path = tmp_path_factory.mktemp("recipes")
    generator = random.Random(0)
    words = ["river", "stone", "green", "light", "walks", "under", "seven", "quiet"]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 12))) for _ in range(40)]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    for name, fields in (("toy", {}), ("toy-moe", EXPERTS)):
        toy_model(vocab_size=320, **fields).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    write_jsonl(path / "train.jsonl", texts)
    return path


def toy_arguments(workspace: Path, output_dir: str) -> list[str]:
    return [
        *("--model_name_or_path", str(workspace / "toy"), "--dataset_name", str(workspace / "train.jsonl")),
        *("--max_length", "32", "--validation_fraction", "0.1", "--max_steps", "2", "--logging_steps", "1"),
        *("--save_strategy", "no", "--bf16", "false", "--output_dir", str(workspace / output_dir)),
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_yaml_that_names_it_and_parses(preset, tmp_path):
    model, _, training = parse_args(
        ModelArguments,
        DataArguments,
        LMTrainingArguments,
        argv=[
            "--config",
            str(ROOT / f"recipes/{preset}/pretrain.yaml"),
            "--output_dir",
            str(tmp_path),
            "--bf16",
            "false",
        ],
    )
    assert model.model_preset == preset
    keep_optimizer(training, [model], checkpoint=None)
    # Muon's rate falls with the width: 192, 512, 640, then 768. minimind-large has MiniMind's own.
    rates = {"tiny": 8e-3, "minimind2-small": 3e-3, "minimind2-moe": 2.4e-3, "minimind-large": 2e-4}
    assert training.learning_rate == pytest.approx(rates.get(preset, 2e-3), rel=1e-3)
    assert training.output_dir == str(tmp_path)


def test_minimind_large_trains_with_its_published_settings(tmp_path):
    path = ROOT / "recipes/minimind-large/pretrain.yaml"
    argv = ["--config", str(path), "--output_dir", str(tmp_path), "--optim_preset", "adamw"]
    _, data, training = parse_args(ModelArguments, DataArguments, LMTrainingArguments, argv=argv)
    assert training.bf16 and data.max_length == 1024
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (24, 32)
    assert training.optim_preset == "adamw"
    assert (training.learning_rate, training.max_grad_norm, training.num_train_epochs) == (2e-4, 1.0, 3)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_configs_leave_everything_to_the_trainer(path):
    config = json.loads(path.read_text())
    assert not config.keys() & {"optimizer", "scheduler"}
    for key in (
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ):
        assert config[key] == "auto"
    assert config["bf16"]["enabled"] == config["fp16"]["enabled"] == "auto"
    assert config["zero_optimization"]["stage"] == int(path.stem[4])


# The lines that a redirected run prints before its report.
PROGRESS = [
    r"1 process\(es\) on CPU, float32.*",
    r"(Training|Validation): \d+ documents, [\d,]+ tokens in \d+ sequences, [\d.]+% filled, 0 tokens cut at .* 32",
    r"step [12]/2: loss \d\.\d{4}, [\d,]+ tokens/s, mfu \d+%",
    r"step [12]/2: validation loss \d\.\d{4}, bits per byte \d\.\d{4}",
    r"step [12]/2: '.*' -> '.*'",
    "",
]


# On a busy machine, silent phases are named.
SILENT = r"[a-z][^:]*( \d+/\d+)?, \d\d:\d\d(, \d\d:\d\d left)?"


def test_the_recipe_trains_saves_and_reports(workspace):
    output = start([*launcher_command("python"), RECIPE, *toy_arguments(workspace, "plain")]).stdout
    # No progress bars, no terminal codes, no messages of other libraries.
    assert not set("\r\x1b") & set(output)
    progress = output[: output.index("Checkpoint ")].splitlines()
    for pattern in PROGRESS:
        assert any(re.fullmatch(pattern, line) for line in progress), pattern
    for line in progress:
        assert any(re.fullmatch(pattern, line) for pattern in (*PROGRESS, SILENT)), line
    run = workspace / "plain"
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "trainer_state.json"):
        assert (run / name).is_file(), output[-3000:]
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    (final,) = [entry for entry in history if "eval_loss" in entry][-1:]
    for words in (
        "1 process(es) on CPU, float32; 8 rows per step; torch ",
        " found no accelerator\n",
        "0 tokens cut at --max_length 32",
        f"Validation loss    {final['eval_loss']:.4f}",
        "a unigram model:",
        f"Bits per byte      {final['eval_bits_per_byte']:.4f}",
        f"hf-pretrain sft --model_name_or_path {run} --output_dir {run}-sft",
    ):
        assert words in output
    assert output.count("Sample ") == 3
    (entry,) = json.loads((run / "run.json").read_text())
    assert entry["recipe"] == "pretrain"
    assert entry["arguments"]["max_length"] == 32 and "--max_steps 2" in entry["command"] and entry["steps"] == 2
    assert entry["data"]["names"] == [str(workspace / "train.jsonl")] and entry["data"]["train"]["rows"] > 0
    assert entry["data"]["train"]["digest"] != entry["data"]["held_out"]["digest"]
    assert entry["metrics"]["eval_loss"] == final["eval_loss"] and "\n".join(entry["report"]) in output
    # The page has the curves of the run.
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 6 and f"{final['eval_loss']:.4f} nats per token" in page


# The flags of each stage beside those of `toy_arguments`, and the lines that only this stage prints.
FLAGS_AND_LINES = {
    "sft": ("--dataset_name chats.jsonl", [r"(Training|Validation): .* tokens count in the loss.*"]),
    "distill": ("--teacher_name_or_path toy --dataset_kind text", ["The student has the weights of the teacher: .*"]),
    "dpo": (
        "--dataset_name pairs.jsonl",
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
    toy_model(vocab_size=320, max_position_embeddings=512).save_pretrained(workspace / "toy-long")
    load_tokenizer(str(workspace / "toy")).save_pretrained(workspace / "toy-long")
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}] for n in range(99)]
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(99)]
    for name, lines in (("chats", [{"messages": chat} for chat in turns]), ("pairs", pairs)):
        (workspace / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words, own = FLAGS_AND_LINES[stage]
    flags = toy_arguments(workspace, f"lines-{stage}")
    if stage == "grpo":
        # Its answers have a length, and its prompts have none.
        position = flags.index("--max_length")
        del flags[position : position + 2]
    command = [*launcher_command("python"), str(ROOT / f"recipes/{stage}.py"), *flags, *words.split()]
    result = start([*command, "--report_to", "none"], cwd=workspace)
    assert result.returncode == 0 and not set("\r\x1b") & set(result.stdout), result.stdout
    progress = re.split("^(?:Checkpoint|Model) ", result.stdout, flags=re.MULTILINE)[0].splitlines()
    shared = [r"step \d/2: validation loss \d.*", r"step \d/2: .* -> .*"]
    for line in progress:
        assert any(re.fullmatch(pattern, line) for pattern in (*PROGRESS, *shared, *own, SILENT)), line


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_launchers_add_no_lines(workspace, launcher):
    words = [sys.executable, str(ROOT / "hf_pretrain_cli.py"), "pretrain", "--launcher", launcher, "--nproc", "2"]
    words += ["--use_cpu", "--report_to", "none"]
    words += ["--master_port", str(free_port())] if launcher == "deepspeed" else []
    environment = {name: value for name, value in cpu_environment().items() if not name.startswith(("OMP_", "LOCAL_"))}
    output = subprocess.run(
        words + toy_arguments(workspace, f"lines-{launcher}"),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout
    command, *lines = output[: output.index("Checkpoint ")].splitlines()
    assert command.startswith("$ ") and not set("\r\x1b") & set(output)
    first = r"2 process\(es\) on CPU, float32.*"
    for line in lines:
        assert any(re.fullmatch(pattern, line) for pattern in (first, *PROGRESS, SILENT)), output
    # The report is the end of the output.
    assert re.fullmatch(r"Next stage  .*", output.splitlines()[-1]), output


@pytest.mark.slow
def test_libraries_report_on_request(workspace):
    output = start(
        [sys.executable, RECIPE, *toy_arguments(workspace, "info"), "--use_cpu", "--log_level", "info"]
    ).stdout
    assert "***** Running training *****" in output and "Num examples = " in output and "\r" not in output


def test_the_recipe_refuses_a_used_directory(workspace):
    (workspace / "used").mkdir()
    (workspace / "used/file").touch()
    result = start([*launcher_command("python"), RECIPE, *toy_arguments(workspace, "used")])
    assert result.returncode != 0
    assert "is not empty" in result.stdout


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (["--dataset_name", "nope.jsonl"], "There is no file or directory nope.jsonl"),
        (["--validation_fraction", "2"], "validation_fraction=2.0 must be"),
        (["--text_column", "nope"], "no column 'nope'"),
        # The first step finds it. TensorBoard has begun by then.
        (["--max_length", "1000", "--packing_strategy", "wrapped", "--report_to", "tensorboard"], "lies past the"),
    ],
)
def test_a_mistake_does_not_disturb_the_next_start_in_the_same_directory(workspace, mistake, message):
    arguments = toy_arguments(workspace, f"again{mistake[0]}")
    command = [*launcher_command("python"), RECIPE, *arguments, "--report_to", "none"]
    failed = start([*command, *mistake])
    assert failed.returncode == 2 and message in failed.stdout, failed.stdout
    result = start(command)
    assert result.returncode == 0, result.stdout
    run = Path(arguments[-1])
    assert json.loads((run / "run.json").read_text())[-1]["steps"] == 2
    assert "bad lines" not in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("packing", ["wrapped", "none"])
def test_streaming_and_other_packings_run(workspace, packing):
    arguments = [*toy_arguments(workspace, f"stream-{packing}"), "--packing_strategy", packing, "--streaming", "true"]
    result = start([*launcher_command("python"), RECIPE, *arguments])
    assert result.returncode == 0 and "Validation loss" in result.stdout, result.stdout[-3000:]


def test_a_checkpoint_is_resumed(workspace):
    arguments = [*toy_arguments(workspace, "resumed"), "--save_strategy", "steps", "--save_steps", "1"]
    first = start([*launcher_command("python"), RECIPE, *arguments, "--max_steps", "3"])
    assert first.returncode == 0, first.stdout[-3000:]
    again = [*arguments, "--max_steps", "4", "--resume_from_checkpoint", "auto"]
    refused = start([*launcher_command("python"), RECIPE, *again])
    assert refused.returncode == 2 and "--max_steps was 3 and is now 4" in refused.stdout, refused.stdout[-3000:]
    again.append("--allow_inexact_resume")
    second = start([*launcher_command("python"), RECIPE, *again])
    assert second.returncode == 0, second.stdout[-3000:]
    history = json.loads((workspace / "resumed/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4]
    record = json.loads((workspace / "resumed/run.json").read_text())
    ended = [entry for entry in record if "ended" in entry]
    assert [(entry["steps"], entry["resumed_from"] is not None) for entry in ended] == [(3, False), (4, True)]
    assert record[0]["data"] == record[-1]["data"]


def test_the_former_name_of_the_slurm_job_still_works():
    assert (ROOT / "recipes/slurm/pretrain.sbatch").samefile(ROOT / "recipes/clusters/slurm.sbatch")


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


# Launchers


def test_bare_make_prints_help():
    # Under `make test`, a make within a make would also print the directories that it enters.
    output = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith("make pretrain   ") and "\nmake clean   " in output and "PYTHON" not in output


def test_make_clean_leaves_models_and_other_environments(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    mine = ["out/sft-tiny/model.safetensors", "faults.json", "env/bin/python", "recipes/my/pretrain.yaml"]
    built = ["build/lib/a.o", "dist/a.whl", "a.egg-info/PKG-INFO", ".pytest_cache/a", "tests/__pycache__/a.pyc"]
    for name in [*mine, *built, "hf_pretrain/a.py", "benchmarks/a.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "clean", "VENV=env"], cwd=tmp_path, check=True)
    assert all((tmp_path / name).is_file() for name in [*mine, "hf_pretrain/a.py"])
    assert not any((tmp_path / name).exists() for name in built)


def test_make_refuses_an_unknown_device():
    result = subprocess.run(["make", "-n", "pretrain", "DEVICE=gpu"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0 and "use cuda, cpu or auto" in result.stderr


def make(workspace: Path, name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # make uses an installed environment as it is.
    (Path(sys.prefix) / ".installed").touch()
    arguments = f"ARGS={' '.join(toy_arguments(workspace, name))} --per_device_train_batch_size 2"
    command = ["make", "pretrain", f"VENV={sys.prefix}", "GPUS=2", "DEVICE=cpu", *words, arguments]
    return start(command, **environment)


def validation_loss(output: str) -> float:
    return float(re.search(r"Validation loss +([\d.]+)", output)[1])


@pytest.fixture(scope="module")
def one_process(workspace) -> float:
    """Return the validation loss of the run of [`make`] in one process."""
    words = [*toy_arguments(workspace, "alone"), "--per_device_train_batch_size", "4", "--use_cpu"]
    config = ["--config", str(ROOT / "recipes/tiny/pretrain.yaml")]
    result = start([sys.executable, RECIPE, *config, *words])
    assert result.returncode == 0, result.stdout[-3000:]
    return validation_loss(result.stdout)


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate ACCELERATE=zero2"])
def test_make_runs_two_processes(workspace, one_process, launcher):
    """
    With --include, the deepspeed launcher ignores CUDA_VISIBLE_DEVICES and prints that; the recipe prints its devices.
    """
    words = [f"MASTER_PORT={free_port()}", *f"LAUNCHER={launcher}".split()]
    result = make(workspace, f"make-{launcher.split()[0]}", *words, CUDA_VISIBLE_DEVICES="1")
    assert result.returncode == 0, result.stdout[-3000:]
    assert "2 process(es) on CPU" in result.stdout
    assert ("Detected VISIBLE_DEVICES=1 but ignoring it" in result.stdout) == (launcher == "deepspeed")
    assert validation_loss(result.stdout) == pytest.approx(one_process, abs=2e-4)


def test_make_reports_a_port_in_use(workspace):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = make(workspace, "port", "LAUNCHER=deepspeed", f"MASTER_PORT={port}")
    assert result.returncode != 0
    assert f"Port {port} is in use; choose another: --master_port {port + 1}" in result.stdout


@pytest.mark.distributed
def test_two_launch_agents_on_one_host(workspace):
    port = str(free_port())
    agents = []
    for rank in range(2):
        rendezvous = ["--nnodes", "2", "--node_rank", str(rank), "--nproc_per_node", "1"]
        address = ["--master_addr", "127.0.0.1", "--master_port", port]
        command = [str(BIN / "torchrun"), *rendezvous, *address, RECIPE, *toy_arguments(workspace, "nodes")]
        agents.append(
            subprocess.Popen(
                command, cwd=ROOT, env=cpu_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [agent.communicate(timeout=500)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "2 process(es) on CPU" in outputs[0]
    assert "Validation loss" in outputs[0] and "Validation loss" not in outputs[1]


# Launches of a model with experts: number of processes, flags, and flags that only the first run has.
LAYOUTS = {
    "fsdp-ep": (2, ["--fsdp_size", "2", "--ep_size", "2"], []),
    "replicated": (4, ["--fsdp_size", "2", "--dp_replicate_size", "2"], []),
    **{
        name: (2, ["--deepspeed", f"ds_configs/{name}.json"], [])
        for name in ("zero1", "zero2_offload", "zero3", "zero3_offload")
    },
    # AdamW was the default of earlier versions.
    "adamw": (2, ["--fsdp_size", "2"], ["--optim_preset", "adamw"]),
    "adamw-zero2": (2, ["--deepspeed", "ds_configs/zero2.json"], ["--optim_preset", "adamw"]),
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_sharded_run_equals_an_uninterrupted_one(layout, workspace):
    processes, flags, only_first = LAYOUTS[layout]
    whole, resumed = (workspace / f"{layout}-{name}" for name in ("whole", "resumed"))
    losses = []
    for output_dir in (whole, resumed):
        arguments = toy_arguments(workspace, output_dir.name)
        arguments[arguments.index("--save_strategy") + 1] = "steps"
        arguments += ["--save_steps", "1", "--lr_scheduler_type", "constant", "--max_steps", "3", *flags]
        arguments[arguments.index(str(workspace / "toy"))] = str(workspace / "toy-moe")
        arguments += only_first if output_dir == whole else []
        command = [*launcher_command("torchrun", processes), RECIPE, *arguments]
        result = start([*command, "--resume_from_checkpoint", "auto"])
        assert result.returncode == 0, result.stdout[-3000:]
        history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
        losses.append([entry["loss"] for entry in history if "loss" in entry])
        optimizer = "adamw_torch_fused" if layout.startswith("adamw") else "muon"
        assert re.search(rf"^Optimizer +{optimizer}, learning rate", result.stdout, re.MULTILINE)
        if layout.startswith("adamw"):
            # The gradients are clipped, so the weights would differ without clipping.
            assert all(entry["grad_norm"] > 1 for entry in history if "loss" in entry)
        if output_dir == whole:
            resumed.mkdir()
            shutil.move(whole / "checkpoint-2", resumed)
    assert "Resuming from" in result.stdout and "step 2/3" not in result.stdout
    assert "although" not in result.stdout
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    first, second = (load_file(path / "model.safetensors") for path in (whole, resumed))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    # Every layout writes the same files as one process.
    assert MiniMindForCausalLM.from_pretrained(resumed).config.num_experts == 4


@pytest.mark.distributed
def test_fsdp_through_accelerate_is_refused_on_cpu(workspace):
    result = start([*launcher_command("accelerate:fsdp2"), RECIPE, *toy_arguments(workspace, "fsdp")])
    assert result.returncode != 0
    assert "--fsdp_size N" in result.stdout


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("block", "arguments", "message"),
    [
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}},
            ["--optim_preset", "adamw"],
            "has a `optimizer` block: it overrides --optim",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            ["--optim", "sgd"],
            "replace --optim sgd by Adam",
        ),
        ({"gradient_clipping": 1.0}, [], "DeepSpeed would clip Muon's updates instead of the gradients, at 1"),
    ],
)
def test_deepspeed_configs_that_change_the_optimizer_are_reported(workspace, block, arguments, message):
    config = json.loads((ROOT / "ds_configs/zero2.json").read_text()) | block
    path = workspace / f"{next(iter(block))}.json"
    path.write_text(json.dumps(config))
    command = [*launcher_command("deepspeed"), RECIPE, *toy_arguments(workspace, path.stem), *arguments]
    result = start([*command, "--deepspeed", str(path)])
    assert message in result.stdout, result.stdout[-3000:]
    assert (result.returncode == 0) == ("--optim_preset" in arguments), result.stdout[-3000:]


@pytest.fixture(scope="module")
def chats(workspace) -> str:
    generator = random.Random(1)
    words = ["river", "stone", "green", "light"]
    records = [
        {"prompt": " ".join(generator.choices(words, k=4)), "completion": " ".join(generator.choices(words, k=5))}
        for _ in range(30)
    ]
    return write_jsonl(workspace / "chats.jsonl", records)


def test_sft_previews_the_trained_tokens(workspace, chats):
    command = [sys.executable, str(ROOT / "recipes/sft.py"), "--model_name_or_path", str(workspace / "toy")]
    result = start([*command, "--dataset_name", chats, "--preview", "2", "--output_dir", str(workspace / "none")])
    assert result.returncode == 0, result.stdout[-3000:]
    assert result.stdout.count("--- a row of") == 2 and not (workspace / "none").exists()
    coloured = re.findall("\033\\[32m(.*?)\033\\[0m", result.stdout, flags=re.DOTALL)
    completions = [json.loads(line)["completion"] + "<|im_end|>" for line in Path(chats).read_text().splitlines()]
    assert coloured and set(coloured) <= set(completions)


def test_a_dry_run_of_sft_plans_without_writing(workspace, chats):
    command = [sys.executable, str(ROOT / "recipes/sft.py"), "--model_name_or_path", str(workspace / "toy")]
    command += ["--dataset_name", chats, "--max_length", "64", "--bf16", "false", "--use_cpu", "--max_steps", "7"]
    result = start([*command, "--dry_run", "--output_dir", str(workspace / "planned")])
    assert result.returncode == 0, result.stdout[-3000:]
    assert re.search(r"^Steps +7 of \d+ sequences each", result.stdout, re.MULTILINE)
    assert re.search(r"^Memory .* [\d,]+ fits at 64 tokens$", result.stdout, re.MULTILINE)
    assert not (workspace / "planned").exists()


OPTIONS = {"plain": [], "streaming": ["--streaming"], "adapter": ["--use_peft"], "text": ["--dataset_kind", "text"]}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sft_runs_and_reports_the_change(workspace, chats, options):
    output_dir = workspace / f"sft{''.join(options)}"
    data = str(workspace / "train.jsonl") if "text" in options else chats
    arguments = [
        *("--model_name_or_path", str(workspace / "toy"), "--dataset_name", data, "--max_length", "64"),
        *("--validation_fraction", "0.2", "--max_steps", "3", "--logging_steps", "1", "--bf16", "false"),
        *("--learning_rate", "1e-2", "--output_dir", str(output_dir), "--use_cpu"),
        *options,
    ]
    result = start([sys.executable, str(ROOT / "recipes/sft.py"), *arguments])
    assert result.returncode == 0, result.stdout[-3000:]
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    report = re.search(r"Validation loss +([\d.]+) nats per token \(([\d.]+) before\)", result.stdout)
    assert [float(number) for number in report.groups()] == [round(losses[-1], 4), round(losses[0], 4)]
    assert losses[-1] < losses[0]
    assert (output_dir / "adapter_model.safetensors").is_file() == (options == ["--use_peft"])
    assert result.stdout.count("Sample ") == 3 and "Talk to it" in result.stdout


STAGES = {
    "sft": (ModelArguments, AdapterArguments, ChatArguments, SFTTrainingArguments),
    "dpo": (ModelArguments, AdapterArguments, SourceArguments, DPOTrainingArguments),
    "distill": (ModelArguments, AdapterArguments, DistillationArguments, ChatArguments, DistillationTrainingArguments),
    "grpo": (ModelArguments, AdapterArguments, TaskArguments, GRPOTrainingArguments),
}


@pytest.mark.parametrize("stage", STAGES)
def test_help_is_printed(stage):
    """A percent sign in one help text would break the whole output."""
    assert "--learning_rate" in HfArgumentParser(STAGES[stage]).format_help()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_yaml_of_the_other_stages_parses(preset, stage, tmp_path):
    path = ROOT / f"recipes/{preset}/{stage}.yaml"
    argv = ["--config", str(path), "--output_dir", str(tmp_path), "--bf16", "false"]
    content = read_config(path)
    if stage == "distill" and "teacher_name_or_path" not in content:  # no preset is larger
        argv += ["--teacher_name_or_path", "out/mine"]
    model, *_, training = parse_args(*STAGES[stage], stage=stage, argv=argv)
    # The tiny student starts from random weights and is smaller than its teacher.
    start = (
        None if (stage, preset) == ("distill", "tiny") else f"out/{'pretrain' if stage == 'sft' else 'sft'}-{preset}"
    )
    assert model.model_name_or_path == start
    assert training.learning_rate == float(content["learning_rate"])
    if stage == "grpo":
        rewards = content["rewards"]
        load_reward_functions([rewards] if isinstance(rewards, str) else rewards)
    # Shared flags mean the same in all recipes.
    assert not training.gradient_checkpointing and training.save_total_limit == 2
    assert training.logging_steps == content.get("logging_steps", 10)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_directory_of_its_own(stage):
    """No preset applies to a model from elsewhere, so the classes give the defaults."""
    argv = ["--model_name_or_path", "owner/model", "--use_cpu", "--bf16", "false"]
    argv += ["--teacher_name_or_path", "owner/teacher"] if stage == "distill" else []
    assert parse_args(*STAGES[stage], stage=stage, argv=argv)[-1].output_dir == f"out/{stage}"


def test_a_stage_without_a_model_is_refused():
    with pytest.raises(ValueError, match="This stage starts from a trained model: pass --model_name_or_path"):
        ModelArguments().base_model  # noqa: B018


@pytest.mark.parametrize("stage", ["sft", "dpo", "distill", "grpo"])
def test_make_launches_every_stage(stage):
    command = ["make", "-n", stage, "DEVICE=cpu", "GPUS=2", "LAUNCHER=deepspeed", "ARGS=--max_steps 1"]
    result = start(command)
    assert result.returncode == 0, result.stdout
    line = next(line for line in result.stdout.replace("\\\n", " ").splitlines() if "hf_pretrain_cli.py" in line)
    words = shlex.split(line)
    words = words[words.index("hf_pretrain_cli.py") + 1 :]
    assert words[0] == stage and words[-2:] == ["--max_steps", "1"]
    _, command = hf_pretrain_cli.make_command(words[0], [*words[1:], "--master_port", str(free_port())])
    names = {word.removeprefix(f"{ROOT}/") for word in command}
    assert {"--include", "localhost:0,1", f"recipes/tiny/{stage}.yaml", "ds_configs/zero2.json", "--use_cpu"} <= names

"""The command `hf-pretrain` starts the right commands, and a wheel holds everything that it needs."""

import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import hf_pretrain
import hf_pretrain_cli
from hf_pretrain.data.corpora import EMBEDDED_CORPORA
from hf_pretrain.runtime.help_cache import STARTED_AS
from hf_pretrain.stages.rewards import REWARDS
from tests.faults.driving import ranks, start, wait_for
from tests.invariants.launching import ROOT, cpu_environment, free_port


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(hf_pretrain_cli, "find_gpus", lambda: [])


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    # Print the same lines as the program of NVIDIA's driver.
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA (UUID: GPU-$i)"; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def command_of(*words: str) -> tuple[dict[str, str], str]:
    """Return the environment variables, and the command without directories."""
    environment, command = hf_pretrain_cli.make_command(words[0], list(words[1:]))
    text = shlex.join(command)
    for directory in (Path(sys.executable).parent, ROOT, ".venv/bin"):
        text = text.replace(f"{directory}/", "")
    return environment, text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pretrain --max_steps 3", "recipes/pretrain.py --max_steps 3"),
        ("sft --preset tiny", "recipes/sft.py --config recipes/tiny/sft.yaml"),
        ("sft --preset auto", "recipes/sft.py --config recipes/tiny/sft.yaml"),
        ("dpo --nproc 2", "torchrun --standalone --nproc_per_node 2 recipes/dpo.py"),
        (
            "grpo --launcher deepspeed --nproc 2 --ds zero3 --master_port 29555",
            "deepspeed --quiet --include localhost:0,1 --master_port 29555 recipes/grpo.py "
            "--deepspeed ds_configs/zero3.json",
        ),
        (
            "distill --launcher accelerate --accelerate fsdp2 --nproc 2 --master_port 29555",
            "accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml --num_processes 2 "
            "--main_process_port 29555 recipes/distill.py",
        ),
        # A config implies its launcher, and the user's own config replaces the default one.
        (
            "pretrain --ds zero3 --master_port 29555",
            "deepspeed --quiet --include localhost:0 --master_port 29555 recipes/pretrain.py "
            "--deepspeed ds_configs/zero3.json",
        ),
        (
            "pretrain --accelerate zero2 --master_port 29555",
            "accelerate launch --config_file recipes/accelerate_configs/zero2.yaml --num_processes 1 "
            "--main_process_port 29555 recipes/pretrain.py",
        ),
        (
            "pretrain --launcher deepspeed --master_port 29555 --deepspeed=my.json",
            "deepspeed --quiet --include localhost:0 --master_port 29555 recipes/pretrain.py --deepspeed=my.json",
        ),
        ("evaluate", "recipes/evaluate.py"),
        (
            "evaluate --launcher deepspeed --master_port 29555",
            "deepspeed --quiet --include localhost:0 --master_port 29555 recipes/evaluate.py "
            "--deepspeed ds_configs/zero3.json",
        ),
        (
            "evaluate --preset tiny --nproc 2",
            "torchrun --standalone --nproc_per_node 2 recipes/evaluate.py --config recipes/tiny/evaluate.yaml",
        ),
        # Other presets have no file for evaluation.
        ("evaluate --preset minimind2", "recipes/evaluate.py --config recipes/minimind2/pretrain.yaml"),
        ("chat --nproc 2", "recipes/chat.py --nproc 2"),
    ],
)
def test_commands_without_gpus(no_gpus, words, expected):
    _, command = command_of(*words.split())
    assert re.sub(r"^python\S* ", "", command) == expected


def test_processes_on_cpus_share_the_cores(no_gpus, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert command_of("pretrain", "--nproc", "2")[0] == {"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "4"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert command_of("pretrain", "--nproc", "2")[0] == {"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "3"}
    assert command_of("pretrain")[0] == {}


def test_each_gpu_gets_a_process(four_gpus, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert command_of("pretrain") == (
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "OMP_NUM_THREADS": "1"},
        "torchrun --standalone --nproc_per_node 4 recipes/pretrain.py",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    environment, command = command_of("pretrain", "--launcher", "deepspeed", "--master_port", "29555")
    assert environment == {} and "--include localhost:3,1 " in command
    assert command_of("pretrain", "--nproc", "1")[0] == {"CUDA_VISIBLE_DEVICES": "3"}
    # `--use_cpu` belongs to the recipe, and no process gets a GPU.
    assert command_of("pretrain", "--use_cpu")[0] == {}
    assert command_of("pretrain", "--use_cpu", "false")[0]["CUDA_VISIBLE_DEVICES"] == "3,1"
    # The tasks of an evaluation need a single process.
    assert command_of("evaluate")[0] == {"CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("2, 0", ["2", "0"]),
        ("-1", []),
        ("", []),
        ("1,-1,2", ["1"]),
        ("0,7,1", ["0"]),
        ("GPU-8932f937,MIG-1", ["GPU-8932f937", "MIG-1"]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(four_gpus, monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hf_pretrain_cli.find_gpus() == gpus


def test_deepspeed_takes_numbers_of_gpus_only(four_gpus, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    with pytest.raises(SystemExit, match="2"):
        command_of("pretrain", "--launcher", "deepspeed", "--master_port", "29555")
    assert "names the GPU GPU-8932f937, and DeepSpeed's launcher takes numbers only" in capsys.readouterr().err
    assert command_of("pretrain")[0]["CUDA_VISIBLE_DEVICES"] == "GPU-8932f937"


def test_accelerate_finds_the_deepspeed_config_from_any_directory(no_gpus, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    _, command = hf_pretrain_cli.make_command("pretrain", ["--accelerate", "zero3", "--master_port", "29555"])
    named = Path(command[command.index("--deepspeed_config_file") + 1])
    assert named.samefile(ROOT / "ds_configs/zero3.json")


@pytest.mark.parametrize("visible", ["-1", "", " -1,0"])
def test_hidden_gpus_stay_hidden(four_gpus, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert command_of("pretrain")[0] == {"CUDA_VISIBLE_DEVICES": visible}
    # DeepSpeed overwrites the variable.
    environment, command = command_of("pretrain", "--launcher", "deepspeed", "--master_port", "29555")
    assert environment["DS_ACCELERATOR"] == "cpu" and " --use_cpu" in command


def test_a_shell_can_run_the_printed_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0")
    monkeypatch.setattr(os, "execve", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["hf-pretrain", "pretrain"])
    hf_pretrain_cli.main()
    assert capsys.readouterr().err.startswith("$ CUDA_VISIBLE_DEVICES='2, 0' ")


@pytest.mark.parametrize(
    ("child", "is_default"),
    [
        ("extends: parent.yaml", False),
        ("extends: parent.yaml\ndeepspeed:", True),
        ("deepspeed: other.json", False),
        ("seed: 1", True),
        ("extends: child.yaml", True),
        ("a: [broken", True),
    ],
)
def test_the_deepspeed_config_of_a_yaml_file_is_used(no_gpus, tmp_path, child, is_default):
    (tmp_path / "parent.yaml").write_text("deepspeed: my.json\n")
    (tmp_path / "child.yaml").write_text(f"{child}\n")
    words = ["--launcher", "deepspeed", "--master_port", "29555", "--config", str(tmp_path / "child.yaml")]
    assert ("--deepspeed ds_configs/zero2.json" in command_of("pretrain", *words)[1]) == is_default


def made(*variables: str) -> tuple[dict[str, str], str]:
    """Return what `make pretrain` starts: the environment variables, and the command without directories."""
    words = ["make", "-n", "--no-print-directory", "pretrain", f"VENV={sys.prefix}", *variables]
    lines = run(words, cwd=ROOT, check=True).stdout.replace("\\\n", " ").splitlines()
    # The lines before it may install the package.
    python, program, *rest = shlex.split(lines[-1])
    assert (python, program) == (f"{sys.prefix}/bin/python", "hf_pretrain_cli.py")
    return command_of(*rest)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", "recipes/pretrain.py --config recipes/tiny/pretrain.yaml"),
        ("DEVICE=cpu", "recipes/pretrain.py --config recipes/tiny/pretrain.yaml --use_cpu"),
        ("CONFIG=my.yaml", "recipes/pretrain.py --config my.yaml"),
        (
            "GPUS=2 LAUNCHER=deepspeed DS=zero3 MASTER_PORT=29511",
            "deepspeed --quiet --include localhost:0,1 --master_port 29511 recipes/pretrain.py --config "
            "recipes/tiny/pretrain.yaml --deepspeed ds_configs/zero3.json",
        ),
        ("MASTER_PORT=29511", "recipes/pretrain.py --config recipes/tiny/pretrain.yaml"),
        (
            "GPUS=2 ACCELERATE=ddp MASTER_PORT=29511",
            "accelerate launch --config_file recipes/accelerate_configs/ddp.yaml --num_processes 2 "
            "--main_process_port 29511 recipes/pretrain.py --config recipes/tiny/pretrain.yaml",
        ),
    ],
)
def test_make_is_a_front_of_the_command(no_gpus, variables, expected):
    _, command = made(*variables.split())
    assert re.sub(r"^python\S* ", "", command) == expected


def test_the_deepspeed_launcher_reports_only_on_request(no_gpus, tmp_path):
    words = ["pretrain", "--launcher", "deepspeed", "--master_port", "29555"]
    environment, command = command_of(*words, "--use_cpu")
    assert environment["DS_ACCELERATOR"] == "cpu" and "deepspeed --quiet --include" in command
    assert "--quiet" not in command_of(*words, "--log_level", "info")[1]
    (tmp_path / "info.yaml").write_text("log_level: info\n")
    config = ["--config", str(tmp_path / "info.yaml")]
    assert "--quiet" not in command_of(*words, *config)[1]
    assert "--quiet" in command_of(*words, *config, "--log_level", "warning")[1]


def test_make_uses_the_gpus(four_gpus, monkeypatch):
    environment, command = made("GPUS=2", "LAUNCHER=deepspeed", "MASTER_PORT=29511")
    assert "--include localhost:0,1 " in command and "--config recipes/minimind2-small/pretrain.yaml" in command
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert made()[0] == {"CUDA_VISIBLE_DEVICES": "2,3", "OMP_NUM_THREADS": "1"}
    assert "--nproc_per_node 2 " in made()[1]
    assert made("GPUS=1")[0] == {"CUDA_VISIBLE_DEVICES": "2"}
    # On CPUs, the devices do not depend on CUDA_VISIBLE_DEVICES.
    command = made("GPUS=2", "LAUNCHER=deepspeed", "DEVICE=cpu", "MASTER_PORT=29511")[1]
    assert "--include localhost:0,1 " in command and command.count("--use_cpu") == 1


def test_make_refuses_cuda_without_a_gpu(no_gpus):
    result = run(["make", "-n", "pretrain", f"VENV={sys.prefix}", "DEVICE=cuda"], cwd=ROOT)
    assert result.returncode != 0 and "DEVICE=cuda: nvidia-smi lists no GPU." in result.stderr


def test_one_process_prints_the_help(four_gpus):
    _, command = command_of("pretrain", "--nproc", "4", "--launcher", "accelerate", "--help")
    assert re.fullmatch(r"python\S* recipes/pretrain.py --help", command)


def test_the_recipe_learns_how_it_was_started(no_gpus, monkeypatch):
    started = {}
    monkeypatch.setattr(os, "execve", lambda program, words, environment: started.update(environment))
    monkeypatch.setattr(sys, "argv", ["hf-pretrain", "sft", "--help"])
    hf_pretrain_cli.main()
    assert started[STARTED_AS] == "hf-pretrain sft"


def test_a_launcher_beside_the_command_is_found(no_gpus, monkeypatch, tmp_path):
    # `pip install --user` puts programs into another directory than Python.
    (tmp_path / "torchrun").touch()
    monkeypatch.setattr(hf_pretrain_cli.sys, "executable", "/nowhere/python3")
    monkeypatch.setattr(hf_pretrain_cli.sys, "argv", [str(tmp_path / "hf-pretrain")])
    _, command = hf_pretrain_cli.make_command("pretrain", ["--nproc", "2"])
    assert command[0] == str(tmp_path / "torchrun")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_message_of_a_rank_comes_last(launcher, tmp_path):
    """The programs of the launchers return 1, and print a traceback of their own below the message."""
    port = [] if launcher == "torchrun" else ["--master_port", str(free_port())]
    words = ["pretrain", "--use_cpu", "--nproc", "2", "--launcher", launcher, *port, "--max_length", "3"]
    command = [sys.executable, "-m", "hf_pretrain_cli", *words, "--output_dir", str(tmp_path / "run")]
    result = run(command, cwd=ROOT, env=cpu_environment())
    printed, *_, error = result.stderr.splitlines()
    assert (
        result.returncode == 2
        and "Traceback" not in result.stderr
        and error == "error: max_length=3 is too short to learn from. Use at least 8."
    )
    assert f"{launcher} " in printed and " recipes/pretrain.py --use_cpu" in printed


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("victim", "number", "status", "last"),
    [
        # A launcher passes SIGTERM to its ranks, and they save.
        ("launcher", signal.SIGTERM, 143, "Stopped by SIGTERM"),
        ("rank", signal.SIGKILL, 137, "error: process 1 was ended by SIGKILL. Linux may do this when memory"),
    ],
)
def test_the_status_of_a_signal_reaches_the_shell(tmp_path, victim, number, status, last):
    words = ["pretrain", "--preset", "tiny", "--use_cpu", "--nproc", "2", "--dataset_name", "embedded:idiom"]
    command = [sys.executable, "-m", "hf_pretrain_cli", *words, "--save_steps", "2"]
    with start([*command, "--output_dir", str(tmp_path / "run")]) as process:
        wait_for((tmp_path / "run/checkpoint-2").is_dir, process)
        (process if victim == "launcher" else ranks(process)[1]).send_signal(number)
        output, _ = process.communicate(timeout=500)
    assert process.returncode == status and "torch/distributed/run.py" not in output, output[-3000:]
    assert last in output.splitlines()[-1], output[-3000:]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_closed_terminal_does_not_end_a_run_under_nohup(tmp_path):
    words = ["pretrain", "--preset", "tiny", "--use_cpu", "--nproc", "2", "--dataset_name", "embedded:idiom"]
    words += ["--save_steps", "2", "--max_steps", "9", "--eval_strategy", "no", "--report_to", "none"]
    words += ["--logging_steps", "1"]
    command = ["nohup", sys.executable, "-m", "hf_pretrain_cli", *words, "--output_dir", str(tmp_path / "run")]
    with start(command) as process:
        wait_for((tmp_path / "run/checkpoint-2").is_dir, process)
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(timeout=500)
    assert process.returncode == 0 and "step 9/9" in output, output[-3000:]


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrian", "pretrian is unknown; the nearest command is pretrain."),
        ("pretrain --preset tny", "--preset tny is unknown; the nearest one is tiny."),
        ("pretrain --ds zero4 --launcher deepspeed", "--ds zero4 is unknown"),
        ("pretrain --launcher torchrn", "the nearest one is torchrun"),
        ("pretrain --nproc many", "--nproc: invalid int value: 'many'"),
        ("pretrain --nproc 0", "--nproc 0 is not possible"),
        ("pretrain --preset tiny --config my.yaml", "--preset and --config exclude each other"),
        ("pretrain --ds zero3 --deepspeed my.json", "--ds zero3 and --deepspeed my.json exclude each other"),
        ("pretrain --ds zero3 --launcher torchrun", "--ds zero3 has no effect with torchrun. Leave it out, or"),
        ("pretrain --ds zero3 --accelerate ddp", "--accelerate ddp has no effect with deepspeed"),
        ("pretrain --master_port 1", "or choose --launcher deepspeed or accelerate."),
        ("pretrain --master_port 65536 --ds zero2", "--master_port: '65536' must be a port from 1 to 65535"),
        ("pretrain --launcher slurm", "--launcher slurm is unknown. All: torchrun, deepspeed, accelerate."),
        ("frobnicate", "frobnicate is unknown. `hf-pretrain list` shows all."),
        ("pretrain --accelerate zero2 --deepspeed my.json", "--accelerate zero2 and --deepspeed my.json exclude each"),
    ],
)
def test_mistakes_end_with_one_line(words, message):
    result = run([sys.executable, str(ROOT / "hf_pretrain_cli.py"), *words.split()])
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_optimized_bytecode_is_refused_in_one_line():
    result = run([sys.executable, "-OO", str(ROOT / "hf_pretrain_cli.py"), "list"])
    assert result.returncode == 2 and "error: transformers needs docstrings" in result.stderr
    result = run([sys.executable, "-OO", "-c", "import hf_pretrain"])
    assert result.stderr.splitlines()[-1].startswith("ImportError: transformers needs docstrings")


def test_the_version_is_that_of_the_package():
    result = run([sys.executable, str(ROOT / "hf_pretrain_cli.py"), "--version"])
    assert result.stdout.strip() == hf_pretrain.__version__ == importlib.metadata.version("hf_pretrain")


def test_help_is_a_command():
    result = run([sys.executable, str(ROOT / "hf_pretrain_cli.py"), "help"])
    assert result.returncode == 0 and "hf-pretrain list" in result.stdout and "--launcher" in result.stdout


@pytest.mark.parametrize("words", [["--ds", "zero3"], ["--accelerate", "zero2"]])
def test_a_launch_says_that_deepspeed_is_missing(no_gpus, monkeypatch, capsys, words):
    """It installs on Linux only."""
    monkeypatch.setattr(hf_pretrain_cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command_of("pretrain", *words)
    assert "needs DeepSpeed, which is not installed" in capsys.readouterr().err


def test_more_processes_than_gpus_are_refused(four_gpus, capsys):
    with pytest.raises(SystemExit):
        command_of("pretrain", "--nproc", "5")
    assert "this machine has 4 GPU(s)" in capsys.readouterr().err


def test_the_list_names_every_recipe_and_preset():
    result = run([sys.executable, str(ROOT / "hf_pretrain_cli.py"), "list"])
    names = [path.stem for path in (ROOT / "recipes").glob("*.py")]
    names += [path.parent.name for path in (ROOT / "recipes").glob("*/pretrain.yaml") if path.parent.name != "base"]
    assert [name for name in names if not re.search(rf"^  {name} ", result.stdout, re.MULTILINE)] == []
    assert set(re.findall(r"embedded:(\w+)", result.stdout)) == EMBEDDED_CORPORA.keys()


@pytest.mark.slow
def test_bash_completes_commands_flags_and_their_words(tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(run([sys.executable, str(ROOT / "hf_pretrain_cli.py"), "completion", "bash"]).stdout)
    bash = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
        '$(complete -p hf-pretrain | grep -oP -- "-F \\K\\S+"); echo "${COMPREPLY[@]}"'
    )
    assert "end_with_stdin" not in script.read_text()
    for words, expected in (
        (["hf-pretrain", "pre"], {"pretrain"}),
        (["hf-pretrain", "pretrain", "--laun"], {"--launcher"}),
        (["hf-pretrain", "pretrain", "--launcher", "deep"], {"deepspeed"}),
        (["hf-pretrain", "sft", "--learning_ra"], {"--learning_rate"}),
        (["hf-pretrain", "convert", "--format", "qwen"], {"qwen3", "qwen3_moe"}),
        (["hf-pretrain", "pretrain", "--optim_preset", "mu"], {"muon"}),
        (["hf-pretrain", "pretrain", "--model_preset", "minimind3"], {"minimind3", "minimind3-moe"}),
        (["hf-pretrain", "sft", "--attn_implementation", "flex"], {"flex_attention"}),
        (["hf-pretrain", "sft", "--dataset_kind", "share"], {"sharegpt"}),
        (["hf-pretrain", "distill", "--kl", ""], {"forward", "reverse"}),
        (["hf-pretrain", "grpo", "--algorithm", ""], {"grpo", "rloo"}),
        (["hf-pretrain", "grpo", "--rewards", ""], REWARDS.keys()),
    ):
        result = run(["bash", "-c", bash, str(script), *words])
        assert expected <= set(result.stdout.split()), (words, result)


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.slow
def test_a_wheel_pretrains_in_an_empty_directory(tmp_path):
    wheels = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    built = run([*wheels, str(ROOT)])
    assert built.returncode == 0, built.stderr
    # Install only the wheel: the new environment takes the dependencies from the environment of the tests. Python does
    # not read the .pth files there, so the checkout is not on the path.
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    packages = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip())
    (packages / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {"reports/page.html.jinja", "tokenizer/templates/minimind.jinja"}
    assert {f"hf_pretrain/{name}" for name in ("py.typed", "ds_configs/zero2.json", *templates)} <= names
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    installed = run(install)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "work").mkdir()
    environment = {name: value for name, value in cpu_environment().items() if name != "PYTHONPATH"}
    command = [str(tmp_path / "venv/bin/hf-pretrain"), "pretrain", "--preset", "tiny", "--max_steps", "2"]
    flags = ["--train_fraction", "0.02", "--use_cpu", "--output_dir", "out"]
    result = run([*command, *flags], cwd=tmp_path / "work", env=environment)
    assert result.returncode == 0, result.stderr
    assert f"$ {python} {packages}/hf_pretrain/recipes/pretrain.py --config" in result.stderr
    assert (tmp_path / "work/out/model.safetensors").is_file()
    # accelerate's file names its DeepSpeed config relative to the repository. pip would install this script.
    script = tmp_path / "venv/bin/accelerate"
    script.write_text(f"#!{python}\nfrom accelerate.commands.accelerate_cli import main\n\nmain()\n")
    script.chmod(0o755)
    flags = ["--accelerate", "zero2", "--master_port", str(free_port()), "--train_fraction", "0.02", "--use_cpu"]
    result = run([*command, *flags, "--output_dir", "zero2"], cwd=tmp_path / "work", env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ZeRO-2" in (tmp_path / "work/zero2/checkpoint-2/manifest.json").read_text()

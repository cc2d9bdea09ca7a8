"""The command `hf-pretrain` starts the right commands, and a wheel holds everything that it needs."""

import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import hf_pretrain
import hf_pretrain_cli
from tests.faults.driving import Stopwatch, command, make_workspace, ranks, start, wait_for
from tests.invariants.launching import ROOT, cpu_environment, free_port, make_output


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


PORT = ["--master_port", "29555"]
DEEPSPEED = "deepspeed --quiet --include localhost:{} --master_port 29555 recipes/"
ACCELERATE = "accelerate launch --config_file recipes/accelerate_configs/{}.yaml {}--num_processes {} "
ACCELERATE += "--main_process_port 29555 recipes/"
TWO_RANKS, ZERO3 = DEEPSPEED.format("0,1"), " --deepspeed ds_configs/zero3.json"
ZERO2 = "--deepspeed_config_file ds_configs/zero2.json "


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pretrain --max_steps 3", "recipes/pretrain.py --max_steps 3"),
        ("sft --preset auto", "recipes/sft.py --preset auto"),
        ("dpo --nproc 2", "torchrun --standalone --nproc_per_node 2 recipes/dpo.py"),
        # A config implies its launcher, and the user's own config replaces the default one.
        ("grpo --nproc 2 --ds zero3", TWO_RANKS + "grpo.py" + ZERO3),
        ("pretrain --launcher deepspeed", DEEPSPEED.format("0") + "pretrain.py --deepspeed ds_configs/zero2.json"),
        ("evaluate --launcher deepspeed", DEEPSPEED.format("0") + "evaluate.py" + ZERO3),
        ("sft --launcher deepspeed --deepspeed=my.json", DEEPSPEED.format("0") + "sft.py --deepspeed=my.json"),
        ("distill --accelerate fsdp2 --nproc 2", ACCELERATE.format("fsdp2", "", 2) + "distill.py"),
        ("pretrain --accelerate zero2", ACCELERATE.format("zero2", ZERO2, 1) + "pretrain.py"),
        # These flags belong to the recipe.
        ("chat --nproc 2", "recipes/chat.py --master_port 29555 --nproc 2"),
        ("pretrain --nproc 4 --help", "recipes/pretrain.py --master_port 29555 --nproc 4 --help"),
    ],
)
def test_commands_without_gpus(no_gpus, words, expected):
    stage, *flags = words.split()
    _, command = command_of(stage, *PORT, *flags)
    assert re.sub(r"^python\S* ", "", command) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", "recipes/pretrain.py --preset auto"),
        ("DEVICE=cpu PRESET=tiny", "recipes/pretrain.py --preset tiny --use_cpu"),
        ("CONFIG=my.yaml", "recipes/pretrain.py --config my.yaml"),
        ("GPUS=2 LAUNCHER=deepspeed DS=zero3 MASTER_PORT=29555", TWO_RANKS + "pretrain.py --preset auto" + ZERO3),
        ("GPUS=2 ACCELERATE=ddp MASTER_PORT=29555", ACCELERATE.format("ddp", "", 2) + "pretrain.py --preset auto"),
    ],
)
def test_make_is_a_front_of_the_command(no_gpus, variables, expected):
    lines = make_output("-n", "pretrain", f"VENV={sys.prefix}", *variables.split()).replace("\\\n", " ").splitlines()
    # The lines before it may install the package.
    python, program, *rest = shlex.split(lines[-1])
    assert (python, program) == (f"{sys.prefix}/bin/python", "hf_pretrain_cli.py")
    assert re.sub(r"^python\S* ", "", command_of(*rest)[1]) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrian", "pretrian is unknown; the nearest one is pretrain. Use one of pretrain, sft"),
        ("pretrain --nproc 0", "--nproc 0 is not possible"),
        ("pretrain --nproc 5", "at most one per GPU (4)"),
        ("pretrain --ds zero3 --deepspeed my.json", "--ds zero3 needs the launcher deepspeed, and no --deepspeed"),
        ("pretrain --ds zero3 --accelerate ddp", "--accelerate ddp has no effect with deepspeed"),
    ],
)
def test_mistakes_end_with_one_line(four_gpus, monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["hf-pretrain", *words.split()])
    with pytest.raises(SystemExit) as end:
        hf_pretrain_cli.main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and len(error.splitlines()) == 1


def test_no_secret_is_printed(tmp_path):
    """The first line repeats the command, and the error repeats unknown flags."""
    words = [
        "--hub_token",
        "hidden-1",
        "--hub-token=hidden2&3",
        "--WANDB_API_KEY",
        "--hidden-4",
        "hf_" + "hidden5" * 4,
    ]
    words += ["--password=hidden6", "--dataset_name", "s3://me:hidden@7@host/a.txt", "--resume_from_checkpoint"]
    words += ["https://host/hidden.not?X-Amz-Signature=hidden8&part=1", "--eos_token", "<end>", "--max_steps", "3"]
    words += ["--sft_args", "--hub_token hidden9 --lora_r 4 --api_key=hidden10 --hub-token='hidden11 hidden12'"]
    command = [sys.executable, str(ROOT / "hf_pretrain_cli.py"), "pretrain", *words]
    result = run(command, cwd=tmp_path, env=cpu_environment(PYTHONPATH=str(ROOT)))
    assert result.returncode == 2 and not re.search("hidden(?!.not)", result.stdout + result.stderr), result.stderr
    printed = shlex.split(result.stderr.splitlines()[0])
    assert printed[-9:-4] == [
        *("s3://<token>@host/a.txt", "--resume_from_checkpoint"),
        *("https://host/hidden.not?X-Amz-Signature=<token>&part=1", "--eos_token", "<end>"),
    ]
    assert printed[-1] == "--hub_token <token> --lora_r 4 --api_key=<token> --hub-token=<token>"


def test_the_command_describes_itself_without_torch():
    def output(*words: str) -> str:
        code = "import sys, hf_pretrain_cli; hf_pretrain_cli.main(); assert 'torch' not in sys.modules"
        return run([sys.executable, "-c", code, *words], cwd=ROOT, check=True).stdout

    assert output("--version").strip() == hf_pretrain.__version__ == importlib.metadata.version("hf_pretrain")
    assert "hf-pretrain list" in output("help") and "--launcher" in output("help")
    names = {*hf_pretrain.PRESETS, *(path.stem for path in (ROOT / "recipes").glob("*.py"))}
    for words, title in (([], "Stages:"), (["--language", "zh"], "训练阶段:")):
        listed = output("list", *words)
        assert set(re.findall(r"^  (\S+) ", listed, re.MULTILINE)) == names and listed.startswith(title)
    assert "embedded" in listed and "Pretrain" not in listed


@pytest.mark.parametrize(
    "words", ["list", "--version", "sft --help", pytest.param("completion", marks=pytest.mark.slow)]
)
def test_a_full_disk_ends_what_the_command_prints_with_a_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "hf_pretrain_cli.py", *words.split()]
        result = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (74, "error: [Errno 28] No space left on device\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads which libraries a process has loaded")
@pytest.mark.parametrize(
    "words", ["chat", "serve --web", "sft --use_cpu", "sft --use_cpu --nproc 2", "completion", "evaluate"]
)
def test_ctrl_c_during_the_imports_ends_a_command_without_a_message(words):
    command = [sys.executable, "hf_pretrain_cli.py", *words.split()]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": cpu_environment(), "text": True}
    with subprocess.Popen(command, cwd=ROOT, **options) as process:
        # A stage runs in a process of its own.
        tree = lambda: [psutil.Process(process.pid), *psutil.Process(process.pid).children()]  # noqa: E731
        wait_for(lambda: any("libtorch" in Path(f"/proc/{each.pid}/maps").read_text() for each in tree()), process)
        process.send_signal(signal.SIGINT)
        output, message = process.communicate(timeout=400)
    # A shell reports 130.
    assert process.returncode == -signal.SIGINT
    assert output == "" and re.fullmatch(r"(\$ .*\n)?", message), message


def test_on_windows_the_command_waits_for_the_run_and_keeps_its_status(monkeypatch):
    monkeypatch.setattr(hf_pretrain_cli, "os", SimpleNamespace(name="nt"))
    handlers: list = []
    monkeypatch.setattr(signal, "signal", lambda *handler: handlers.append(handler))
    with pytest.raises(SystemExit) as end:
        hf_pretrain_cli.start([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    assert end.value.code == 3
    # The run, and not this command, decides when Ctrl-C stops it.
    assert handlers == [(signal.SIGINT, signal.SIG_IGN)]


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


def test_visible_devices_are_read_as_cuda_reads_them(four_gpus, monkeypatch):
    for visible, gpus in (("2, 0", ["2", "0"]), ("", []), ("1,-1,2", ["1"]), ("GPU-89,MIG-1", ["GPU-89", "MIG-1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert hf_pretrain_cli.find_gpus() == gpus


def test_make_refuses_cuda_without_a_gpu(no_gpus):
    result = run(["make", "-n", "pretrain", f"VENV={sys.prefix}", "DEVICE=cuda"], cwd=ROOT)
    assert result.returncode != 0 and "DEVICE=cuda: nvidia-smi lists no GPU." in result.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_ranks_print_one_line_which_comes_last(launcher, tmp_path):
    """The programs of the launchers return 1, and print a traceback of their own below the message."""
    port = [] if launcher == "torchrun" else ["--master_port", str(free_port())]
    words = ["pretrain", "--use_cpu", "--nproc", "2", "--launcher", launcher, *port, "--max_length", "3"]
    command = [sys.executable, "-m", "hf_pretrain_cli", *words, "--output_dir", str(tmp_path / "run")]
    result = run(command, cwd=ROOT, env=cpu_environment())
    printed, *_, error = result.stderr.splitlines()
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert error.startswith("error: --max_length 3 must be at least 8. ") and result.stderr.count("error: ") == 1
    assert f"{launcher} " in printed and " recipes/pretrain.py --use_cpu" in printed


@pytest.mark.slow
@pytest.mark.distributed
# A launcher passes SIGTERM to its ranks, and they save. They save, too, if it is killed.
@pytest.mark.parametrize(
    ("nproc", "victim", "number", "status", "last"),
    [
        (2, "launcher", signal.SIGTERM, 143, "Stopped by SIGTERM"),
        (2, "rank", signal.SIGKILL, 137, "error: process 1 was ended by SIGKILL."),
        (1, "launcher", signal.SIGTERM, 143, "Stopped by SIGTERM"),
        (1, "launcher", signal.SIGINT, 130, "Stopped by SIGINT"),
        (1, "launcher", signal.SIGKILL, -signal.SIGKILL, "Stopped by SIGTERM"),
    ],
)
def test_the_status_of_a_signal_reaches_the_shell(tmp_path, nproc, victim, number, status, last):
    _, _, *flags = command(make_workspace(tmp_path), tmp_path / "run", "--max_steps", "20000")
    watch = Stopwatch()
    with start([sys.executable, "-m", "hf_pretrain_cli", "pretrain", "--nproc", str(nproc), *flags]) as process:
        wait_for((tmp_path / "run/checkpoint-2").is_dir, process)
        watch.begin()
        (process if victim == "launcher" else ranks(process)[1]).send_signal(number)
        output, _ = process.communicate(timeout=500)
    # No rank waits for the one that died.
    assert watch.seconds() < 30
    assert process.returncode == status and "torch/distributed/run.py" not in output, output[-3000:]
    assert last in output.splitlines()[-1], output[-3000:]


@pytest.fixture
def small_group():
    """Return the file that takes a process into a control group with 900 MB of memory."""
    group = Path("/sys/fs/cgroup/memory/hf_pretrain")
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(900 * 10**6))
    except OSError as error:
        pytest.skip(f"no control group of memory: {error}")
    procs = group / "cgroup.procs"
    yield procs
    # A killed process belongs to its group until the kernel has freed its memory.
    deadline = time.monotonic() + 30
    while procs.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    group.rmdir()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "flags, name",
    [
        # Two ranks that import torch need more than a gigabyte, and so does a step of many tokens.
        (["--nproc", "2"], r"process \d"),
        (["--preset", "minimind2-small", "--per_device_train_batch_size", "64", "--fit_micro_batch", "0"], "the run"),
    ],
)
def test_the_command_says_that_the_kernel_ended_a_process_for_want_of_memory(tmp_path, small_group, flags, name):
    words = [sys.executable, "-m", "hf_pretrain_cli", "pretrain", "--use_cpu", *flags]
    group = ["bash", "-c", 'echo $$ > "$0"; exec "$@"', str(small_group)]
    command = [*group, *words, "--output_dir", str(tmp_path / "run")]
    result = run(command, cwd=ROOT, env=cpu_environment())
    assert result.returncode == 71, result.stderr
    assert re.match(rf"error: the kernel ended {name}: the memory of this machine", result.stderr.splitlines()[-1])


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
        (["hf-pretrain", "pretrain", "--launcher", "deep"], {"deepspeed"}),
        (["hf-pretrain", "sft", "--learning_ra"], {"--learning_rate"}),
        (["hf-pretrain", "convert", "--format", "qwen"], {"qwen3", "qwen3_moe"}),
        (["hf-pretrain", "grpo", "--algorithm", ""], {"grpo", "rloo"}),
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
    # The YAML files name data beside the recipes.
    data = re.findall(r"\.\./\.\./([\w/.]+\.jsonl)", (ROOT / "recipes/smollm2/sft.yaml").read_text())
    assert len({*data}) == 5
    assert {f"hf_pretrain/{name}" for name in ("py.typed", "ds_configs/zero2.json", *templates, *data)} <= names
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    installed = run(install)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "work").mkdir()
    environment = {name: value for name, value in cpu_environment().items() if name != "PYTHONPATH"}
    # accelerate's file names its DeepSpeed config relative to the repository. pip would install this script.
    script = tmp_path / "venv/bin/accelerate"
    script.write_text(f"#!{python}\nfrom accelerate.commands.accelerate_cli import main\n\nmain()\n")
    script.chmod(0o755)
    command = [str(tmp_path / "venv/bin/hf-pretrain"), "pretrain", "--preset", "tiny", "--max_steps", "2"]
    flags = ["--accelerate", "zero2", "--master_port", str(free_port()), "--train_fraction", "0.02", "--use_cpu"]
    result = run([*command, *flags, "--output_dir", "out"], cwd=tmp_path / "work", env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f" {packages}/hf_pretrain/recipes/pretrain.py --preset tiny" in result.stderr
    assert (tmp_path / "work/out/model.safetensors").is_file()
    assert "ZeRO-2" in (tmp_path / "work/out/checkpoint-2/manifest.json").read_text()

"""Start the probe through a real launcher, and read the files of the run."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.warm import find_parent


ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# What a run in the process of the tests leaves in its environment. Other runs must not inherit its name, and no parent
# of `tests/warm.py` has it.
LEFT = ("ACCELERATE_", "TORCHELASTIC_", "WANDB_", "MLFLOW_", "TOKENIZERS_PARALLELISM", "PYTORCH_NVML_BASED_CUDA_CHECK")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def make_output(*words: str) -> str:
    """Return what a target of the Makefile prints."""
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def launcher_command(launcher: str, processes: int = 2) -> list[str]:
    """Return the command of `python`, `torchrun`, `deepspeed` or `accelerate:<name of a config file>`."""
    if launcher == "python":
        return [sys.executable]
    if launcher == "torchrun":
        return [str(BIN / "torchrun"), "--nproc_per_node", str(processes), "--master_port", str(free_port())]
    if launcher == "deepspeed":
        devices = ",".join(map(str, range(processes)))
        return [str(BIN / "deepspeed"), "--include", f"localhost:{devices}", "--master_port", str(free_port())]
    config = ROOT / "recipes/accelerate_configs" / f"{launcher.removeprefix('accelerate:')}.yaml"
    ports = ["--main_process_port", str(free_port())]
    return [str(BIN / "accelerate"), "launch", "--config_file", str(config), *ports, "--num_processes", str(processes)]


def cpu_environment(**extra: str) -> dict[str, str]:
    """Return an environment with one thread per rank, LOCAL_SIZE for DeepSpeed on CPUs, and no compiled functions."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LEFT)}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {
        **environment,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "",
        # DeepSpeed compiles Muon's update, which takes longer than a toy run.
        "TORCHDYNAMO_DISABLE": "1",
        **extra,
    }


def process_options(**environment: str) -> dict[str, Any]:
    """Return options for a process in the repository's root, with stdout and stderr in one text."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return {"cwd": ROOT, "env": cpu_environment(**environment), **streams}


def start(
    command: list[str], *, timeout: float = 500, fresh: bool = False, cwd: str | Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """
    Run a command to its end.

    The processes of `python SCRIPT`, `python -c CODE`, torchrun and deepspeed are forked from a parent that has
    imported the libraries (`tests/warm.py`), unless `fresh`: tests of a launcher or of imports need the real command.
    """
    whole = cpu_environment(**environment)
    ranks = _ranks(command, whole)
    if ranks and not fresh and (parent := find_parent(whole)) is not None:
        words, environments = zip(*ranks, strict=True)
        result = parent.run(words, environments, cwd=cwd, timeout=timeout)
        return subprocess.CompletedProcess(command, result.returncode, result.stdout)
    if ranks and Path(command[0]).name == "deepspeed":
        environment.setdefault("LOCAL_SIZE", str(len(ranks)))
    return subprocess.run(command, timeout=timeout, **process_options(**environment) | {"cwd": cwd})


def _ranks(command: list[str], environment: dict[str, str]) -> list[tuple[list[str], dict[str, str]]]:
    """
    Return words and environment of each process that `python`, or torchrun or deepspeed of [`launcher_command`], would
    start; an empty list for other commands.
    """
    if command[0] == sys.executable and (command[1] == "-c" or command[1].endswith(".py")):
        return [(command[1:], environment)]
    launcher = Path(command[0]).name
    if launcher not in ("torchrun", "deepspeed") or not command[5:6] or not command[5].endswith(".py"):
        return []
    size, port, words = (
        len(command[2].split(",")) if launcher == "deepspeed" else int(command[2]),
        command[4],
        command[5:],
    )
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if launcher == "torchrun":
        shared |= {"LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
    else:
        shared |= {"LOCAL_SIZE": str(size), "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    ranks = []
    for rank in map(str, range(size)):
        # DeepSpeed passes the rank as an argument, too.
        argument = [f"--local_rank={rank}"] if launcher == "deepspeed" else []
        ranks.append(([words[0], *argument, *words[1:]], environment | shared | {"RANK": rank, "LOCAL_RANK": rank}))
    return ranks


@dataclass
class Run:
    """The results in the output directory of a finished run."""

    steps: list[dict[str, float]]
    eval_loss: float
    num_tokens: int
    weights: dict[str, torch.Tensor]
    pos_cis_intact: list[bool]
    output: str


def run_probe(launcher: str, arguments: list[str], output_dir: Path, **environment: str) -> Run:
    command = [*launcher_command(launcher), str(Path(__file__).with_name("probe.py"))]
    result = start([*command, *arguments, "--output_dir", str(output_dir)], **environment)
    assert result.returncode == 0, f"{launcher}: {result.stdout[-4000:]}"
    probes = [json.loads(path.read_text()) for path in output_dir.glob("probe_rank*.json")]
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    return Run(
        steps=[entry for entry in history if "loss" in entry],
        eval_loss=[entry["eval_loss"] for entry in history if "eval_loss" in entry][-1],
        num_tokens=history[-1]["num_input_tokens_seen"],
        weights=load_file(next(output_dir.glob("*model.safetensors"))),
        pos_cis_intact=[probe["pos_cis_intact"] for probe in probes],
        output=result.stdout,
    )

"""A small run under every launcher, digests of its result, and tools to disturb it."""

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT, launcher_command, process_options
from tests.invariants.launching import start as run
from tests.toys import EXPERTS, toy_model, write_jsonl


RECIPE = str(ROOT / "recipes/pretrain.py")
STEPS = 8
# Log entries that differ from run to run.
CLOCKS = ("training_seconds", "tokens_per_second", "model_flops_per_second", "mfu", "peak_memory_gib")
CLOCKS += ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def make_workspace(path: Path, **fields: Any) -> Path:
    """Write a toy model with experts and dropout, and enough sentences for `STEPS` steps in two and a half passes."""
    generator = random.Random(0)
    words = ["river", "stone", "green", "light", "walks", "under", "seven", "quiet", "birds", "home", "far", "to"]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 18))) for _ in range(26)]
    tokenizer = train_tokenizer(texts * 10, vocab_size=320)
    sizes = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "dropout": 0.1}
    model = toy_model(**sizes | EXPERTS | fields)
    model.save_pretrained(path / "toy")
    tokenizer.save_pretrained(path / "toy")
    write_jsonl(path / "train.jsonl", texts)
    return path


def command(
    workspace: Path, output_dir: Path, *arguments: str, launcher: str = "python", processes: int = 2
) -> list[str]:
    """Return the command of eight steps with a global batch of eight rows and a checkpoint after every second step."""
    batch = ["4", "2"] if launcher == "python" or processes == 1 else ["2", "2"]
    return [
        *(*launcher_command(launcher, processes), RECIPE, "--use_cpu", "--bf16", "false"),
        *("--model_name_or_path", str(workspace / "toy"), "--dataset_name", str(workspace / "train.jsonl")),
        *("--packing", "none", "--max_length", "32", "--validation_fraction", "0", "--max_steps", str(STEPS)),
        *("--per_device_train_batch_size", batch[0], "--gradient_accumulation_steps", batch[1]),
        *("--logging_steps", "1", "--save_steps", "2", "--learning_rate", "1e-2"),
        *("--output_dir", str(output_dir), *arguments),
    ]


def run_poisoned(words: list[str], poison: str) -> subprocess.CompletedProcess[str]:
    """Run a command of [`command`] with a fault of `tests/faults/poisoned.py`."""
    poisoned = [str(ROOT / "tests/faults/poisoned.py") if word == RECIPE else word for word in words]
    return run(poisoned, POISON=poison, PYTHONPATH=str(ROOT))


def mostly_faults(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return cases as parameters of a test. Those that are not `quick` run in `make faults` alone."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.faults, id=str(case)) for case in cases]


def zero(stage: int) -> list[str]:
    return ["--deepspeed", str(ROOT / f"ds_configs/zero{stage}.json")]


@contextmanager
def start(words: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own process group, and kill what is left of the group at the end."""
    process = subprocess.Popen(words, start_new_session=True, **process_options(**environment))
    try:
        yield process
    finally:
        kill_all([*ranks(process), process])
        process.wait()


def kill_all(processes: Iterable[psutil.Process | subprocess.Popen[str]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


class Stopwatch:
    """
    Seconds scaled to an idle machine, on which starting a run takes ten seconds. On a busy machine, the start and the
    measured time take longer.
    """

    def __init__(self) -> None:
        self._start = self._begin = time.monotonic()

    def begin(self) -> None:
        self._begin = time.monotonic()

    def seconds(self) -> float:
        return (time.monotonic() - self._begin) * min(1.0, 10.0 / (self._begin - self._start))


def ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the training processes, in the order of their ranks."""
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in tree:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = child.cmdline()[:4]
            if any(word.endswith("recipes/pretrain.py") for word in words) and "torchrun" not in " ".join(words[:3]):
                found.append((int(child.environ().get("RANK", 0)), child.pid, child))
    return [child for *_, child in sorted(found)]


def steps_of(output_dir: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory, in their order."""
    return sorted(int(path.name.split("-")[1]) for path in output_dir.glob("checkpoint-*"))


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], *, timeout: float = 500) -> Any:
    """Poll until `condition` holds or the process has ended, and return the value of the condition."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if process.poll() is not None:
            # The condition may have become true between the two checks.
            return condition()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.0005)
    return result


def final_bits(output_dir: Path) -> dict[str, str]:
    """Return digests of the model and of the last checkpoint's content, except times and the manifest."""
    checkpoint = output_dir / f"checkpoint-{STEPS}"
    digests = {"": hashlib.sha256((output_dir / "model.safetensors").read_bytes()).hexdigest()}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.suffix in (".pt", ".pth") and not name.startswith("global_step"):
            digests[name] = _digest(torch.load(path, weights_only=False))
        elif path.name == "trainer_state.json":
            state = json.loads(path.read_text())
            # Under ZeRO-3, Trainer counts only the parameters that are gathered at that moment.
            state.pop("total_flos")
            state["log_history"] = [
                {key: value for key, value in entry.items() if key not in CLOCKS} for entry in state["log_history"]
            ]
            digests[name] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
        elif path.suffix == ".safetensors" or path.name == "data_position.json":
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def _digest(value: Any) -> str:
    """Return a digest of tensors and plain values. The bytes of a pickle would depend on the identity of objects."""
    parts = []
    for path, leaf in tree_flatten_with_path(value)[0]:
        leaf = leaf.contiguous().reshape(-1).view(torch.uint8).numpy() if isinstance(leaf, torch.Tensor) else leaf
        parts.append((keystr(path), leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf)))
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()

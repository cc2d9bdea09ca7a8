"""
Train a toy model without the Unix features that Windows lacks: `python -m tests.without_unix OUTPUT_DIR`.

The script runs on Linux. It hides modules and names before it imports the package, and lets calls fail that fail on
Windows.
"""

import errno
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# These modules check the system when they are imported, so import them before anything is hidden.
import accelerate  # noqa: F401
import datasets  # noqa: F401
import huggingface_hub  # noqa: F401
import psutil
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch._subclasses.fake_tensor
from transformers import AutoConfig, HfArgumentParser, Trainer, TrainingArguments  # noqa: F401


# DeepSpeed does not install on Windows.
HIDDEN_MODULES = ("resource", "fcntl", "pwd", "grp", "termios", "deepspeed")
HIDDEN_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGALRM", "SIGVTALRM", "setitimer", "alarm")
HIDDEN_CALLS = ("fork", "register_at_fork", "killpg", "getpgid", "getuid", "geteuid", "posix_fallocate")


def hide_unix() -> None:
    for name in HIDDEN_MODULES:
        sys.modules[name] = None
    for name in HIDDEN_SIGNALS:
        delattr(signal, name)
    for name in HIDDEN_CALLS:
        delattr(os, name)
    # On Linux, this function removes directories by their descriptors.
    shutil._use_fd_functions = False
    _refuse("open", _is_directory)
    _refuse("fsync", _is_read_only)
    _refuse("link", lambda *_: True)
    _refuse("rename", lambda source, target: os.path.lexists(target) or _is_open(source))
    _refuse("replace", lambda source, target: os.path.isdir(target) or _is_open(source) or _is_open(target))
    for name in ("unlink", "remove", "rmdir"):
        _refuse(name, _is_open)
    memory_info = psutil.Process.memory_info

    def with_peak(process: psutil.Process) -> SimpleNamespace:
        info = memory_info(process)
        return SimpleNamespace(rss=info.rss, vms=info.vms, peak_wset=info.rss)

    psutil.Process.memory_info = with_peak


def _refuse(name: str, is_refused: Callable[..., bool]) -> None:
    call = getattr(os, name)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if is_refused(*args[: 2 if name in ("link", "rename", "replace") else 1]):
            raise PermissionError(errno.EACCES, f"os.{name} is refused here", *map(str, args[:1]))
        return call(*args, **kwargs)

    setattr(os, name, refusing)


def _is_directory(path: Any) -> bool:
    return os.path.isdir(path)


def _is_read_only(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def _is_open(path: Any) -> bool:
    """Return whether this process has the file, or a file below the directory, open or mapped."""
    path = os.path.realpath(path)
    files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    files += [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(file == path or file.startswith(f"{path}/") for file in files)


def make_toy_trainer(output_dir: Path) -> Any:
    from tests.training.test_trainer import make_documents, make_trainer

    arguments = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    arguments |= {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 0.01}
    return make_trainer(output_dir, make_documents(), arguments=arguments)


def main(output_dir: Path) -> None:
    hide_unix()
    from hf_pretrain.data.parts import map_parts
    from hf_pretrain.tokenizer.chat_template import _cpu_time_limit

    with _cpu_time_limit(1):
        pass
    assert map_parts([[1], [1, 2]], len, num_proc=1, desc="Counting") == [1, 2]
    trainer = make_toy_trainer(output_dir / "whole")
    trainer.train()
    # Save over the existing model, as a second run does.
    for _ in range(2):
        trainer.save_model()
    shutil.copytree(output_dir / "whole/checkpoint-2", output_dir / "resumed/checkpoint-2")
    trainer = make_toy_trainer(output_dir / "resumed")
    trainer.train(resume_from_checkpoint=str(output_dir / "resumed/checkpoint-2"))
    # Save step 4 over an existing one, as a run that resumed from step 2 does.
    trainer = make_toy_trainer(output_dir / "resumed")
    trainer.train(resume_from_checkpoint=str(output_dir / "resumed/checkpoint-2"))
    trainer.save_model()
    assert sys.modules["fcntl"] is None and not hasattr(os, "fork"), "something brought them back"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))

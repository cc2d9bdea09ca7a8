"""
The programs that start the processes of a run.

The command reads this file without importing the package, so it imports only the standard library.
"""

import os
import re
from typing import Any, NamedTuple


# The values that a launcher's words may have in the record of a run; others may be anything.
_VALUES = {
    "quiet": "--quiet",
    "nproc": r"(?P<nproc>\d+)",
    "devices": r"(?P<devices>[\d,]+)",
    "config": r"(.*/)?recipes/accelerate_configs/(?P<config>\w+)\.yaml",
}


class Launcher(NamedTuple):
    """
    A program that starts the processes of a run.

    Args:
        command (`str`): the program, and its first word if it needs one. Records name the launcher so.
        variable (`str`): an environment variable that it sets in each process.
        words (`str`): its words before the recipe, separated by `; `, which are left out if a value is `None`.
        main (`str`, *optional*): the module whose `main` runs it in this process; `None` to replace this process.
        config (`str`, *optional*): the flag of `hf-pretrain` that chooses its config, and implies the launcher.
        cpu_environment (`dict[str, str]`): its environment variables on a CPU.
        num_levels (`int`): how many processes stand between the user's command and a rank.
        is_optional (`bool`): whether a single process starts without it.
        limits_threads (`bool`): whether it limits the threads of several processes by itself, also on GPUs.
    """

    command: str
    variable: str
    words: str
    main: str | None = None
    config: str | None = None
    cpu_environment: dict[str, str] = {}
    num_levels: int = 1
    is_optional: bool = False
    limits_threads: bool = False

    def write(self, values: dict[str, Any]) -> list[str]:
        """Return the words after the program."""
        known = (text for text in self.words.split("; ") if None not in map(values.get, re.findall(r"{(\w+)}", text)))
        return [*self.command.split()[1:], *(word.format_map(values) for text in known for word in text.split())]

    def read(self, text: str) -> dict[str, str] | None:
        """Return the values in the words of a command, each with a newline; `None` for other words than its own."""
        # Users also write `--nproc-per-node=2`, and name a port.
        words = re.sub("[-_]", "[-_]", self.words).replace("; ", "\n|").replace(" ", "[\n=]")
        words = re.sub(r"{(\w+)}", lambda name: _VALUES.get(name[1], ".*"), words)
        program, port = self.command.replace(" ", "\n"), r"--(master|main_process)_port\n\d+"
        found = re.fullmatch(rf".*\b{program}\n(({words}|{port})\n)*".replace("\n|", "|"), text)
        return None if found is None else {name: value for name, value in found.groupdict().items() if value}


_TORCHRUN = "--standalone; --signals-to-handle {signals}; --nproc_per_node {nproc}"
_ACCELERATE = "--config_file {config}; --deepspeed_config_file {deepspeed}; --num_processes {nproc}"
# DeepSpeed ignores CUDA_VISIBLE_DEVICES if it gets --include, so the GPUs go into the include list. It warns if it has
# to find out that there is no GPU. Its runner starts a launcher, which starts the ranks.
_DEEPSPEED = "{quiet}; --include localhost:{devices}; --master_port {port}"
_ON_CPU = {"DS_ACCELERATOR": "cpu"}
LAUNCHERS = {
    "torchrun": Launcher(
        "torchrun", "TORCHELASTIC_RUN_ID", _TORCHRUN, "torch.distributed.run", is_optional=True, limits_threads=True
    ),
    "deepspeed": Launcher("deepspeed", "CROSS_SIZE", _DEEPSPEED, config="ds", cpu_environment=_ON_CPU, num_levels=2),
    "accelerate": Launcher(
        *("accelerate launch", "ACCELERATE_DYNAMO_USE_DYNAMIC", f"{_ACCELERATE}; --main_process_port {{port}}"),
        *("accelerate.commands.accelerate_cli", "accelerate"),
    ),
}


def launcher() -> str:
    """Return the command that started this process, by the environment variables that it sets; `python` alone."""
    # `accelerate launch` starts torchrun's agent, which sets its own variables too. Look for accelerate's first.
    found = (each.command for each in reversed(LAUNCHERS.values()) if each.variable in os.environ)
    return next(found, "python")


def read_launch(words: list[str]) -> list[str] | None:
    """
    Return the flags of `hf-pretrain` for the words before a recipe; `None` for words that `hf-pretrain` does not
    write, such as other options of a launcher.
    """
    text = re.sub(r"\A.*python[\d.]*t?(\.exe)?\n", "", "".join(f"{word}\n" for word in words))
    for name, each in LAUNCHERS.items():
        if (found := each.read(text)) is not None:
            number = found.get("nproc") or str(len(found.get("devices", "0").split(",")))
            chosen = [f"--{each.config}", found["config"]] if "config" in found else ["--launcher", name]
            return ["--nproc", number, *([] if each.is_optional else chosen)]
    return None if text else ["--nproc", "1"]

"""
Start any recipe of hf_pretrain, from any directory.

    hf-pretrain list
    hf-pretrain completion bash > ~/.local/share/bash-completion/completions/hf-pretrain
    hf-pretrain pretrain --preset tiny --max_steps 100
    hf-pretrain sft --nproc 4
    hf-pretrain pretrain --nproc 2 --launcher deepspeed --ds zero3

`hf-pretrain` prints the command that it runs, so that you can copy and change it. It passes all flags that are not
listed below to the recipe; `hf-pretrain pretrain --help` lists the flags of a recipe.
"""

# This module stands outside the package, because importing the package takes seconds, and the recipe imports it again.

import argparse
import contextlib
import difflib
import io
import itertools
import json
import logging
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn


# A wheel holds the recipes and the DeepSpeed configs inside the package, a checkout beside it.
_HERE = Path(__file__).resolve().parent
FILES = _HERE / "hf_pretrain" if (_HERE / "hf_pretrain/recipes").is_dir() else _HERE
RECIPES = FILES / "recipes"
_STAGES, _LAUNCHERS, _SECRETS, _TEXTS, _EMBEDDED = (
    runpy.run_path(str(_HERE / f"hf_pretrain/{name}.py"))
    for name in ("runtime/stages", "runtime/launchers", "runtime/secret_words", "runtime/texts", "runtime/embedded")
)
STAGES, LAUNCHED, LAUNCHERS = tuple(_STAGES["STAGES"]), _STAGES["LAUNCHED"], _LAUNCHERS["LAUNCHERS"]
TOOLS = tuple(sorted({path.stem for path in RECIPES.glob("*.py")} - {*STAGES}))
COMMANDS = (*STAGES, *TOOLS, "list", "completion")
DS_CONFIGS = tuple(sorted(path.stem for path in (FILES / "ds_configs").glob("*.json")))
_NO_MEMORY = 71  # `EXIT_NO_MEMORY` of runtime/command_line.py, which needs the package
ACCELERATE_CONFIGS = tuple(sorted(path.stem for path in (RECIPES / "accelerate_configs").glob("*.yaml")))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def say(text: str) -> None:
    """Print a line on standard error. If nobody can read it, go on."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    """Print a line, and exit with the status of a user's mistake."""
    say(f"error: {message}")
    raise SystemExit(2)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that this command understands itself."""
    parser = _Parser(prog="hf-pretrain STAGE", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    flags = parser.add_argument_group("Processes and launcher (training stages and evaluate)")
    flags.add_argument("--nproc", type=int, help="Number of processes; by default one per GPU, or one in all.")
    flags.add_argument("--launcher", choices=tuple(LAUNCHERS), help="By default torchrun.")
    flags.add_argument(
        "--ds",
        choices=DS_CONFIGS,
        help="A config of ds_configs/; starts deepspeed. By default zero2 (evaluate: zero3), unless you pass --config "
        "or --deepspeed.",
    )
    starts = "A config of recipes/accelerate_configs/, by default ddp; starts accelerate."
    flags.add_argument("--accelerate", choices=ACCELERATE_CONFIGS, help=starts)
    flags.add_argument("--master_port", type=int, help="Port of deepspeed and accelerate; by default a free one.")
    return parser


def find_gpus() -> list[str]:
    """Return the numbers of the GPUs to use: `CUDA_VISIBLE_DEVICES`, or all NVIDIA GPUs of the machine."""
    if shutil.which("nvidia-smi") is None:
        # The recipe finds the accelerators of other vendors by itself.
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    present = re.findall(r"^GPU (\d+):", listed, re.MULTILINE)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # As CUDA does, ignore all entries from the first one on that names no GPU, such as -1.
    entries = (entry.strip() for entry in visible.split(","))
    return list(itertools.takewhile(lambda entry: entry in present or entry.startswith(("GPU-", "MIG-")), entries))


def asks_for_help(words: list[str]) -> bool:
    return not {"-h", "--help", "--help-all"}.isdisjoint(words)


def make_command(stage: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """
    Return the environment variables and the words of the command that starts a recipe.

    Args:
        stage (`str`): name of the recipe.
        words (`list[str]`): flags of this command and of the recipe, in any order.
    """
    recipe = _shorten(RECIPES / f"{stage}.py")
    # An exported page has no model that a server could run.
    if stage == "serve" and any(Path(word, "wllama.wasm").is_file() for word in words):
        return {}, [_shorten(Path(sys.executable)), "-m", "hf_pretrain.inference.static_page", *words]
    if stage not in LAUNCHED or asks_for_help(words):
        return {}, [_shorten(Path(sys.executable)), recipe, *words]
    args, rest = make_parser().parse_known_args(words)
    flags = _read_recipe_flags(rest)
    launcher, defaults = _choose_launcher(args, flags), LAUNCHED[stage]
    gpus = [] if flags.use_cpu else find_gpus()
    nproc = (defaults.num_processes or len(gpus) or 1) if args.nproc is None else args.nproc
    if nproc < 1 or (gpus and nproc > len(gpus)):
        fail(f"--nproc {nproc} is not possible: start at least one process, and at most one per GPU ({len(gpus)}).")
    environment = _launch_environment(launcher, nproc, gpus) | (launcher.cpu_environment if flags.use_cpu else {})
    if launcher.config == "ds" and (args.ds or not (flags.deepspeed or flags.config)):
        rest += ["--deepspeed", _shorten(FILES / f"ds_configs/{args.ds or defaults.ds_config}.json")]
    return environment, [*_launch(launcher, args, nproc, gpus, flags.log_level), recipe, *rest]


def _read_recipe_flags(words: list[str]) -> argparse.Namespace:
    """Return the flags of the recipe that decide how to start it."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--deepspeed")
    parser.add_argument("--log_level", "--log-level")
    # The recipe reads the same words as false.
    read = lambda word: word.lower() not in ("no", "false", "f", "n", "0")  # noqa: E731
    parser.add_argument("--use_cpu", "--use-cpu", nargs="?", const=True, default=False, type=read)
    return parser.parse_known_args(words)[0]


def _choose_launcher(args: argparse.Namespace, flags: argparse.Namespace) -> Any:
    """Return the launcher that the flags name or imply. Refuse flags that have no effect."""
    implied = [name for name, each in LAUNCHERS.items() if each.config and vars(args)[each.config]]
    name = args.launcher or [*implied, "torchrun"][0]
    launcher = LAUNCHERS[name]
    if args.ds and (launcher.config != "ds" or flags.deepspeed):
        fail(f"--ds {args.ds} needs the launcher deepspeed, and no --deepspeed. Leave one of the flags out.")
    if args.accelerate and launcher.config != "accelerate":
        fail(f"--accelerate {args.accelerate} has no effect with {name}. Leave one of the flags out.")
    return launcher


def _launch_environment(launcher: Any, nproc: int, gpus: list[str]) -> dict[str, str]:
    """Return the environment variables that assign GPUs or cores to the processes."""
    # torch has no libuv on Windows, and its launcher asks for it by default.
    environment = {"USE_LIBUV": "0"} if os.name == "nt" and nproc > 1 else {}
    if gpus and "{devices}" not in launcher.words:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:nproc])
    if not gpus and nproc > 1:
        # On CPUs, DeepSpeed takes the number of devices from LOCAL_SIZE.
        environment["LOCAL_SIZE"] = str(nproc)
    if nproc > 1 and (not gpus or launcher.limits_threads):
        # On GPUs, this is torchrun's own choice, of which it would print four lines.
        threads = 1 if gpus else max(1, (os.cpu_count() or 1) // nproc)
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    return environment


def waits() -> dict[str, str]:
    """
    Return how long threads of GNU OpenMP wait for the others in a loop.

    NOTE: its default of 300,000 turns takes the cores from other processes. On two cores, three runs of the preset
    `tiny` at once trained at 360 to 2,110 tokens per second with the default, and at 1,780 to 2,250 with 10,000 turns.
    A run alone trains as fast with both. OpenMP reads the variable when torch is imported.
    """
    return {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "10000"}


def _shorten(path: Path) -> str:
    """Return a path, relative to the working directory if the path is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _launch(launcher: Any, args: argparse.Namespace, nproc: int, gpus: list[str], log_level: str | None) -> list[str]:
    """Return the words of the command before the recipe."""
    if launcher.is_optional and nproc == 1:
        return [_shorten(Path(sys.executable))]
    # The programs lie beside Python or, after `pip install --user`, beside this command.
    places = [str(Path(program).absolute().parent) for program in (sys.executable, sys.argv[0])]
    program = launcher.command.split()[0]
    found = shutil.which(program, path=os.pathsep.join(places))
    if found is None:
        fail(f"{program} is not installed. DeepSpeed supports Linux only; elsewhere, use torchrun.")
    # By itself, torchrun stops at a hangup under `nohup`, too.
    is_nohup = os.name == "posix" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    config = args.accelerate or "ddp"
    values = {
        "signals": "SIGTERM,SIGINT,SIGQUIT" if is_nohup else None,
        "nproc": nproc,
        "devices": ",".join(gpus[:nproc] if gpus else map(str, range(nproc))),
        "port": args.master_port or _free_port(),
        # Otherwise DeepSpeed describes every process that it starts. Its errors still appear.
        "quiet": None if log_level in ("info", "debug") else "--quiet",
        "config": _shorten(RECIPES / f"accelerate_configs/{config}.yaml"),
        # The path in the file holds for the directory of the repository only.
        "deepspeed": _shorten(FILES / f"ds_configs/{config}.json") if config.startswith("zero") else None,
    }
    return [_shorten(Path(found)), *launcher.write(values)]


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def start(command: list[str], environment: dict[str, str], *, is_stage: bool = True) -> NoReturn:
    """Run a stage or its launcher, and end with its status. A tool replaces this process, except on Windows."""
    mains = {each.command.split()[0]: each.main for each in LAUNCHERS.values()}
    if module := mains.get(Path(command[0]).stem):  # without .exe
        # The launchers read their own variables, and those of torch, when they are imported.
        os.environ.update(environment)
        raise SystemExit(_run_launcher(module, command))
    if is_stage or os.name == "nt":
        raise SystemExit(_run_process(command, environment))
    os.execve(command[0], command, environment)


def _run_process(command: list[str], environment: dict[str, str]) -> int:
    """Run a command that stops with its parent, pass on signals, and return its exit status."""
    kills = _count_memory_kills()
    parents = int(environment.get("HF_PRETRAIN_PARENTS", 0)) + 1
    process = subprocess.Popen(command, env=environment | {"HF_PRETRAIN_PARENTS": str(parents)})
    # Ctrl-C reaches both processes. A training takes the copy for the same signal.
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if os.name == "posix" else ("SIGINT",):
        if signal.getsignal(number := signal.Signals[name]) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN if os.name == "nt" else lambda number, _: process.send_signal(number))
    if (status := process.wait()) == -signal.SIGINT:
        raise KeyboardInterrupt
    if status == -signal.SIGKILL and _count_memory_kills() > kills:
        return _say_killed("the run")
    return status if status >= 0 else 128 - status


def _say_killed(name: str) -> int:
    say(
        f"error: the kernel ended {name}: the memory of this machine does not suffice. To resume with "
        "--resume_from_checkpoint auto, halve --per_device_train_batch_size and double --gradient_accumulation_steps, "
        "or add --activation_checkpointing."
    )
    return _NO_MEMORY


def _count_memory_kills() -> int:
    """Return how many processes the kernel has ended because memory had run out; 0 where it does not count them."""
    with contextlib.suppress(OSError, TypeError):
        return int(re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)[1])  # type: ignore[index]
    return 0


def _run_launcher(module: str, command: list[str]) -> int:
    """
    Run the `main` of a module, and return the exit status of the rank that ended first with an error.

    The programs of these launchers return 1 and print a traceback of their own, which hides the message of the rank.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # They log signals and exit statuses, below the message of the rank, too.
    for part in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{part}").disabled = True
    kills = _count_memory_kills()
    try:
        sys.argv = command
        import_module(module).main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGKILL and _count_memory_kills() > kills:
            return _say_killed(f"process {rank}")
        if failure.exitcode < 0:
            say(f"error: process {rank} was ended by {failure.signal_name()}.")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def print_list(words: Sequence[str] = ()) -> None:
    """Print the stages and tools with their descriptions, and the presets and configs, as the words after it say."""
    parser = _Parser(prog="hf-pretrain list", allow_abbrev=False)
    languages, default = tuple(_TEXTS["LANGUAGES"]), _TEXTS["terminal_language"]()
    parser.add_argument("--language", choices=languages, default=default, help="by default the environment's")
    language = parser.parse_args(words).language
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The environment may ask for Chinese on a terminal that cannot show it.
        sys.stdout.reconfigure(errors="replace")
    t = _TEXTS["translation"](language)
    chinese = json.loads((RECIPES / "chinese.json").read_text(encoding="utf-8")) if language == "zh" else {}
    for title, names in (("Stages", STAGES), ("Tools", TOOLS)):
        print(f"{t(title)}:")
        for name in names:
            # Below the quotes.
            english = (RECIPES / f"{name}.py").read_text(encoding="utf-8").splitlines()[1]
            print(f"  {name:14}{chinese.get(name, english)}")
    print(f"{t('Presets')} (--preset):")
    # The first line of its file describes a preset, for pretraining if it has one.
    files = {path.parent.name: path for stage in ("sft", "pretrain") for path in RECIPES.glob(f"*/{stage}.yaml")}
    for name in sorted(files.keys() - {"base"}):
        english = files[name].read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        print(f"  {name:18}{chinese.get(name, english)}")
    print(f"DeepSpeed {t('configs')} (--ds): {', '.join(DS_CONFIGS)}")
    print(f"accelerate {t('configs')} (--accelerate): {', '.join(ACCELERATE_CONFIGS)}")
    kinds = "embedded[:part], a file, a glob, a directory, a Hub id, owner/name:file, s3://..."
    print(f"{t('Data')} (--dataset_name): {kinds}")
    licences = (f"{name} {each.licence} ({each.package})" for name, each in _EMBEDDED["LICENCES"].items())
    print(f"{t('Licences')}: {', '.join(licences)}")


def print_completion(shell: str) -> None:
    """Print a script with which a shell completes commands and flags."""
    import shtab

    from hf_pretrain.runtime.parser import recipe_parser

    if shell not in shtab.SUPPORTED_SHELLS:
        fail(f"completion {shell} is unknown; use {', '.join(sorted(shtab.SUPPORTED_SHELLS))}.")
    parser = argparse.ArgumentParser(prog="hf-pretrain")
    commands = parser.add_subparsers()
    for name in COMMANDS:
        parents = [make_parser()] if name in LAUNCHED else []
        # A recipe exits here if its extra is not installed. The shell then completes no flags of this recipe.
        with contextlib.suppress(SystemExit):
            parents += [recipe_parser(RECIPES / f"{name}.py")] if name in STAGES + TOOLS else []
        command = commands.add_parser(name, add_help=False, parents=parents, conflict_handler="resolve", help=name)
        for action in command._actions:
            if action.choices is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    # The recipes have replaced the standard output by one that drops what cannot be written.
    print(shtab.complete(parser, shell), file=sys.__stdout__, flush=True)


def show(stage: str, words: list[str]) -> None:
    """Print what this command prints itself. A disk that is full gives the status of the recipes for it."""
    try:
        if stage in ("help", "-h", "--help"):
            print(f"{__doc__.strip()}\n")
            print_list()
            print(f"\n{make_parser().format_help()}")
        elif stage == "--version":
            print(version("hf_pretrain"))
        elif stage == "list":
            print_list(words)
        elif stage == "completion":
            print_completion(words[0] if words else "bash")
        elif stage in LAUNCHED and asks_for_help(words):
            print(make_parser().format_help())
        elif stage not in COMMANDS:
            near = "".join(f"; the nearest one is {name}" for name in difflib.get_close_matches(stage, COMMANDS, n=1))
            fail(f"{stage} is unknown{near}. Use one of {', '.join(COMMANDS)}.")
        print(end="", flush=True)
    except OSError as error:
        say(f"error: {error}")
        # At a regular exit, Python would write the rest once more.
        os._exit(74)


def main() -> None:
    try:
        _run()
    except KeyboardInterrupt:
        # The launchers are imported in this process. The status tells the shell that the user has interrupted it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def _run() -> None:
    stage, *words = sys.argv[1:] or ["help"]
    if os.name == "posix" and stage not in STAGES + TOOLS:
        # Let `| head` end this command without a message.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    show(stage, words)
    if stage in STAGES + TOOLS:
        environment, command = make_command(stage, words)
        # A shell takes a quoted `NAME=value` for a command, so quote only the value.
        assignments = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        printed = " ".join([*assignments, shlex.join(_SECRETS["hide_secrets"](command))])
        say(f"$ {printed}")
        # The launchers find Python through PATH. The record of the run keeps the command.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = waits() | os.environ | environment | {"PATH": path, "HF_PRETRAIN_COMMAND": printed}
        start(command, environment, is_stage=stage in STAGES)


if __name__ == "__main__":
    main()

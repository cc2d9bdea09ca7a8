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
import ast
import contextlib
import difflib
import itertools
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import yaml


# A wheel holds the recipes and the DeepSpeed configs inside the package, a checkout beside it.
_HERE = Path(__file__).resolve().parent
FILES = _HERE / "hf_pretrain" if (_HERE / "hf_pretrain/recipes").is_dir() else _HERE
RECIPES = FILES / "recipes"
TOOLS = ("chat", "serve", "evaluate", "convert", "tokenizer", "doctor", "compare", "data")
STAGES = ("pretrain", "sft", "dpo", "distill", "grpo")
# Recipes that can run as several processes.
LAUNCHED = (*STAGES, "evaluate")
LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
# The launchers that read a flag of this command. torchrun finds a free port by itself.
READERS = {"ds": ("deepspeed",), "accelerate": ("accelerate",), "master_port": ("deepspeed", "accelerate")}
PRESETS = tuple(sorted(path.parent.name for path in RECIPES.glob("*/pretrain.yaml") if path.parent.name != "base"))
DS_CONFIGS = tuple(sorted(path.stem for path in (FILES / "ds_configs").glob("*.json")))
ACCELERATE_CONFIGS = tuple(sorted(path.stem for path in (RECIPES / "accelerate_configs").glob("*.yaml")))
EXIT_MISTAKE = 2
# The words that some flags of this command accept.
KNOWN_WORDS = {
    "launcher": LAUNCHERS,
    "ds": DS_CONFIGS,
    "accelerate": ACCELERATE_CONFIGS,
    "preset": ("auto", *PRESETS),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def fail(message: str) -> NoReturn:
    """Print a line, and exit with the status of a user's mistake."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(EXIT_MISTAKE)


# Below this similarity, long flags share only parts such as `_size`.
FLAG_SIMILARITY = 0.75


def hint(word: str, known: Iterable[str], text: str = "; the nearest one is {}", *, cutoff: float = 0.6) -> str:
    """Return `text` with the known word that is most similar to `word`, or "" below a similarity of `cutoff`."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return text.format(found[0]) if found else ""


def port(text: str) -> int:
    """Parse the number of a TCP port, as a type of argparse."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port from 1 to 65535")
    return int(text)


def choose(flag: str) -> Callable[[str], str]:
    """Return an argparse type that accepts the known words of a flag. It refuses others and names a similar one."""
    known = KNOWN_WORDS[flag]

    def check(word: str) -> str:
        if word not in known:
            fail(f"--{flag} {word} is unknown{hint(word, known)}. All: {', '.join(known)}.")
        return word

    return check


def make_parser() -> _Parser:
    """Return the parser of the flags that this command understands itself."""
    parser = _Parser(prog="hf-pretrain STAGE", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int, help="Number of processes; by default one per GPU, or one in all.")
    parser.add_argument(
        "--launcher", type=choose("launcher"), help=f"One of {', '.join(LAUNCHERS)}; the first one by default."
    )
    parser.add_argument(
        "--ds",
        type=choose("ds"),
        help="A DeepSpeed config of ds_configs/, by default zero2 (evaluate: zero3); starts deepspeed.",
    )
    parser.add_argument(
        "--accelerate",
        type=choose("accelerate"),
        help="A config of recipes/accelerate_configs/, by default ddp; starts accelerate.",
    )
    parser.add_argument(
        "--master_port", type=port, metavar="N", help="Port of deepspeed and accelerate, by default 29500."
    )
    parser.add_argument(
        "--preset",
        type=choose("preset"),
        help="The model and its YAML file; auto is minimind2-small on NVIDIA GPUs, and otherwise tiny.",
    )
    return parser


def launcher_flags(stage: str) -> list[argparse.Action]:
    """Return the flags that this command reads itself if it starts a recipe."""
    return make_parser()._actions if stage in LAUNCHED else []


def find_gpus() -> list[str]:
    """Return the numbers of the GPUs to use: `CUDA_VISIBLE_DEVICES`, or all NVIDIA GPUs of the machine."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        # There is no NVIDIA driver. The recipe finds the accelerators of other vendors by itself.
        return []
    present = [line.split(":")[0].removeprefix("GPU ") for line in listed.splitlines() if line.startswith("GPU ")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    # As CUDA does, ignore all entries from the first one on that names no GPU, such as -1.
    entries = (entry.strip() for entry in visible.split(","))
    return list(itertools.takewhile(lambda entry: entry in present or entry.startswith(("GPU-", "MIG-")), entries))


def hides_gpus() -> bool:
    """Return whether `CUDA_VISIBLE_DEVICES` hides all GPUs: it is empty or begins with -1."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")


def make_command(stage: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """
    Return the environment variables and the words of the command that starts a recipe.

    Args:
        stage (`str`): name of the recipe.
        words (`list[str]`): flags of this command and of the recipe, in any order.
    """
    recipe, python = _shorten(RECIPES / f"{stage}.py"), _shorten(Path(sys.executable))
    if stage not in LAUNCHED:
        return {}, [python, recipe, *words]
    args, rest = make_parser().parse_known_args(words)
    flags = _read_recipe_flags(rest)
    if flags.help:
        return {}, [python, recipe, *rest]
    args.launcher = _choose_launcher(args, flags)
    gpus = [] if flags.use_cpu else find_gpus()
    if args.preset is not None:
        rest = [*_preset_config(stage, args.preset, flags, gpus), *rest]
    # lm-eval's tasks, which many evaluations run, need a single process.
    default = 1 if stage == "evaluate" else len(gpus) or 1
    nproc = default if args.nproc is None else args.nproc
    if nproc < 1 or (gpus and nproc > len(gpus)):
        fail(
            f"--nproc {nproc} is not possible: this machine has {len(gpus) or 'no'} GPU(s) to use. Start at least one "
            "process, and at most one per GPU."
        )
    environment = _launch_environment(args, nproc, gpus)
    if not gpus and not flags.use_cpu and "CUDA_VISIBLE_DEVICES" in os.environ:
        # The printed command then sees the same devices in another shell.
        environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    uses_deepspeed = args.launcher == "deepspeed" or (args.accelerate or "").startswith("zero")
    if uses_deepspeed and find_spec("deepspeed") is None:
        fail("This launch needs DeepSpeed, which is not installed. It supports Linux only; elsewhere, use torchrun.")
    if args.launcher == "deepspeed" and hides_gpus():
        # DeepSpeed replaces CUDA_VISIBLE_DEVICES for its processes, so the variable does not hide the GPUs from them.
        rest += ["--use_cpu"]
        flags.use_cpu = True
    if args.launcher == "deepspeed" and flags.use_cpu:
        # DeepSpeed warns if it has to find out that there is no GPU.
        environment["DS_ACCELERATOR"] = "cpu"
    is_quiet = (flags.log_level or config_value(flags.config, "log_level")) not in ("info", "debug")
    if args.launcher == "deepspeed" and (flags.deepspeed or config_value(flags.config, "deepspeed")) is None:
        # transformers evaluates only under ZeRO-3.
        config = args.ds or ("zero3" if stage == "evaluate" else "zero2")
        rest += ["--deepspeed", _shorten(FILES / f"ds_configs/{config}.json")]
    return environment, [*_launch(args, nproc, gpus, is_quiet), recipe, *rest]


def _read_recipe_flags(words: list[str]) -> argparse.Namespace:
    """Return the flags of the recipe that decide how to start it."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", "--help-all", action="store_true", dest="help")
    for names in (["--config"], ["--deepspeed"], ["--log_level", "--log-level"]):
        parser.add_argument(*names)
    parser.add_argument("--use_cpu", "--use-cpu", nargs="?", const="true", default="false")
    flags, _ = parser.parse_known_args(words)
    # The recipe reads the same words as false.
    flags.use_cpu = flags.use_cpu.lower() not in ("no", "false", "f", "n", "0")
    return flags


class ConfigLoader(yaml.SafeLoader):
    """YAML loader that refuses a key that stands twice. PyYAML silently takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_config(path: Path, *, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """
    Return the keys and values of a YAML file. Its key `extends` may name another file, relative to this one, whose
    values are the defaults.

    Raises:
        `ValueError`: if a file cannot be read, is not YAML, holds no mapping, or extends itself.
    """
    if path.resolve() in extended_by:
        raise ValueError(f"--config {path} extends itself, perhaps through other files. Remove one `extends`.")
    try:
        # PyYAML recognises UTF-16 in bytes.
        content = yaml.load(path.read_bytes(), Loader=ConfigLoader)
    except FileNotFoundError:
        raise ValueError(f"--config {path}: no such file. Check the path.") from None
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}. Name a YAML file.") from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"--config {path} is not text in UTF-8 or UTF-16: {error}. Save it in UTF-8.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"--config {path} has too many nested brackets. Write `key: value` lines.") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold `key: value` lines, such as `learning_rate: 1e-3`.")
    parent = content.pop("extends", None)
    if parent is None:
        return content
    return read_config(path.parent / str(parent), extended_by=(*extended_by, path.resolve())) | content


def config_value(config: str | None, name: str) -> Any:
    """Return the value of a flag in a YAML file of a recipe, or in a file that it extends; `None` without a value."""
    try:
        return None if config is None else read_config(Path(config)).get(name)
    except ValueError:
        # The recipe reads the file, too, and prints what is wrong with it.
        return None


def writer_of(directory: str) -> str | None:
    """Return the command that writes a directory by default, if there is one, such as `out/sft-tiny`."""
    for path in sorted(RECIPES.glob("*/*.yaml")):
        if path.stem in STAGES and config_value(str(path), "output_dir") == directory.rstrip("/"):
            return f"hf-pretrain {path.stem} --preset {path.parent.name}"
    return None


def _choose_launcher(args: argparse.Namespace, flags: argparse.Namespace) -> str:
    """Return the launcher that the flags name or imply. Refuse flags that have no effect."""
    if args.ds is not None and flags.deepspeed is not None:
        fail(
            f"--ds {args.ds} and --deepspeed {flags.deepspeed} exclude each other: both name a DeepSpeed config. "
            "Leave one of them out."
        )
    if (args.accelerate or "").startswith("zero") and flags.deepspeed is not None:
        fail(
            f"--accelerate {args.accelerate} and --deepspeed {flags.deepspeed} exclude each other: both name a "
            "DeepSpeed config. Leave one of them out."
        )
    implied = next((READERS[name][0] for name in ("ds", "accelerate") if getattr(args, name) is not None), "torchrun")
    launcher = args.launcher or implied
    for name, readers in READERS.items():
        value = getattr(args, name)
        if value is not None and launcher not in readers:
            fail(
                f"--{name} {value} has no effect with {launcher}. Leave it out, or choose --launcher "
                f"{' or '.join(readers)}."
            )
    return launcher


def _preset_config(stage: str, preset: str, flags: argparse.Namespace, gpus: list[str]) -> list[str]:
    """Return the words that name the YAML file of a preset."""
    if flags.config is not None:
        fail("--preset and --config exclude each other: both name a YAML file. Leave one of them out.")
    if preset == "auto":
        preset = "minimind2-small" if gpus else "tiny"
    path = RECIPES / preset / f"{stage}.yaml"
    # Without a file for evaluation, evaluate the pretrained model of the preset on its validation set.
    return ["--config", _shorten(path if path.is_file() else path.with_name("pretrain.yaml"))]


def _launch_environment(args: argparse.Namespace, nproc: int, gpus: list[str]) -> dict[str, str]:
    """Return the environment variables that assign GPUs or cores to the processes."""
    environment: dict[str, str] = {}
    if gpus and args.launcher != "deepspeed":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:nproc])
        if args.launcher == "torchrun" and nproc > 1:
            # torchrun's own choice, of which it would print four lines.
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    elif not gpus and nproc > 1:
        # On CPUs, DeepSpeed takes the number of devices from LOCAL_SIZE. OMP_NUM_THREADS divides the cores among the
        # processes.
        cores = max(1, (os.cpu_count() or 1) // nproc)
        threads = os.environ.get("OMP_NUM_THREADS", str(cores))
        environment |= {"LOCAL_SIZE": str(nproc), "OMP_NUM_THREADS": threads}
    return environment


def _shorten(path: Path) -> str:
    """Return a path, relative to the working directory if the path is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _launch(args: argparse.Namespace, nproc: int, gpus: list[str], is_quiet: bool) -> list[str]:
    """Return the words of the command before the recipe."""
    python = Path(sys.executable)
    # The programs lie beside Python or, after `pip install --user`, beside this command.
    places = [path for path in (python, Path(sys.argv[0]).absolute()) if path.with_name(args.launcher).is_file()]
    program = _shorten((places or [python])[0].with_name(args.launcher))
    if args.launcher == "torchrun":
        if nproc == 1:
            return [_shorten(python)]
        # By itself, torchrun stops at a hangup under `nohup`, too.
        is_nohup = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        words = ["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT"] if is_nohup else []
        return [program, "--standalone", *words, "--nproc_per_node", str(nproc)]
    port = args.master_port or 29500
    # torchrun --standalone finds a free port by itself. The other launchers would fail late, so check the port here.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            fail(f"Port {port} is in use; choose another: --master_port {port + 1}")
    if args.launcher == "deepspeed":
        if names := [gpu for gpu in gpus[:nproc] if not gpu.isdigit()]:
            fail(
                f"CUDA_VISIBLE_DEVICES names the GPU {names[0]}, and DeepSpeed's launcher takes numbers only. Set the "
                "variable to numbers, such as 0,1, or use another launcher."
            )
        # DeepSpeed ignores CUDA_VISIBLE_DEVICES if it gets --include, so the GPUs go into the include list.
        devices = ",".join(gpus[:nproc] if gpus else map(str, range(nproc)))
        # Otherwise DeepSpeed describes every process that it starts. Its errors still appear.
        quiet = ["--quiet"] if is_quiet else []
        return [program, *quiet, "--include", f"localhost:{devices}", "--master_port", str(port)]
    config = RECIPES / f"accelerate_configs/{args.accelerate or 'ddp'}.yaml"
    words = [program, "launch", "--config_file", _shorten(config)]
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    ds_config = content.get("deepspeed_config", {}).get("deepspeed_config_file")
    # The path in the file is relative to the repository, and accelerate takes it as relative to the working directory.
    if ds_config is not None and Path.cwd() != FILES:
        words += ["--deepspeed_config_file", _shorten(FILES / ds_config)]
    return [*words, "--num_processes", str(nproc), "--main_process_port", str(port)]


def start(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by a command, or run its launcher in this process."""
    if Path(command[0]).name in ("torchrun", "accelerate"):
        # The launchers read their own variables, and those of torch, when they are imported.
        os.environ.update(environment)
        raise SystemExit(_run_launcher(command))
    os.execve(command[0], command, environment)


def _run_launcher(command: list[str]) -> int:
    """
    Run torchrun or accelerate, and return an exit status. It is the status of the rank that ended first with an error.

    The programs of these launchers return 1 and print a traceback of their own, which hides the message of the rank.
    """
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except KeyboardInterrupt:
        return 128 + signal.SIGINT

    # The launchers log a signal, that they stop the other ranks, and the exit status.
    repeated = ("Received %s death signal", "Sending process", "failed (exitcode")
    for part in ("multiprocessing.api", "agent.server.api"):
        logger = logging.getLogger(f"torch.distributed.elastic.{part}")
        logger.addFilter(lambda record: not str(record.msg).startswith(repeated))
    try:
        if Path(command[0]).name == "torchrun":
            torchrun.main(command[1:])
        else:
            from accelerate.commands.accelerate_cli import main as accelerate

            sys.argv = command
            accelerate()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        cause = failure.signal_name()
        advice = " Linux may do this when memory runs out; `dmesg` shows it." if cause == "SIGKILL" else ""
        print(f"error: process {rank} was ended by {cause}.{advice}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def print_list() -> None:
    """Print the stages, tools, presets and configs, each with its description."""
    for title, names in (("Stages", STAGES), ("Tools", TOOLS)):
        print(f"{title}:")
        for name in names:
            docstring = ast.get_docstring(ast.parse((RECIPES / f"{name}.py").read_text(encoding="utf-8")))
            print(f"  {name:12}{docstring.splitlines()[0]}")
    print("Presets (--preset):")
    for name in PRESETS:
        lines = (RECIPES / name / "pretrain.yaml").read_text(encoding="utf-8").splitlines()
        print(f"  {name:18}{lines[0].removeprefix('# ')}")
    print(f"DeepSpeed configs (--ds): {', '.join(DS_CONFIGS)}")
    print(f"accelerate configs (--accelerate): {', '.join(ACCELERATE_CONFIGS)}")
    print(f"Data (--dataset_name): embedded, {', '.join(f'embedded:{part}' for part in embedded_parts())},")
    print("  a file, a glob, a directory, a Hub id, or owner/name:file on the Hub")


def embedded_parts() -> list[str]:
    """Return the parts of the embedded corpora, from the source of the module that defines them."""
    source = (_HERE / "hf_pretrain/data/corpora.py").read_text(encoding="utf-8")
    return re.findall(r'^    "(\w+)": EmbeddedCorpus\(', source, re.MULTILINE)


def print_completion(shell: str) -> None:
    """Print a script with which a shell completes commands and flags."""
    import shtab

    from hf_pretrain.runtime.recipe_parsers import recipe_parser

    shells = sorted(shtab.SUPPORTED_SHELLS)
    if shell not in shells:
        fail(f"completion {shell} is unknown; use {', '.join(shells)}.")
    parser = argparse.ArgumentParser(prog="hf-pretrain")
    commands = parser.add_subparsers()
    for name in (*STAGES, *TOOLS):
        command = commands.add_parser(name, add_help=False, help=name)
        if name in LAUNCHED:
            for action in launcher_flags(name):
                command.add_argument(*action.option_strings, choices=KNOWN_WORDS.get(action.dest))
        # A recipe exits here if its extra is not installed. The shell then completes no flags of this recipe.
        with contextlib.suppress(SystemExit):
            for action in recipe_parser(RECIPES / f"{name}.py")._actions:
                flags = [flag for flag in action.option_strings if flag not in command._option_string_actions]
                if flags and action.help != argparse.SUPPRESS:
                    # Leave out the second spelling, which has dashes instead of underscores.
                    added = command.add_argument(flags[0], choices=action.choices and [*map(str, action.choices)])
                    if action.choices is None:
                        added.complete = shtab.FILE  # type: ignore[attr-defined]
    for name in ("list", "completion"):
        commands.add_parser(name, add_help=False, help=name)
    print(shtab.complete(parser, shell))


def main() -> None:
    if __doc__ is None:
        fail("transformers needs docstrings, which PYTHONOPTIMIZE=2 and `python -OO` remove. Use PYTHONOPTIMIZE=1.")
    words = sys.argv[1:]
    if not words or words[0] in ("help", "-h", "--help"):
        print(__doc__.strip())
        print(
            "\nFlags for the training stages and evaluate:\n" + make_parser().format_help().partition("options:\n")[2]
        )
        raise SystemExit(0 if words else EXIT_MISTAKE)
    stage, *rest = words
    if stage == "--version":
        print(version("hf_pretrain"))
    elif stage == "list":
        print_list()
    elif stage == "completion":
        print_completion(rest[0] if rest else "bash")
    elif stage in STAGES + TOOLS:
        environment, command = make_command(stage, rest)
        # A shell takes a quoted `NAME=value` for a command, so quote only the value.
        assignments = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        printed = " ".join([*assignments, shlex.join(command)])
        print(f"$ {printed}", file=sys.stderr, flush=True)
        # The launchers find Python through PATH. The record of the run keeps the command.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        # The help of the recipe names this program.
        names = {"HF_PRETRAIN_PROGRAM": f"hf-pretrain {stage}", "HF_PRETRAIN_COMMAND": printed}
        start(command, os.environ | environment | {"PATH": path} | names)
    else:
        known = (*STAGES, *TOOLS, "list", "completion")
        fail(f"{stage} is unknown{hint(stage, known, '; the nearest command is {}')}. `hf-pretrain list` shows all.")


if __name__ == "__main__":
    main()

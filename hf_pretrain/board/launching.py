"""Commands of the board: words from a form, and processes that outlive the board."""

import asyncio
import codecs
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import redirect_stderr, suppress
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import psutil

import hf_pretrain_cli

from ..loading.model_arguments import choose_preset
from ..run_directory.directory import OUTPUT_NAME, RunDirectory
from ..runtime.errors import UserError
from ..runtime.launchers import read_launch
from ..runtime.minimind_flags import translate_minimind
from ..runtime.parser import recipe_parser
from ..runtime.writing import LOCK_NAME, find_holder, read_holder, write_holder
from ..training.parsing import read_defaults


# The groups of the form.
GROUPS = ["What to train", "Duration", "More about the data", "Optimization", "Adapter"]
GROUPS += ["Logs and checkpoints", "Machine"]
# Where the form shows flags of `hf-pretrain` itself.
_LAUNCH_FLAGS = {"nproc": {"form": "Machine: Processes"}, "ds": {"form": "Machine: DeepSpeed config"}}
CHAT_NAME = "chat.json"
_RESUMED = ["--resume_from_checkpoint", "auto"]
_STREAMS: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}


def read_flags() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what the form's flags state, and their actions, for each stage whose extra is installed."""
    flags = {}
    for stage in hf_pretrain_cli.STAGES:
        # The recipe says which extra is missing, and exits.
        with suppress(SystemExit), redirect_stderr(io.StringIO()):
            recipe = recipe_parser(hf_pretrain_cli.RECIPES / f"{stage}.py")
            known = [*recipe._actions, *hf_pretrain_cli.make_parser()._actions]
            # `--no_x`, another spelling of `--x false`, comes later.
            actions = {action.dest: action for action in reversed(known)}
            stated = {name: about for name, about in recipe.flags.items() if "form" in about} | _LAUNCH_FLAGS
            flags[stage] = {name: about | {"action": actions[name]} for name, about in stated.items()}
    return flags


def takes_list(flag: dict[str, Any]) -> bool:
    """Return whether a flag takes several words."""
    return flag["action"].nargs in ("+", "*")


def find_defaults(stage: str, preset: str) -> dict[str, Any]:
    """Return the values that a preset gives to the flags of a stage. The empty name stands for no preset."""
    if not preset:
        return {}
    path = hf_pretrain_cli.RECIPES / choose_preset(preset) / f"{stage}.yaml"
    values = read_defaults(path) if path.is_file() or (path.parents[1] / "base" / path.name).is_file() else {}
    # A value may depend on the precision.
    return {name: " / ".join(map(str, v.values())) if isinstance(v, dict) else v for name, v in values.items()}


def make_words(
    flags: dict[str, dict[str, Any]], stage: str, preset: str, name: str, values: dict[str, str], more: str
) -> list[str]:
    """
    Return the words after `hf-pretrain` of a filled form.

    Args:
        flags (`dict`): the flags of the stage.
        stage, preset, name (`str`): the stage, the preset, and the directory below `out/`.
        values (`dict[str, str]`): the values of the form's flags; empty ones are left out.
        more (`str`): more flags, as a shell reads them.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError("Use letters, digits, and . _ - for the name.")
    words = [stage, *(["--preset", preset] if preset else [])]
    for flag, value in values.items():
        if value and flag in flags:
            words += [f"--{flag}", *(shlex.split(value) if takes_list(flags[flag]) else [value])]
    return [*words, *shlex.split(more), "--output_dir", f"out/{name}"]


def read_words(flags: dict[str, dict[str, Any]], words: Sequence[str]) -> tuple[str, dict[str, str], str]:
    """Return the preset, the values of the form's flags and the other flags, for the words after a stage."""
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--") or not given:
            flag, _, value = word.lstrip("-").partition("=")
            values = given[flag.replace("-", "_")] = [value] if value else []
        else:
            values.append(word)
    given.pop("output_dir", None)
    preset = given.pop("model_preset", given.pop("preset", [""]))[0]
    known = {flag: given.pop(flag) or ["true"] for flag in flags if flag in given}
    more = shlex.join(word for flag, values in given.items() for word in (f"--{flag}", *values))
    texts = {flag: (shlex.join if takes_list(flags[flag]) else " ".join)(values) for flag, values in known.items()}
    return preset, texts, more


def evaluation_words(run: Path, tasks: str, data: str, more: str) -> list[str]:
    """Return the words after `hf-pretrain` that evaluate a run, on tasks and on data if they are named."""
    words = ["evaluate", "--model_name_or_path", str(run), *(["--tasks", tasks] if tasks else [])]
    return [*words, *(["--eval_dataset_name", *shlex.split(data)] if data else []), *shlex.split(more)]


def export_words(run: Path, form: str, dtype: str, repository: str) -> list[str]:
    """Return the words after `hf-pretrain` that export a run, and push it if a repository is named."""
    place = "-".join(filter(None, (str(run), form, dtype)))
    words = ["convert", "--from", str(run), "--to", place, "--format", form, *(["--dtype", dtype] if dtype else [])]
    return [*words, *(["--push", "--hub_model_id", repository] if repository else [])]


def command_of(*words: str) -> list[str]:
    """Return the command that `hf-pretrain` stands for, with the Python of this process."""
    return [sys.executable, hf_pretrain_cli.__file__, *words]


def overwrite_lines(text: str) -> str:
    """Return a text as a terminal shows it, where a progress bar overwrites its line."""
    return re.sub(r"(?m)^[^\n]*\r(?!\n)", "", text)


async def run_command(*words: str, language: str = "en") -> AsyncIterator[str]:
    """Run a command of `hf-pretrain`, and yield what it has printed so far. It ends with the page that waits."""
    environment = os.environ | {"LANGUAGE": language}
    process = await asyncio.create_subprocess_exec(
        *command_of(*words), stdout=subprocess.PIPE, **_STREAMS, env=environment
    )
    # Rows of data and progress bars are longer than a line of asyncio may be.
    text, decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
    try:
        assert process.stdout is not None
        while chunk := await process.stdout.read(1 << 16):
            yield (text := overwrite_lines(text + decoder.decode(chunk)))
        if await process.wait():
            yield text + f"exit status {process.returncode}"
    finally:
        if process.returncode is None:
            process.terminate()


def _start(directory: Path, command: list[str], output: str, holder: str, *, url: str = "") -> None:
    """Start a process in a session of its own, which outlives the board, and write down which process it is."""
    if find_holder(directory / holder) is not None:
        raise UserError("It runs already.")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / output).open("ab") as file:
        process = subprocess.Popen(command, start_new_session=True, stdout=file, **_STREAMS)
    write_holder(directory / holder, process.pid, url=url, is_launcher=True)


def start_run(words: list[str]) -> None:
    """Start a stage. The process takes the lock of its directory when it has imported the libraries."""
    _start(Path(words[-1]), command_of(*words), OUTPUT_NAME, LOCK_NAME)


def recorded_words(directory: Path) -> list[str]:
    """
    Return the words after `hf-pretrain` of the last launch of a run, wherever it was started.

    The record of a run may come from anyone: it chooses a recipe of this package, a launcher and flags, but no
    program, no environment variables and no code.

    Raises:
        `UserError`: if the run has no command, or if the board does not start its command.
    """
    launch: dict[str, Any] = next(reversed(RunDirectory(directory).launches), {})
    text, directory_then = str(launch.get("command", "")), str(launch.get("directory"))
    # Variables stand before the command, as in a shell.
    words = list(dropwhile(lambda word: re.match(r"[A-Za-z_]\w*=", word), shlex.split(text)))
    if not words:
        raise UserError("It has no command to resume. Start it again.")
    if "<token>" in text:
        raise UserError("Its command holds an access token, which is not recorded. Resume it in a terminal.")
    if Path(directory_then).resolve() != Path.cwd():
        raise UserError(f"It was started in {directory_then}. Open a board there, or resume it in a terminal.")
    recipes = {hf_pretrain_cli.RECIPES.resolve() / f"{stage}.py": stage for stage in hf_pretrain_cli.STAGES}
    before = list(takewhile(lambda word: Path(word).resolve() not in recipes, words))
    launch_flags = read_launch(before)
    if launch_flags is None or before == words:
        raise UserError("The board resumes recipes of this package, without options of launchers. Use a terminal.")
    stage, flags = recipes[Path(words[len(before)]).resolve()], words[len(before) + 1 :]
    _check_no_code(stage, flags)
    for end in (_RESUMED, ["--output_dir", str(directory)]):
        flags = flags[: -len(end)] if flags[-len(end) :] == end else flags
    return [stage, *launch_flags, *flags]


def _check_no_code(stage: str, flags: list[str]) -> None:
    """Raise `UserError` if flags, or the file of `--config`, name code of the user."""
    try:
        parser = recipe_parser(hf_pretrain_cli.RECIPES / f"{stage}.py")
        typed, _ = parser.parse_known_args(translate_minimind(flags, stage))
    except SystemExit:
        # It would end the board.
        raise UserError("Its command prints help, or needs an extra that is not installed. Use a terminal.") from None
    for values in (vars(typed), read_defaults(Path(typed.config)) if typed.config else {}):
        names_code = any(values.get(name) for name, about in parser.flags.items() if about.get("names") == "code")
        if names_code or ":" in str(values.get("rewards")):
            raise UserError("Its command names code or tasks of your own. Resume it in a terminal.")


def resume_run(directory: Path) -> None:
    """Start the last launch of a run again, with its newest checkpoint."""
    words = [*recorded_words(directory), "--output_dir", str(directory), *_RESUMED]
    _start(directory, command_of(*words), OUTPUT_NAME, LOCK_NAME)


def stop(directory: Path, holder: str = LOCK_NAME) -> None:
    """Send SIGTERM. A run then saves a checkpoint and ends, on all ranks."""
    process = find_holder(directory / holder)
    if process is None:
        raise UserError("It does not run.")
    # Before the first rank takes the lock, DeepSpeed's launcher would end without its ranks.
    is_starting = holder == LOCK_NAME and read_holder(directory / holder).get("is_launcher")
    for each in [*(process.children(recursive=True) if is_starting else ()), process]:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)


def start_chat(directory: Path) -> None:
    """Serve a chat page with the model of a run, for this machine alone: the page has no token."""
    if not any(directory.glob("*model*.safetensors")):
        raise UserError("The run has saved no model yet.")
    # Close them together: each must have a port of its own.
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        port, web_port = (str(each.getsockname()[1]) for each in (first, second))
    words = ["serve", "--web", "--model_name_or_path", str(directory), "--port", port, "--web_port", web_port]
    _start(directory, command_of(*words), "chat.log", CHAT_NAME, url=f"http://127.0.0.1:{web_port}")


def answers(url: str) -> bool:
    """Return whether a server of this machine listens at an address."""
    port = re.fullmatch(r"http://127\.0\.0\.1:(\d{1,5})", url)
    with socket.socket() as client:
        return port is not None and int(port[1]) < 65536 and client.connect_ex(("127.0.0.1", int(port[1]))) == 0

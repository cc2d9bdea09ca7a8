"""
Errors and library output on the command line.

After a mistake of the user, a recipe ends with one line; after a bug, it ends with a traceback. Messages of libraries
are hidden if the user cannot act on them.
"""

import argparse
import errno
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import datasets
from huggingface_hub.constants import HF_HOME
from huggingface_hub.utils import disable_progress_bars as disable_hub_bars
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging

# The command imports nothing of this package, and lies beside it.
import hf_pretrain_cli

from .activity import shows_bars
from .errors import UserError
from .help_cache import STARTED_AS, keep_help
from .help_text import HELP_TEXTS, FlagFormatter, format_groups
from .names import check_word
from .writing import refused_write


EXIT_MISTAKE = 2
# EX_IOERR of sysexits.h: the output could not be written.
EXIT_NOT_SAVED = 74
# After the first rank has stopped, every supported launcher ends the others within this many seconds.
_LAUNCHER_SECONDS = 20.0
# Flags that are read before the command line is parsed.
_EARLY_FLAGS = re.compile(r"^--(log[_-]level|config)[=\n](.*)$", re.MULTILINE)
_PATH_FLAGS = re.compile(r".+_(dir|path)|config|deepspeed|output|resume_from_\w+|runs|source|tokenizer|tools")


class RecipeParser(HfArgumentParser):
    """
    Parser of dataclasses or single arguments. It raises `ValueError` instead of exiting as argparse does.

    It keeps the text of `--help` for the next call ([`~runtime.help_cache`]). Therefore the flags of a script must not
    depend on the machine or on other files.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any):
        self.launcher_flags = _launcher_flags()
        options: dict[str, Any] = {
            "prog": os.environ.get(STARTED_AS),
            "formatter_class": FlagFormatter,
            "allow_abbrev": False,
        }
        super().__init__(dataclass_types, **options | kwargs)
        if dataclass_types is not None:
            self.add_argument("--help-all", action="help", help="Show all flags, and exit.")
        for action in self._actions:
            action.help = HELP_TEXTS.get(action.dest, action.help)

    def format_help(self) -> str:
        # A parser without dataclasses prints argparse's own help.
        if not self.dataclass_types:
            return super().format_help()
        return format_groups(self, list(self.dataclass_types), self.launcher_flags, shows_all="--help-all" in sys.argv)

    def print_help(self, file: Any = None) -> None:
        text = self.format_help()
        self._print_message(text, file or sys.stdout)
        if file is None:
            keep_help(text)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments. Raise `ValueError` for an unknown one; the message names a similar one."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = next((word for word in unknown if word.startswith("--")), unknown[0])
            actions = (action for action in (*self._actions, *self.launcher_flags) if action.help != argparse.SUPPRESS)
            known = [flag.lstrip("-") for action in actions for flag in action.option_strings if len(flag) > 2]
            name, text = word.lstrip("-").split("=")[0], "; the nearest known one is --{}"
            nearest = hf_pretrain_cli.hint(name, known, text, cutoff=hf_pretrain_cli.FLAG_SIMILARITY)
            raise UserError(f"Unknown argument {word!r}{nearest or '. `--help` lists the flags'}.")
        return namespace

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # `Path("")` is the working directory.
        if text == "" and _PATH_FLAGS.fullmatch(action.dest):
            name = (action.option_strings or [action.dest])[0]
            raise UserError(f"{name} is empty. Name a file or directory, or leave the flag out.")
        return super()._get_value(action, text)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            check_word((action.option_strings or [action.dest])[0], str(value), map(str, action.choices))

    def error(self, message: str) -> NoReturn:
        # argparse names both spellings of a flag.
        message = re.sub(r"^argument (--\w+)(/--[\w-]+)?", r"\1", message)
        raise UserError(f"{message}. `--help` lists the flags.")


def _launcher_flags() -> list[argparse.Action]:
    """Return the flags that `hf-pretrain` reads itself, if it has started this recipe."""
    started_as = os.environ.get(STARTED_AS)
    if started_as is None:
        return []
    return hf_pretrain_cli.launcher_flags(started_as.split()[-1])


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--debug` to a parser. [`one_line_errors`] looks for the flag on the command line."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of a user's mistake, too")


def is_quiet() -> bool:
    """
    Return whether to hide messages of libraries: unless the command line, or else the file of `--config`, sets
    `log_level` to `info` or `debug`.
    """
    # Search the command line, because libraries write messages before it is parsed.
    given = {name.replace("-", "_"): value for name, value in re.findall(_EARLY_FLAGS, "\n".join(sys.argv))}
    level = given.get("log_level") or hf_pretrain_cli.config_value(given.get("config"), "log_level")
    return level not in ("info", "debug")


def quiet_libraries() -> None:
    """
    Hide the progress bars of libraries unless [`~runtime.activity.shows_bars`]. If [`is_quiet`], hide messages that no
    user can act on.
    """
    if not shows_bars():
        datasets.disable_progress_bars()
        disable_hub_bars()
    if is_quiet() or not shows_bars():
        # They show how weights are loaded and saved, which our display does, too.
        transformers_logging.disable_progress_bar()
    if not is_quiet():
        return
    if not sys.warnoptions:
        # FutureWarnings address the authors of libraries: one library uses a name that another one will change.
        warnings.filterwarnings("ignore", category=FutureWarning)
        # accelerate has chosen a number itself.
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    # NOTE: MLflow reads it when it is imported. It logs each step of making a database.
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    # NOTE: DeepSpeed logs this on every import, although the first line of a run names the device. Add a filter, and
    # do not raise the level, because DeepSpeed's warnings must still appear.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))
    # NOTE: transformers' server warns that it loads the model, by a name with `@main` after it.
    logging.getLogger("transformers.cli.serving.model_manager").addFilter(
        lambda record: not str(record.msg).startswith("Loading ")
    )
    # NOTE: on resume, transformers compares shares of all steps (`--save_steps 0.1`) with the saved numbers of steps,
    # and warns that they differ. `RunDescription.check_resume` reports real changes.
    logging.getLogger("transformers.trainer_utils").addFilter(
        lambda record: "The following arguments do not match" not in str(record.msg)
    )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """
    Turn mistakes of the user into one line, `error: ...`, and an exit status.

    The status is 2 for a mistake and 74 for a disk that is full or not writable, also for the disk of the caches
    (`HF_HOME`). All other exceptions keep their traceback. With `--debug` on the command line, all exceptions do.

    The first rank on each machine prints the line. The other ranks wait until the launcher ends them, and print the
    line only if it does not, because the first rank may not have made the mistake.
    """
    quiet_libraries()
    try:
        yield
    except Exception as error:
        # NOTE: torch raises a mistake of a data loader's worker again, with the worker's traceback as its text.
        mistake = str(error).rpartition("UserError: ")[2] if isinstance(error, UserError) else None
        refusal = _refusal_of_a_disk(error) if mistake is None else None
        if "--debug" in sys.argv or (mistake is None and refusal is None):
            raise
        # The other ranks would repeat the first rank's line, so they first give the launcher time to end them.
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(_LAUNCHER_SECONDS)
        # Messages of libraries may have several lines. Join them, because users search a log line by line.
        message = re.sub(r"\s*\n\s*", " ", refusal or mistake)
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_NOT_SAVED if refusal else EXIT_MISTAKE) from None


def _refusal_of_a_disk(error: BaseException) -> str | None:
    """Return a message if a disk refused a write, even behind a library's own error; otherwise `None`."""
    cause: BaseException | None = error
    while cause is not None and not refused_write(cause):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    # The error does not tell whether a library was reading or writing there.
    advice = "Free some space"
    if getattr(cause, "errno", None) == errno.EACCES:
        advice = "Check the permissions"
    elif "File too large" in str(cause):
        advice = "Raise the limit on the size of files (`ulimit -f`)"
    # An error of this package names the directory.
    return (
        f"{cause}. {advice} or choose other directories: caches are in "
        f"HF_HOME={HF_HOME}, temporary files in "
        f"{tempfile.gettempdir()} (TMPDIR)."
    )


__all__ = [
    "EXIT_MISTAKE",
    "EXIT_NOT_SAVED",
    "RecipeParser",
    "add_debug_flag",
    "is_quiet",
    "one_line_errors",
]

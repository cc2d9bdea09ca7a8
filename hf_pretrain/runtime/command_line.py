"""
Errors, progress and library output on the command line.

A command prints a line per phase, and a progress bar in a terminal, on standard error. After a mistake of the user, it
ends with one line; after a bug, it ends with a traceback. Messages of libraries are hidden if the user cannot act on
them.
"""

import io
import logging
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
from huggingface_hub.constants import HF_HOME
from huggingface_hub.utils import disable_progress_bars as disable_hub_bars
from tqdm import tqdm
from transformers.utils import is_in_notebook
from transformers.utils import logging as transformers_logging

from .errors import UserError
from .writing import refused_write


EXIT_MISTAKE = 2
# EX_IOERR of sysexits.h: the output could not be written.
EXIT_NOT_SAVED = 74
# After the first rank has stopped, every supported launcher ends the others within this many seconds.
_LAUNCHER_SECONDS = 20.0


def is_main() -> bool:
    """Return whether this process is the main one. Launchers number the processes before these have an accelerator."""
    return os.environ.get("RANK", "0") == "0"


def shows_bars() -> bool:
    """
    Return whether this process shows progress bars: the main process does, if the output is a terminal or a notebook.
    """
    return is_main() and (sys.stderr.isatty() or is_in_notebook())


def announce(text: str) -> None:
    """Print what the main process does next, such as `packing the documents`."""
    if is_main():
        print(f"{text} ...", file=sys.stderr, flush=True)


def progress(text: str, total: int | None = None) -> Any:
    """Return a progress bar for work with many parts ([`tqdm`]). Outside a terminal, [`announce`] the work instead."""
    if not shows_bars():
        announce(text)
    return tqdm(desc=text, total=total, disable=not shows_bars(), leave=False)


def is_quiet() -> bool:
    """Return whether to hide messages of libraries: unless the command line has `--log_level info` or `debug`."""
    # Libraries write messages before the command line is parsed.
    return re.search(r"--log[-_]level[= ](info|debug)\b", " ".join(sys.argv)) is None


def quiet_libraries() -> None:
    """
    Hide the progress bars of libraries unless [`shows_bars`]. If [`is_quiet`], hide messages that no user can act on.
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
    # NOTE: DeepSpeed logs it on every import. A filter, and no other level: its warnings must still appear.
    _hide_message("DeepSpeed", "Setting accelerator to CPU")
    # NOTE: on resume, transformers compares shares of all steps (`--save_steps 0.1`) with the saved numbers of steps.
    _hide_message("transformers.trainer_utils", "The following arguments do not match")
    _hide_message("transformers.cli.serving.model_manager", "Loading ")


def _hide_message(logger: str, part: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: part not in str(record.msg))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """
    Turn mistakes of the user into one line, `error: ...`, and an exit status.

    The status is 2 for a mistake and 74 for a disk that is full or not writable, also for the disk of the caches
    (`HF_HOME`). All other exceptions keep their traceback. Unless [`is_quiet`], all exceptions do.

    The first rank on each machine prints the line. The other ranks wait until the launcher ends them, and print the
    line only if it does not, because the first rank may not have made the mistake.
    """
    quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A pipe on Windows has the code page of the system, which may not contain the characters of a sample.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except KeyboardInterrupt:
        # The status tells the shell that the user has interrupted the program.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except Exception as error:
        # NOTE: torch raises a mistake of a data loader's worker again, with the worker's traceback as its text.
        mistake = str(error).rpartition("UserError: ")[2] if isinstance(error, UserError) else None
        refusal = _refusal_of_a_disk(error) if mistake is None else None
        if not is_quiet() or (mistake is None and refusal is None):
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
    return (
        f"{cause}. Free some space, check permissions and limits (`ulimit -f`), or choose other directories: caches "
        f"are in HF_HOME={HF_HOME}, temporary files in {tempfile.gettempdir()} (TMPDIR)."
    )

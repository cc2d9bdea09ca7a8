"""
Errors, progress and library output on the command line.

A command prints a line per phase, and a progress bar in a terminal, on standard error. After a mistake of the user, it
ends with one line; after a bug, it ends with a traceback. Messages of libraries are hidden if the user cannot act on
them.
"""

import errno
import faulthandler
import gc
import io
import logging
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import datasets
import psutil
from huggingface_hub.constants import ENDPOINT, HF_HOME
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import disable_progress_bars as disable_hub_bars
from tqdm import tqdm
from transformers.utils import is_in_notebook
from transformers.utils import logging as transformers_logging

from .errors import OutOfMemory, UserError
from .launchers import launcher
from .signals import interrupt, watch_launcher
from .writing import leave_reason, refused_write


EXIT_MISTAKE = 2
# EX_OSERR of sysexits.h: the memory does not suffice.
EXIT_NO_MEMORY = 71
# EX_IOERR of sysexits.h: the output could not be written.
EXIT_NOT_SAVED = 74
# What a shell reports of a program whose reader has gone, as with `| head`.
EXIT_UNREAD = 141
# After the first rank has stopped, every supported launcher ends the others within this many seconds.
_LAUNCHER_SECONDS = 20.0

# The allocators of CUDA, Apple GPUs, CPUs and Python, and cuBLAS.
_NO_MEMORY = re.compile(
    r"out of memory|(can't|cannot|unable to) allocate|not enough memory|ALLOC_FAILED|MemoryError", re.IGNORECASE
)
_MEMORY_ADVICE = (
    "Before the first step of a training, and in other commands, take a smaller model. In the steps, halve "
    "--per_device_train_batch_size (and --per_device_eval_batch_size) and double --gradient_accumulation_steps, which "
    "trains the same; pass --activation_checkpointing; or lower --max_length."
)


class _Output:
    """
    A standard stream that drops what cannot be written: no output is worth a run. Ctrl-C ends the tee of
    `2>&1 | tee run.log` before the run, terminals are closed, and disks are full.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, action: Callable[..., Any], *arguments: str) -> None:
        """If an action fails, drop the rest of the output, also of libraries in C and of child processes."""
        try:
            action(*arguments)
        except OSError as error:
            self.error = error
            with suppress(OSError), open(os.devnull, "w", encoding="utf-8") as null:
                os.dup2(null.fileno(), self.stream.fileno())


def _drop_failed_output() -> None:
    """Let the standard streams drop what cannot be written. A closed one (`>&-`) is opened again, for nothing."""
    for name in ("stdout", "stderr"):
        stream = vars(sys)[name]
        if stream is None:
            # Otherwise, the next file that is opened would get its number, and the output of libraries in C.
            stream = open(os.devnull, "w", encoding="utf-8")
        if isinstance(stream, io.TextIOWrapper):
            if name == "stdout":
                # A pipe on Windows has the code page of the system, which may not contain the characters of a sample.
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Output(stream))


def print_result(text: str, end: str = "\n") -> None:
    """
    Print the result of a command that writes it nowhere else. Other output may get lost, the result may not: a disk
    that is full raises `OSError`, and a reader that has gone (`| head`) ends the command without a message.
    """
    print(text, end=end, flush=True)
    error = sys.stdout.error if isinstance(sys.stdout, _Output) else None
    if error is not None:
        raise SystemExit(EXIT_UNREAD) if error.errno == errno.EPIPE else error


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
    # NOTE: transformers looks for the recorded path, and `restore_best` beside the checkpoint.
    _hide_message("transformers.trainer", "The best checkpoint")


def _hide_message(logger: str, part: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: part not in str(record.msg))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """
    Turn mistakes of the user into one line, `error: ...`, and an exit status.

    The status is 2 for a mistake and for a file that cannot be used, 71 for too little memory, and 74 for a disk that
    is full or not writable, also for the disk of the caches (`HF_HOME`). All other exceptions keep their traceback.
    Unless [`is_quiet`], all exceptions do. A crash in a library's C code shows the Python lines of all threads.

    The first rank on each machine prints the line. The other ranks wait until the launcher ends them, and print the
    line only if it does not, because the first rank may not have made the mistake.
    """
    watch_launcher(launcher())
    # The libraries' objects live until the process ends, so the garbage collector need not search them.
    gc.freeze()
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, interrupt)
    _drop_failed_output()
    if not faulthandler.is_enabled():
        with suppress(OSError):
            # The error stream of a notebook has no file number.
            faulthandler.enable()
    quiet_libraries()
    try:
        for word in sys.argv:
            # Python keeps other bytes as halves of surrogate pairs, which no record can hold.
            if re.search("[\ud800-\udfff]", word):
                raise UserError(f"The argument {word!a} is not UTF-8. Rename the file, or type it in UTF-8.")
        yield
    except KeyboardInterrupt:
        # The status tells the shell that the user has interrupted the program.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except Exception as error:
        refusal = mistake = None
        if isinstance(error, UserError):
            # NOTE: torch raises a mistake of a data loader's worker again, with the worker's traceback as its text.
            mistake = str(error).rpartition("UserError: ")[2]
        elif is_lack_of_memory(error):
            mistake = f"{describe_lack(error)}. {_MEMORY_ADVICE}"
        elif (refusal := _refusal_of_a_disk(error)) is None and isinstance(error, OSError | SyntaxError):
            # They name the file, or the server. The readers of damaged files raise `UserError`.
            mistake = f"{str(error) or type(error).__name__}. Check the names and the files of this command."
        elif isinstance(error, HTTPError):
            # The server ends connections, or redirects for ever.
            mistake = f"{ENDPOINT} does not answer as a Hub: {error}. Check the network and HF_ENDPOINT."
        leave_reason(refusal or mistake or f"{type(error).__name__}: {error}")
        if not is_quiet() or (mistake is None and refusal is None):
            raise
        # The other ranks would repeat the first rank's line, so they first give the launcher time to end them.
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(_LAUNCHER_SECONDS)
        # Messages of libraries may have several lines. Join them, because users search a log line by line.
        message = re.sub(r"\s*\n\s*", " ", refusal or mistake)
        print(f"error: {message}", file=sys.stderr, flush=True)
        lacks_memory = isinstance(error, OutOfMemory) or is_lack_of_memory(error)
        raise SystemExit(EXIT_NOT_SAVED if refusal else EXIT_NO_MEMORY if lacks_memory else EXIT_MISTAKE) from None


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an allocator refused memory."""
    return isinstance(error, RuntimeError | MemoryError | OSError) and bool(_NO_MEMORY.search(repr(error)))


def describe_lack(error: BaseException) -> str:
    """Return what an allocator refused, and what was free."""
    # The first line names the allocator and the size. The others are advice about the allocator, or C++.
    text = (str(error) or "MemoryError").splitlines()[0].rstrip(".")
    if (size := re.search(r"tried to allocate (\d+) bytes", text)) is not None:
        text = f"{int(size[1]) / 2**20:,.1f} MiB were refused"
    if "is free" not in text:
        memory = psutil.virtual_memory()
        text += f"; {memory.available / 2**20:,.0f} of {memory.total / 2**20:,.0f} MiB are free"
    return f"The memory does not suffice: {text}"


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

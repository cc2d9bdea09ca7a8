"""What the board does not start, stop or resume."""

import os
import sys

from hf_pretrain.board import launching
from hf_pretrain.runtime.writing import LOCK_NAME, write_holder
from tests.board.test_board import GRPO, RECIPE, record
from tests.mistakes import Mistake


def resume(command, **fields):
    return lambda tmp_path: launching.resume_run(record(tmp_path / "run", command, **fields))


def start_twice(tmp_path):
    write_holder(tmp_path / LOCK_NAME, os.getpid())
    launching.start_run(["pretrain", "--output_dir", str(tmp_path)])


MISTAKES = [
    Mistake("Use letters, digits, and . _ - for the", lambda: launching.make_words({}, "sft", "", "../a", {}, "")),
    Mistake("It runs already", start_twice),
    Mistake("It does not run", lambda tmp_path: launching.stop(tmp_path)),
    Mistake("has saved no model yet", lambda tmp_path: launching.start_chat(tmp_path)),
    Mistake("no command to resume. Start it again", resume("A=1")),
    Mistake("No closing quotation", resume(f"python {RECIPE} --run_name '"), ValueError),
    Mistake("an access token, .* Resume it in a terminal", resume(f"python {RECIPE} --run_name <token>")),
    Mistake("started in /elsewhere. Open a board there", resume(f"python {RECIPE}", directory="/elsewhere")),
    Mistake("recipes of this package, .* Use a terminal", resume(f"{sys.executable} -c 'print()' {RECIPE}")),
    Mistake("prints help, or needs an extra .* Use a terminal", resume(f"python {RECIPE} --help")),
    Mistake("names code or tasks of your own. Resume it in a terminal", resume(f"{GRPO} --tools a.mine:run")),
]

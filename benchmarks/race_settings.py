"""
Search the learning rate and the batch size of each contestant of `race.py` but `ours`:

    python -m benchmarks.race_settings --num_rows 1280
    python -m benchmarks.race_settings --model_preset minimind2-small --num_rows 384
    python -m benchmarks.race_settings --name long --num_rows 4480 --others "loop like MiniMind's"

For each contestant, the script searches the learning rate and the batch size in turn, until neither changes: it halves
and doubles the best value as long as this helps. All runs train on `--num_rows` rows, so the result does not depend on
the speed of the machine. Choose about as many rows as a contestant trains on in the race. The script writes all runs
to `benchmarks/results/race-settings-<preset>.json`, where `race.py` finds the best run of each contestant. An
interrupted search continues from the runs in this file; to search again, delete the file. `--name` adds a name to the
file: `race.py --name` reads that file, and races against the contestants of `--others` only.
"""

import argparse
import json
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.bench import environment
from benchmarks.contestants import CONTESTANTS, OTHERS, RaceSetting, Run
from benchmarks.race import MAX_LENGTHS, make_setting, settings_path


# A learning rate or a batch size.
Value = TypeVar("Value", int, float)

# Where the search begins.
LEARNING_RATES = {"tiny": 4e-3, "minimind2-small": 1e-3}
BATCH_SIZE = 8


def train_alone(name: str, setting: RaceSetting, *, num_rows: int) -> tuple[float, float]:
    """Train a contestant on a number of rows. Return its seconds of training and its final validation loss."""
    # Nobody else waits at the barrier.
    run = Run(setting, threading.Barrier(1), num_steps=num_rows // setting.batch_size, num_validations=1)
    CONTESTANTS[name](setting, run)
    return run.curve[-1]


def climb(value: Value, loss_of: Callable[[Value], float]) -> Value:
    """
    Return a value whose half and double have no lower loss. A batch size stays at least 1.

    Args:
        value (`float` or `int`): learning rate or batch size to begin with.
        loss_of (`Callable`): returns the loss of a value.
    """
    while True:
        half = max(1, value // 2) if isinstance(value, int) else value / 2
        # Of equal values, `min` takes the first.
        best = min((value, half, 2 * value), key=loss_of)
        if best == value:
            return value
        value = best


def search(rate: float, loss_of: Callable[..., float]) -> tuple[float, int]:
    """
    Return a learning rate and a batch size where halving or doubling either one does not lower the loss.

    Args:
        rate (`float`): learning rate to begin with.
        loss_of (`Callable`): returns the loss of a learning rate and a `batch_size`.
    """
    batch_size = BATCH_SIZE
    while True:
        before = rate, batch_size
        rate = climb(rate, partial(loss_of, batch_size=batch_size))
        batch_size = climb(batch_size, partial(loss_of, rate))
        if (rate, batch_size) == before:
            return before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", default="tiny", choices=list(MAX_LENGTHS))
    parser.add_argument("--num_rows", type=int, default=1280, help="Rows of each run.")
    parser.add_argument("--others", nargs="+", default=list(OTHERS), choices=OTHERS, help="Contestants to search for.")
    parser.add_argument("--name", help="Name in the file of the result.")
    args = parser.parse_args()
    record = environment()
    setting = make_setting(args.model_preset, seconds=0)
    record |= {"num_rows": args.num_rows, "precision": "bf16" if setting.bf16 else "float32"}
    path = settings_path(args.model_preset, args.name)
    runs: list[dict[str, Any]] = []
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name in ("num_rows", "precision", "machine") if found[name] != record[name]]
        if different:
            parser.error(
                f"{path} holds runs with another {' and '.join(different)}. Delete it, or choose another --name."
            )
        runs = found["runs"]

    def loss_of(name: str, rate: float, batch_size: int) -> float:
        settings = {"contestant": name, "learning_rate": rate, "batch_size": batch_size}
        for run in runs:
            if run.items() >= settings.items():
                return run["final_loss"]
        setting.learning_rate, setting.batch_size = rate, batch_size
        seconds, loss = train_alone(name, setting, num_rows=args.num_rows)
        runs.append(settings | {"seconds": round(seconds, 1), "final_loss": loss, "commit": record["commit"]})
        print(runs[-1], flush=True)
        # Write after each run, so that an interrupted search keeps its results.
        path.write_text(json.dumps(record | {"runs": runs}, indent=1) + "\n", encoding="utf-8")
        return loss

    with tempfile.TemporaryDirectory() as directory:
        setting.output_dir = Path(directory)
        for name in args.others:
            print(name, search(LEARNING_RATES[args.model_preset], partial(loss_of, name)))


if __name__ == "__main__":
    main()

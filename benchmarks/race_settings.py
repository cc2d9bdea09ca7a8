"""
Search the learning rate and the batch size of each contestant of `race.py` but `ours`:

    python -m benchmarks.race_settings --num_rows 1280
    python -m benchmarks.race_settings --model_preset minimind2-small --num_rows 384
    python -m benchmarks.race_settings --name long --num_rows 4480 --others "loop like MiniMind's"

For each contestant, the script first tries learning rates with 8 rows per step, and then batch sizes with the best
learning rate. While the smallest or the largest value is the best, it tries a further value. All runs train on
`--num_rows` rows, so the result does not depend on the speed of the machine. Choose about as many rows as a contestant
trains on in the race. The script writes all runs to `benchmarks/results/race-settings-<preset>.json`, where `race.py`
finds the best run of each contestant. `--name` adds a name to the file: `race.py --name` reads that file, and races
against the contestants of `--others` only.
"""

import argparse
import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.bench import environment
from benchmarks.contestants import CONTESTANTS, OTHERS, RaceSetting, Run
from benchmarks.race import MAX_LENGTHS, make_setting, settings_path


# A learning rate or a batch size.
Value = TypeVar("Value", int, float)

LEARNING_RATES = {"tiny": (2e-3, 4e-3, 8e-3), "minimind2-small": (5e-4, 1e-3, 2e-3)}
BATCH_SIZE = 8
OTHER_BATCH_SIZES = (4, 16)


def train_alone(name: str, setting: RaceSetting, *, num_rows: int) -> tuple[float, float]:
    """Train a contestant on a number of rows. Return its seconds of training and its final validation loss."""
    # Nobody else waits at the barrier.
    run = Run(setting, threading.Barrier(1), num_steps=num_rows // setting.batch_size, num_validations=1)
    CONTESTANTS[name](setting, run)
    return run.curve[-1]


def search_beyond_edges(losses: dict[Value, float], try_out: Callable[[Value], float]) -> Value:
    """
    Return the value with the lowest loss. While this value is the smallest or the largest, also try its half or its
    double. A batch size stays at least 1.

    Args:
        losses (`dict`): losses of the first values. The function adds the losses of the values that it tries.
        try_out (`Callable`): returns the loss of a value.
    """
    while True:
        best = min(losses, key=lambda value: losses[value])
        if best == max(losses):
            further = 2 * best
        elif best == min(losses) and best != 1:
            further = best // 2 if isinstance(best, int) else best / 2
        else:
            return best
        losses[further] = try_out(further)


def search(name: str, setting: RaceSetting, rates: tuple[float, ...], *, num_rows: int) -> list[dict[str, Any]]:
    """Return the settings and the final losses of all runs of a contestant. `setting` keeps the prepared rows."""
    runs: list[dict[str, Any]] = []

    def try_out(rate: float, batch_size: int) -> float:
        setting.learning_rate, setting.batch_size = rate, batch_size
        seconds, loss = train_alone(name, setting, num_rows=num_rows)
        found = {"contestant": name, "learning_rate": rate, "batch_size": batch_size}
        runs.append(found | {"seconds": round(seconds, 1), "final_loss": loss})
        print(runs[-1], flush=True)
        return loss

    of_rates = {rate: try_out(rate, BATCH_SIZE) for rate in rates}
    rate = search_beyond_edges(of_rates, lambda rate: try_out(rate, BATCH_SIZE))
    of_sizes = {BATCH_SIZE: of_rates[rate]} | {size: try_out(rate, size) for size in OTHER_BATCH_SIZES}
    search_beyond_edges(of_sizes, lambda size: try_out(rate, size))
    return runs


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
    rates = LEARNING_RATES[args.model_preset]
    with tempfile.TemporaryDirectory() as directory:
        setting.output_dir = Path(directory)
        record["runs"] = [run for name in args.others for run in search(name, setting, rates, num_rows=args.num_rows)]
    path = settings_path(args.model_preset, args.name)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

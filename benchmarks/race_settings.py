"""
Search the learning rate, the batch size and the length of the rows of each contestant of `race.py` but `ours`:

    taskset -c 0 python -m benchmarks.race_settings --seconds 50
    taskset -c 0 python -m benchmarks.race_settings --model_preset minimind2-small --seconds 90
    taskset -c 0 python -m benchmarks.race_settings --name long --seconds 600 --others "loop like MiniMind's"

For each contestant, the script searches the three values in turn, until none of them changes: it halves and doubles
the best value as long as this helps. It may end at a local optimum, so begin at several batch sizes and lengths. Each
run first measures its speed, and then trains for the steps that fit into `--seconds`, as in the race. So give it the
cores and the seconds of one contestant there. The script writes all runs to
`benchmarks/results/race-settings-<preset>.json`, where `race.py` finds the best run of each contestant. An interrupted
search continues from the runs in this file; to search again, delete the file. `--name` adds a name to the file:
`race.py --name` reads that file, and races against the contestants of `--others` only.
"""

import argparse
import json
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import disable_progress_bars

from benchmarks.bench import environment
from benchmarks.contestants import OTHERS, RaceSetting
from benchmarks.race import MAX_LENGTHS, SEARCHED, compete, make_setting, settings_path
from hf_pretrain.runtime.devices import keep_freed_blocks


# A learning rate, a batch size or a length.
Value = TypeVar("Value", int, float)

# Where the search begins.
LEARNING_RATES = {"tiny": 2e-3, "minimind2-small": 1e-3}
BATCH_SIZE = 4


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


def search(first: dict[str, Any], loss_of: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
    """
    Return settings where halving or doubling one of them does not lower the loss.

    Args:
        first (`dict`): the settings to begin with.
        loss_of (`Callable`): returns the loss of settings.
    """
    best = dict(first)

    def loss_with(name: str, value: Any) -> float:
        return loss_of(best | {name: value})

    while True:
        before = dict(best)
        for name, value in before.items():
            best[name] = climb(value, partial(loss_with, name))
        if best == before:
            return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", default="tiny", choices=list(MAX_LENGTHS))
    parser.add_argument("--seconds", type=float, default=50.0, help="Training time of each run.")
    parser.add_argument("--others", nargs="+", default=list(OTHERS), choices=OTHERS, help="Contestants to search for.")
    parser.add_argument("--batch_size", type=int, default=BATCH_SIZE, help="Where the search begins.")
    parser.add_argument("--max_length", type=int, help="Where the search begins; by default at the length of ours.")
    parser.add_argument("--name", help="Name in the file of the result.")
    args = parser.parse_args()
    record = environment()
    setting = make_setting(args.model_preset, seconds=args.seconds)
    record |= {"seconds": args.seconds, "precision": "bf16" if setting.bf16 else "float32"}
    path = settings_path(args.model_preset, args.name)
    runs: list[dict[str, Any]] = []
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name in ("seconds", "precision", "machine") if found.get(name) != record[name]]
        if different:
            parser.error(
                f"{path} holds runs with another {' and '.join(different)}. Delete it, or choose another --name."
            )
        runs = found["runs"]

    def loss_of(name: str, settings: dict[str, Any]) -> float:
        settings = {"contestant": name} | settings
        for run in runs:
            if run.items() >= settings.items():
                return run["final_loss"]
        own: RaceSetting = replace(setting, **{name: settings[name] for name in SEARCHED})
        # Nobody else waits at the barrier.
        result = compete(name, own, threading.Barrier(1), num_validations=1)
        seconds, loss = result["curve"][-1]
        runs.append(settings | {"num_steps": result["num_steps"], "seconds": round(seconds, 1), "final_loss": loss})
        print(runs[-1], flush=True)
        # Write after each run, so that an interrupted search keeps its results.
        path.write_text(json.dumps(record | {"runs": runs}, indent=1) + "\n", encoding="utf-8")
        return loss

    first = {"learning_rate": LEARNING_RATES[args.model_preset], "batch_size": args.batch_size}
    first["max_length"] = args.max_length or MAX_LENGTHS[args.model_preset]
    if not torch.cuda.is_available():
        keep_freed_blocks()
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        setting.output_dir = Path(directory)
        for name in args.others:
            print(name, search(first, partial(loss_of, name)))


if __name__ == "__main__":
    main()

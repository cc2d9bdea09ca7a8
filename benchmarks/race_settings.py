"""
Search the learning rate and the batch size of each contestant of `race.py` but `ours`:

    python -m benchmarks.race_settings --seconds 90
    python -m benchmarks.race_settings --model_preset minimind2-small --seconds 180

Each contestant first tries the learning rates with the middle batch size, and then the other batch sizes with its best
learning rate. Each run trains for the same number of seconds on one core; as many runs as there are cores compete at a
time. The script writes all runs to `benchmarks/results/race-settings-<preset>.json`, where `race.py` reads the best.
"""

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.bench import ROOT, environment
from benchmarks.contestants import OTHERS, RaceSetting
from benchmarks.race import MAX_LENGTHS, Entry, make_setting, run_together


LEARNING_RATES = {"tiny": (2e-3, 4e-3, 8e-3), "minimind2-small": (5e-4, 1e-3, 2e-3)}
BATCH_SIZES = {"tiny": (4, 8, 16), "minimind2-small": (4, 8, 16)}


def entry_of(candidate: dict[str, Any], setting: RaceSetting) -> Entry:
    own = {name: candidate[name] for name in ("learning_rate", "batch_size")}
    return candidate["contestant"], replace(setting, **own)


def try_all(candidates: Iterable[dict[str, Any]], setting: RaceSetting) -> list[dict[str, Any]]:
    """Train with each of the candidates, and return them with their steps and final losses."""
    candidates = list(candidates)
    num_at_a_time = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    runs: list[dict[str, Any]] = []
    for start in range(0, len(candidates), num_at_a_time):
        group = candidates[start : start + num_at_a_time]
        # The last group may be too small. Its last candidate runs several times, so that each run has one core.
        filled = group + group[-1:] * (num_at_a_time - len(group))
        entries = {str(number): entry_of(candidate, setting) for number, candidate in enumerate(filled)}
        for candidate, result in zip(group, run_together(entries).values(), strict=False):
            runs.append(candidate | {"num_steps": result["num_steps"], "final_loss": result["curve"][-1][1]})
            print(runs[-1], flush=True)
    return runs


def search(setting: RaceSetting, rates: tuple[float, ...], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return all runs of the search."""
    middle = sizes[len(sizes) // 2]
    runs = try_all(
        [{"contestant": name, "learning_rate": rate, "batch_size": middle} for name in OTHERS for rate in rates],
        setting,
    )
    best = {
        name: min((run for run in runs if run["contestant"] == name), key=lambda run: run["final_loss"])
        for name in OTHERS
    }
    others = [
        {"contestant": name, "learning_rate": best[name]["learning_rate"], "batch_size": size}
        for name in OTHERS
        for size in sizes
        if size != middle
    ]
    return runs + try_all(others, setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", default="tiny", choices=list(MAX_LENGTHS))
    parser.add_argument("--seconds", type=float, default=90, help="Training time of each run.")
    args = parser.parse_args()
    # Ask git first: writing the record changes the work tree, and the commit would become `-dirty`.
    record = environment()
    setting = make_setting(args.model_preset, seconds=args.seconds)
    record |= {"seconds": args.seconds, "precision": "bf16" if setting.bf16 else "float32"}
    record["runs"] = search(setting, LEARNING_RATES[args.model_preset], BATCH_SIZES[args.model_preset])
    path = ROOT / f"benchmarks/results/race-settings-{args.model_preset}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

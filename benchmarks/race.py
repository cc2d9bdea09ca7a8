"""
Time to reach a validation loss, measured side by side: `make race`, or

    python -m benchmarks.race --minutes 5 --seeds 3
    python -m benchmarks.race --model_preset minimind2-small --upstream ../minimind
    python -m benchmarks.race --minutes 4 --seeds 1 --leave_out
    python -m benchmarks.race --minutes 15 --name long

All contestants train a model of one shape on the same documents, with the same tokenizer, in the same precision and
for about the same number of seconds: each measures its speed, and trains for the number of steps that fits. On a CPU
they run at once, each in its own process on equally many cores. On a GPU they take turns. Start-up, preparation,
validation and the first step do not count as training time. `race_settings.py` searches the settings of the other
contestants.

`ours` also trains with shorter schedules: its time to a loss is the time of its fastest run to this loss.

The script prints the seconds in which `ours` reached the final loss of each other contestant. It writes all curves to
`benchmarks/results/race-<preset>.json`, and draws them into `docs/race-<preset>.png`, or `docs/race.png` for `tiny`.
With `--upstream`, the loop like MiniMind's uses the classes of a checkout of MiniMind. With `--leave_out`, the other
contestants are variants of `ours`, each without one part. `--name` takes the contestants and their settings from a
search with that name. All three write separate result files.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars

from benchmarks.bench import ROOT, environment, fastest_precision, git_commit
from benchmarks.contestants import CONTESTANTS, LOOP, OTHERS, Curve, RaceSetting, Run
from hf_pretrain import MiniMindConfig
from hf_pretrain.data.documents import load_documents
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.devices import keep_freed_blocks
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.training import load_or_train_tokenizer
from hf_pretrain.training.parsing import read_config


# Flags of `ours` on a CPU, in addition to the YAML file of its preset: a step of 64 rows would take minutes on two
# cores.
CPU_FLAGS: dict[str, Any] = {"per_device_train_batch_size": 8}
# Flags of `ours` without one of its parts, for `--leave_out`.
PARTS: dict[str, dict[str, Any]] = {
    "packing": {"packing": "none"},
    "our attention": {"attn_implementation": "sdpa"},
    "Muon": {"optim_preset": "adamw"},
    "decay": {"lr_scheduler_type": "constant_with_warmup"},
    "our first weights": {"config_overrides": "initializer_range=0.02,zero_init_residual=False"},
}
# What `race_settings.py` searches.
SEARCHED = ("learning_rate", "batch_size", "max_length")
# Tokens per row of `ours`, and where the search of the others begins.
MAX_LENGTHS = {"tiny": 256, "minimind2-small": 512}
# Shares of the steps of `ours`. It also trains with schedules that end so early, because a user would choose a short
# run to reach only the loss of another contestant. In the middle of a long run, the learning rate has not decayed yet.
# A schedule longer than twice the time in which `ours` reached the best other loss is skipped.
SHORTER = {"ours, 1/2": 1 / 2, "ours, 1/4": 1 / 4, "ours, 1/8": 1 / 8, "ours, 1/16": 1 / 16}
NUM_VALIDATIONS = 12
# Evenly spaced documents of the validation set. The mean over more of them would take long to compute on a CPU.
NUM_VALIDATION_DOCUMENTS = 128
# Share of the training time in which each contestant first measures its speed.
MEASURED_SHARE = 0.1

# Name of a contestant, and its settings.
Entry = tuple[str, RaceSetting]
# Number of steps and curve of each contestant, for one seed.
Race = dict[str, dict[str, Any]]


def settings_path(preset: str, name: str | None = None) -> Path:
    """Return the file of the settings that `race_settings.py` finds, and `race.py` reads."""
    return ROOT / f"benchmarks/results/race-settings-{preset}{f'-{name}' if name else ''}.json"


def best_settings(preset: str, name: str | None = None) -> dict[str, dict[str, Any]]:
    """
    Return the settings that `race_settings.py` found best, for each contestant that it searched for.

    Raises:
        `ValueError`: if it has not run yet.
    """
    path = settings_path(preset, name)
    if not path.is_file():
        flags = f"--model_preset {preset}{f' --name {name}' if name else ''}"
        raise ValueError(f"{path} is missing. Run python -m benchmarks.race_settings {flags} first.")
    record = json.loads(path.read_text(encoding="utf-8"))
    best: dict[str, dict[str, Any]] = {}
    for run in sorted(record["runs"], key=lambda run: run["final_loss"]):
        best.setdefault(run["contestant"], {name: run[name] for name in SEARCHED if name in run})
    # A search with a name chooses its contestants. The search without a name is for all of them.
    return {contestant: best[contestant] for contestant in (OTHERS if name is None else best)}


def entries_of(
    setting: RaceSetting, best: dict[str, dict[str, Any]], *, upstream: Path | None = None
) -> dict[str, Entry]:
    """Return `ours` and the other contestants with their best settings."""
    entries: dict[str, Entry] = {"ours": ("ours", setting)}
    for name, own in best.items():
        # A checkout of MiniMind takes the settings of the loop like it.
        name = "MiniMind" if name == LOOP and upstream is not None else name
        entries[name] = (name, replace(setting, **own, upstream=upstream))
    return entries


def without_parts(setting: RaceSetting) -> dict[str, Entry]:
    """Return `ours`, and `ours` without each of the `PARTS`."""
    return {"ours": ("ours", setting)} | {
        f"without {part}": ("ours", replace(setting, flags=setting.flags | flags)) for part, flags in PARTS.items()
    }


def compete(
    name: str, setting: RaceSetting, barrier: Barrier | threading.Barrier, *, num_validations: int = NUM_VALIDATIONS
) -> dict[str, Any]:
    """Train a contestant. Unless it has a number of steps, first measure its speed beside the others."""
    num_steps = setting.num_steps
    if num_steps is None:
        # All contestants measure for equally long, so that none of them runs alone. These weights are thrown away.
        measured = Run(setting, barrier, num_steps=10**6, max_seconds=MEASURED_SHARE * setting.seconds)
        CONTESTANTS[name](setting, measured)
        step_seconds = measured.seconds / (measured.num_done - 1)
        num_steps = max(2, round(setting.seconds / step_seconds))
    run = Run(setting, barrier, num_steps=num_steps, num_validations=num_validations)
    CONTESTANTS[name](setting, run)
    return {"num_steps": num_steps, "settings": run.settings, "steps": run.steps, "curve": run.curve}


def take_part(label: str, entry: Entry, cores: list[int], barrier: Barrier, results: Any, is_over: Event) -> None:
    """Compete in a process of its own."""
    name, setting = entry
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    # `ours` does this by itself. The comparison is about training, so all contestants get it.
    if not torch.cuda.is_available():
        keep_freed_blocks()
    # Four contestants would draw their bars into one line.
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        results.put((label, compete(name, replace(setting, output_dir=Path(directory)), barrier)))
    # Keep the core busy: a contestant that shares it must not become faster now.
    while not is_over.is_set() and multiprocessing.parent_process().is_alive():
        pass


def divide_cores(cores: list[int], num_processes: int) -> list[list[int]]:
    """Return equally many cores for each process. If there are too few, equally many processes share each core."""
    num_sets = max(n for n in range(1, num_processes + 1) if num_processes % n == 0 and n <= len(cores))
    size = max(1, len(cores) // num_processes)
    return [cores[number % num_sets * size :][:size] for number in range(num_processes)]


def run_together(entries: dict[str, Entry]) -> Race:
    """Let contestants compete at the same time. Raise `RuntimeError` if one of them fails."""
    context = multiprocessing.get_context("spawn")
    barrier, results, is_over = context.Barrier(len(entries)), context.Queue(), context.Event()
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    processes = {
        label: context.Process(target=take_part, args=(label, entry, mine, barrier, results, is_over))
        for (label, entry), mine in zip(entries.items(), divide_cores(cores, len(entries)), strict=True)
    }
    found: Race = {}
    try:
        for process in processes.values():
            process.start()
        while len(found) < len(entries):
            try:
                label, result = results.get(timeout=1)
                found[label] = result
            except queue.Empty:
                failed = [label for label, process in processes.items() if process.exitcode is not None]
                if failed:
                    raise RuntimeError(f"{failed[0]} failed. Its error stands above.") from None
        is_over.set()
    finally:
        for process in processes.values():
            # After a failure, the others may wait at the barrier for ever.
            if not is_over.is_set():
                process.terminate()
            process.join()
    return {label: found[label] for label in entries}


def run_race(entries: dict[str, Entry]) -> Race:
    """Let contestants compete: at the same time on a CPU, in turn on a GPU."""
    if not torch.cuda.is_available():
        return run_together(entries)
    race: Race = {}
    for label, (name, setting) in entries.items():
        race |= run_together({label: (name, replace(setting, seconds=setting.seconds / len(entries)))})
    return race


def run_shorter(setting: RaceSetting, race: Race) -> Race:
    """
    Train `ours` with shorter schedules. A step counts as many seconds as in the race, because the machine may be
    faster or slower by now.

    Args:
        setting ([`RaceSetting`]): setting of `ours`.
        race (`dict`): the race that has just ended.
    """
    ours = race["ours"]
    target = min(result["curve"][-1][1] for name, result in race.items() if name != "ours")
    useful = max(2 * seconds_to_reach(ours["curve"], target) / ours["curve"][-1][0], min(SHORTER.values()))
    found = run_race(
        {
            name: ("ours", replace(setting, num_steps=max(1, round(share * ours["num_steps"]))))
            for name, share in SHORTER.items()
            if share <= useful
        }
    )
    # The clock of the race starts after the first step.
    step_seconds = ours["curve"][-1][0] / (ours["num_steps"] - 1)
    for result in found.values():
        losses = [loss for _, loss in result["curve"]]
        result["curve"] = [(step * step_seconds, loss) for step, loss in zip(result["steps"], losses, strict=True)]
    return found


def seconds_to_reach(curve: Curve, loss: float) -> float:
    """Return when a curve first reaches a loss, linear between validations; infinity if it never does."""
    if curve[0][1] <= loss:
        return 0.0
    for (start, before), (end, after) in itertools.pairwise(curve):
        if after <= loss:
            return start + (end - start) * (before - loss) / (before - after)
    return math.inf


def is_ours(name: str) -> bool:
    return name == "ours" or name in SHORTER


def ratios(races: list[Race], name: str) -> list[float]:
    """
    Return, for each seed, our seconds to the final loss of a contestant, divided by its own seconds. Ours are those of
    the run that reached the loss first.
    """
    found = []
    for race in races:
        seconds, loss = race[name]["curve"][-1]
        found.append(min(seconds_to_reach(race[mine]["curve"], loss) for mine in filter(is_ours, race)) / seconds)
    return found


def ratios_of_all(races: list[Race]) -> dict[str, list[float | None]]:
    """Return the ratios of all other contestants, one per seed; `None` if no run of ours reached the loss."""
    names = itertools.filterfalse(is_ours, races[0])
    return {name: [round(x, 3) if math.isfinite(x) else None for x in ratios(races, name)] for name in names}


def report(races: list[Race]) -> str:
    """Return the table of final losses and ratios, and the two ratios that matter most."""

    def final_loss(name: str) -> float:
        return statistics.median(race[name]["curve"][-1][1] for race in races)

    def describe(name: str) -> str:
        found = ratios(races, name)
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    # Races may have different shorter runs.
    names = sorted(set.intersection(*map(set, races)), key=final_loss)
    others = [name for name in names if not is_ours(name)]
    lines = [f"{'contestant':24}{'steps':>8}{'seconds':>9}{'final loss':>12}   our time to that loss / its time"]
    for name in names:
        steps = statistics.median(race[name]["num_steps"] for race in races)
        seconds = statistics.median(race[name]["curve"][-1][0] for race in races)
        ratio = "" if is_ours(name) else describe(name)
        lines.append(f"{name:24}{steps:8,.0f}{seconds:9,.0f}{final_loss(name):12.3f}   {ratio}")
    for label, name in (("best other", others[0]), ("slowest", others[-1])):
        lines.append(
            f"Ours reached the final loss of the {label} contestant ({name}) in {describe(name)} of its time: median "
            f"and range over {len(races)} seed(s)."
        )
    return "\n".join(lines)


def plot(races: list[Race], path: Path, *, title: str) -> None:
    """Write a PNG of validation loss over seconds, with one line per run. All of `ours` have the same colour."""
    # Without pyplot there is no global state and no search for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    colours = {name: f"C{number}" for number, name in enumerate(name for name in races[0] if name not in SHORTER)}
    for seed, race in enumerate(races):
        for name in race:
            points = zip(*race[name]["curve"], strict=True)
            label = name if seed == 0 and name in colours else None
            colour = colours[name if name in colours else "ours"]
            axes.plot(*points, "o-", color=colour, label=label, markersize=2, linewidth=1.0)
    axes.set(xlabel="seconds of training", ylabel="validation loss (nats per token)", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def make_setting(preset: str, *, seconds: float) -> RaceSetting:
    """Return what all contestants share. The learning rate and the batch size are placeholders."""
    documents, validation = load_documents(["embedded"], Reading(validation_fraction=0.01))
    tokenizer = load_or_train_tokenizer(documents, vocab_size=6400)
    places = np.linspace(0, len(validation) - 1, NUM_VALIDATION_DOCUMENTS).astype(int)
    length = MAX_LENGTHS[preset]
    return RaceSetting(
        documents=documents,
        tokenizer=tokenizer,
        config=MiniMindConfig(**PRESETS[preset]),
        max_length=length,
        batch_size=1,
        output_dir=Path(tempfile.gettempdir()),
        bf16=fastest_precision() == "bf16",
        recipe=ROOT / f"recipes/{preset}/pretrain.yaml",
        flags={} if torch.cuda.is_available() else CPU_FLAGS,
        seconds=seconds,
        validation=[ids[:length] for ids in encode_documents(validation[places]["text"], tokenizer)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_preset", default="tiny", choices=list(MAX_LENGTHS))
    parser.add_argument(
        "--minutes",
        type=float,
        default=5,
        help="Training time of each contestant for all seeds together; on a GPU, where the contestants take turns, of "
        "all contestants together. The shorter runs take up to half as long again.",
    )
    parser.add_argument("--seeds", type=int, default=3, help="Number of races. Each has its own seed.")
    parser.add_argument(
        "--upstream",
        type=Path,
        help="Checkout of MiniMind, whose model and data set replace the loop like MiniMind's.",
    )
    parser.add_argument("--leave_out", action="store_true", help="Compare `ours` with itself without one part each.")
    parser.add_argument(
        "--name", help="Name of the search of `race_settings.py` whose contestants and settings to use."
    )
    args = parser.parse_args()
    if args.leave_out and (args.upstream or args.name):
        parser.error("--leave_out compares `ours` with itself. Leave out --upstream and --name.")
    if args.upstream is not None and not (args.upstream / "model").is_dir():
        parser.error(f"--upstream {args.upstream} has no folder `model`. Pass a checkout of MiniMind.")
    start = time.perf_counter()
    # Ask git first: writing the plot changes the work tree, and the commit would become `-dirty`.
    record = environment()

    best = {} if args.leave_out else best_settings(args.model_preset, args.name)
    setting = make_setting(args.model_preset, seconds=60 * args.minutes / args.seeds)
    entries = without_parts(setting) if args.leave_out else entries_of(setting, best, upstream=args.upstream)
    races: list[Race] = []
    for seed in range(args.seeds):
        print(f"seed {seed + 1} of {args.seeds}", file=sys.stderr)
        race = run_race({name: (kind, replace(own, seed=seed)) for name, (kind, own) in entries.items()})
        if not args.leave_out:
            race |= run_shorter(replace(setting, seed=seed), race)
        races.append(race)
    print(report(races))
    record["settings"] = {
        "minutes": args.minutes,
        "precision": "bf16" if setting.bf16 else "float32",
        "ours": read_config(setting.recipe) | setting.flags,
        "others": best,
        "upstream": git_commit(args.upstream) if args.upstream else None,
    }
    record["ratios"] = ratios_of_all(races)
    record["seeds"] = races
    record["seconds"] = round(time.perf_counter() - start)
    kinds = ["left-out"] * args.leave_out + ["upstream"] * bool(args.upstream) + [args.name] * bool(args.name)
    path = ROOT / f"benchmarks/results/race{''.join(f'-{kind}' for kind in kinds)}-{args.model_preset}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    title = f"{args.model_preset} in {record['settings']['precision']} on {record['machine']}"
    plot(races, ROOT / "docs" / path.with_suffix(".png").name.replace("-tiny", ""), title=title)


if __name__ == "__main__":
    main()

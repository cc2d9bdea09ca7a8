"""
Split the same number of steps between pretraining and fine-tuning in several ways, and compare the answers.

    python -m benchmarks.from_scratch_splits --steps 900 --shares 0.5 0.7 0.85

Each run starts the stages as `hf-pretrain from_scratch` does, and evaluates the answers on the same validation
conversations. The script prints a row of a table per run, and adds all figures to
`benchmarks/results/from-scratch-splits.json`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench import ROOT, environment
from hf_pretrain.run_directory.history import read_run


RESULTS = ROOT / "benchmarks/results/from-scratch-splits.json"
FIGURES = ("eval_loss", "eval_bits_per_byte", "eval_distinct_2", "eval_repeated_4grams", "eval_ended_answers")


def train(stage: str, directory: Path, max_steps: int, words: list[str]) -> dict[str, float]:
    """Run a stage, and return its validation metrics and its seconds of training."""
    flags = {"output_dir": directory, "max_steps": max_steps, "eval_steps": max_steps, "save_steps": max_steps}
    options = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "hf_pretrain_cli.py", stage, *options, *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    run = read_run(directory)
    seconds = sum(entry.get("training_seconds", 0.0) for entry in run.log)
    return {key: run.last(key) for key in FIGURES if run.last(key) is not None} | {"seconds": round(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=900, help="Steps of both stages together.")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.7, 0.85], help="Shares of pretraining.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    args = parser.parse_args()
    print("| share of pretraining | steps | seed |", *(f"{key.removeprefix('eval_')} |" for key in FIGURES))
    print("|---" * (3 + len(FIGURES)) + "|")
    for seed in args.seeds:
        for share in args.shares:
            steps = round(share * args.steps)
            words = ["--preset", args.preset, "--seed", str(seed), "--report_to", "none"]
            with tempfile.TemporaryDirectory() as scratch:
                base = Path(scratch, "pretrain")
                text = train("pretrain", base, steps, words)
                answers = train(
                    "sft", Path(scratch, "sft"), args.steps - steps, [*words, "--model_name_or_path", str(base)]
                )
            row = {"preset": args.preset, "seed": seed, "share": share, "steps": args.steps}
            row |= {"text": text, "answers": answers}
            cells = [
                f"{share:.0%}",
                f"{steps} + {args.steps - steps}",
                seed,
                *(f"{answers[key]:.3f}" for key in FIGURES),
            ]
            print("|", " | ".join(map(str, cells)), "|", flush=True)
            # Write after each run, so that an interrupted comparison keeps its results.
            rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
            RESULTS.write_text(json.dumps([*rows, row | environment()], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

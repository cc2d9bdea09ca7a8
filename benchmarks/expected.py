"""
Record the results of default runs, with which users can compare their own:

    make pretrain sft dpo distill grpo
    python -m benchmarks.expected out/pretrain-tiny out/sft-tiny out/dpo-tiny out/distill-tiny out/grpo-tiny

A preset whose default run needs another machine can have a short run: docs/getting-started.md has its command.

The script writes `recipes/<preset>/expected.json`, whose figures stand in docs/getting-started.md.
"""

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.bench import machine
from hf_pretrain.run_directory.metrics import HEADLINES


EXPECTED_NAME = "expected.json"
# Arguments that decide the results. A run with another value does not show the recorded results.
DECISIVE = (
    *("model_preset", "model_name_or_path", "config_overrides", "use_peft", "max_length", "train_fraction"),
    *("dataset_name", "dataset_kind", "dataset_weights", "learning_rate", "optim_preset"),
    *("algorithm", "beta", "loss_type", "rewards", "num_generations"),
    *("teacher_name_or_path", "temperature", "ce_weight", "kl"),
)


def describe(directory: Path) -> tuple[Path, str, dict[str, Any]]:
    """Return the file to write to, the stage, and the results of a run."""
    launch = json.loads((directory / "run.json").read_text(encoding="utf-8"))[-1]
    history = json.loads((directory / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    config = Path(launch["arguments"]["config"])
    curves = {}
    for key in ("loss", "eval_loss", "reward", "eval_reward"):
        points = [
            [entry["num_input_tokens_seen"], round(entry[key], 4)]
            for entry in history
            if key in entry and "num_input_tokens_seen" in entry
        ]
        if points:
            curves[key] = points
    seconds = datetime.fromisoformat(launch["ended"]) - datetime.fromisoformat(launch["started"])
    metrics = {metric.key: launch["metrics"][metric.key] for metric in HEADLINES if metric.key in launch["metrics"]}
    result = {
        "hardware": f"{machine()}, {launch['launch']}",
        "data": launch["data"]["counts"],
        "seconds": seconds.total_seconds(),
        "steps": launch["steps"],
        "rows_per_step": launch["rows_per_step"],
        "arguments": {name: launch["arguments"].get(name) for name in DECISIVE},
        "commit": launch["commit"],
        "metrics": metrics,
        "curves": curves,
    }
    return config.with_name(EXPECTED_NAME), config.stem, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="Directories of finished default runs.")
    for directory in parser.parse_args().runs:
        path, stage, result = describe(directory)
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps(known | {stage: result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

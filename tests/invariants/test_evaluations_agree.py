"""
Compare the figures of evaluations at several batch sizes and numbers of ranks with those of one batch.

As a program, this file evaluates each trainer once per batch size and writes the figures to a file.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.invariants.launching import launcher_command, start
from tests.invariants.trl_trainers import length_reward, make_records, make_trl_trainer


pytestmark = pytest.mark.distributed

RECIPES = ("dpo", "reward", "grpo", "rloo")
# Rows per device, by the number of ranks. Eleven items fill no batch, and a task's completions may be on two ranks.
BATCH_SIZES = {1: (8,), 2: (3,)}
ONE_BATCH = 24
UNCOUNTED = {
    *("eval_runtime", "eval_steps_per_second", "eval_samples_per_second", "eval_model_preparation_time"),
    # Whether the spread of some rewards is exactly zero. RLOO's rewards hold a KL term, so their rounding decides.
    "eval_frac_reward_zero_std",
}


def rate_prompts(prompts, **columns):
    """Rate only some tasks."""
    lengths = [len(prompt[-1]["content"].split()) for prompt in prompts]
    return [float(length) if length % 3 else None for length in lengths]


def main(path: str, batch_sizes: list[str]) -> None:
    figures = {}
    for recipe in RECIPES:
        for batch_size in map(int, batch_sizes):
            flags = {"output_dir": str(Path(path).parent), "per_device_eval_batch_size": batch_size}
            if recipe in ("grpo", "rloo"):
                # Greedy completions are equal in all launches.
                flags |= {"top_k": 1, "beta": 0.1, "per_device_train_batch_size": 2, "reward_weights": [1.0, 0.5]}
            trainer = make_trl_trainer(recipe, *make_records(11), rewards=[rate_prompts, length_reward], **flags)
            if recipe != "reward":
                # Otherwise, every reward of DPO and every KL divergence is zero.
                trainer.ref_model.load_state_dict({k: 1.2 * v for k, v in trainer.ref_model.state_dict().items()})
            name = f"{recipe} {os.environ.get('WORLD_SIZE', 1)} x {batch_size}"
            figures[name] = {k: v for k, v in trainer.evaluate().items() if k not in UNCOUNTED}
    if trainer.is_world_process_zero():
        Path(path).write_text(json.dumps(figures))


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Return the figures of each recipe, number of ranks and batch size."""
    found = {}
    for ranks, batch_sizes in BATCH_SIZES.items():
        path = tmp_path_factory.mktemp("evaluations") / "figures.json"
        sizes = [*batch_sizes, *([ONE_BATCH] if ranks == 1 else [])]
        command = launcher_command("torchrun", ranks) if ranks > 1 else launcher_command("python")
        result = start([*command, __file__, str(path), *map(str, sizes)])
        assert result.returncode == 0, result.stdout[-3000:]
        found |= json.loads(path.read_text())
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_figure_counts_each_item_once(figures, recipe):
    expected = figures[f"{recipe} 1 x {ONE_BATCH}"]
    assert len(expected) > 6 and {"eval_loss", "eval_reward"} & expected.keys()
    for ranks, batch_sizes in BATCH_SIZES.items():
        for batch_size in batch_sizes:
            name = f"{recipe} {ranks} x {batch_size}"
            assert figures[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

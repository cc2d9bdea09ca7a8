"""
The level of the tasks of reasoning-gym rises with the rewards: in one process, in workers, after a resume, and on two
ranks, whose rows are together those of one process.

As a program, this file trains as one of two ranks, and writes what its reward saw.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from hf_pretrain.data.reward_tasks import load_tasks
from hf_pretrain.rows.reading import Reading
from hf_pretrain.stages import reward_history
from tests.invariants.launching import launcher_command, start
from tests.rollouts import make_model, toy_trainer
from tests.trainers import small_tokenizer


FAMILIES = ["reasoning_gym:leg_counting", "reasoning_gym:chain_sum", "embedded:arithmetic"]


def train_on_levels(directory: Path, *, resume: str | None = None, **flags):
    """
    Train a toy model, with a reward of 1 for every answer. Return the trainer, and the family and the level (`None`
    for a task of another kind) and the prompt of each completion.
    """
    seen: list[tuple] = []

    def reasoning_gym_reward(completions, prompts, reasoning_gym, **columns):
        for prompt, place in zip(prompts, reasoning_gym, strict=True):
            seen.append((place and place["family"], place and place["level"], prompt[-1]["content"]))
        return [1.0 if place else None for place in reasoning_gym]

    def length(completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    reading = Reading(kind="task", validation_fraction=0.0, seed=5)
    tasks, _ = load_tasks(FAMILIES, reading, num_tasks=20, level=1, raises=True)
    data = {"train_dataset": tasks, "reward_funcs": [reasoning_gym_reward, length]}
    flags = {
        "max_steps": 16,
        "save_strategy": "steps",
        "save_steps": 5,
        "save_total_limit": 9,
        "raise_level_at": 0.9,
    } | flags
    trainer = toy_trainer(small_tokenizer(), directory, model=make_model(), trainer=data, **flags)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


@pytest.fixture(autouse=True)
def short_window(monkeypatch):
    monkeypatch.setattr(reward_history, "NUM_GENERATIONS", 3)


@pytest.mark.parametrize(
    "flags", [{}, {"dataloader_num_workers": 2}, {"steps_per_generation": 2, "max_steps": 32}, {"algorithm": "rloo"}]
)
def test_levels_rise_step_by_step_and_a_resumed_run_sees_the_same_tasks(tmp_path, flags, capsys):
    trainer, seen = train_on_levels(tmp_path, **flags)
    level, num_counted = 1, 0
    size = trainer.args.steps_per_generation * trainer.args.per_device_train_batch_size
    for start_of_generation in range(0, len(seen), size):
        generation = seen[start_of_generation : start_of_generation + size]
        for family, seen_level, _ in generation:
            # leg_counting has no level above 4.
            assert seen_level == (family and min(level, 4 if family == "leg_counting" else 10))
        num_counted += any(family for family, _, _ in generation)
        level = 1 + num_counted // 3
    assert level > 3
    logged = [entry["task_level"] for entry in trainer.state.log_history if "task_level" in entry]
    assert logged == sorted(logged) and (logged[0], logged[-1]) == (1, level - (num_counted % 3 == 0))
    assert "the tasks rise to level 2" in capsys.readouterr().out
    again, rest = train_on_levels(tmp_path, resume=str(tmp_path / "run/checkpoint-5"), **flags)
    assert 0 < len(rest) < len(seen) and rest == seen[-len(rest) :]
    learnt = dict(trainer.model.named_parameters())
    assert all(torch.equal(weight, learnt[name]) for name, weight in again.model.named_parameters())


@pytest.mark.distributed
def test_two_ranks_see_the_tasks_of_one_process(tmp_path):
    result = start([*launcher_command("torchrun"), __file__, str(tmp_path)])
    assert result.returncode == 0, result.stdout[-3000:]
    ranks = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    _, alone = train_on_levels(tmp_path / "one", per_device_train_batch_size=8)
    both = [row for step in range(0, len(ranks[0]), 4) for rank in ranks for row in rank[step : step + 4]]
    assert both == [list(row) for row in alone] and {level for _, level, _ in alone} > {1, 2, 3}


def main(directory: Path) -> None:
    reward_history.NUM_GENERATIONS = 3
    trainer, seen = train_on_levels(directory / "two")
    (directory / f"seen-{trainer.args.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

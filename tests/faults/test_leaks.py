"""A long run takes no more memory, descriptors or threads than a short one."""

import os
from pathlib import Path

import psutil
import pytest
from transformers import TrainerCallback

from tests.faults.driving import steps_of
from tests.trainers import make_documents, make_trainer


class Watch(TrainerCallback):
    """Record memory, descriptors and threads of the process every hundred steps."""

    def __init__(self):
        self.rows: list[tuple[int, int, int, int]] = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 100 == 0:
            process = psutil.Process()
            shared = sum(path.stat().st_uid == os.getuid() for path in Path("/dev/shm").glob("torch_*"))
            self.rows.append((process.num_fds(), process.num_threads(), shared, process.memory_info().rss))


@pytest.mark.faults
@pytest.mark.slow
def test_two_thousand_steps_with_evaluation_and_saving(tmp_path):
    arguments = {
        **{"max_steps": 2000, "dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        **{"eval_strategy": "steps", "eval_steps": 50, "save_strategy": "steps", "save_steps": 50},
        **{"save_total_limit": 2, "logging_steps": 10, "learning_rate": 0.01},
    }
    watch = Watch()
    make_trainer(tmp_path, 10 * make_documents(), arguments=arguments, callbacks=[watch]).train()
    # Caches and pools fill up in the first steps.
    early, late = watch.rows[4:10], watch.rows[-6:]
    descriptors, threads, shared, memory = (
        (max(row[column] for row in early), max(row[column] for row in late)) for column in range(4)
    )
    growth = (memory[1] - memory[0]) / 2**20
    assert all(late <= early for early, late in (descriptors, threads, shared)) and growth < 16, watch.rows
    assert steps_of(tmp_path) == [1950, 2000]

"""A run on a CPU keeps freed memory, unless the environment configures the allocator."""

import platform
import re
import sys

import pytest

from tests.invariants.launching import start


TRAIN = """
import resource, sys
from transformers import TrainerCallback
from hf_pretrain import LMTrainingArguments, MaskedLossTrainer
from tests.toys import toy_model

faults = []
class CountFaults(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def on_step_end(self, *args, **kwargs):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self.before)

args = LMTrainingArguments(
    output_dir=sys.argv[1], max_steps=12, per_device_train_batch_size=8, save_strategy="no", bf16=False, use_cpu=True,
    report_to="none", disable_tqdm=True,
)
rows = [{"input_ids": [3 + (row + place) % 100 for place in range(256)]} for row in range(96)]
model = toy_model(hidden_size=128, intermediate_size=512, max_position_embeddings=256)
MaskedLossTrainer(model=model, args=args, train_dataset=rows, callbacks=[CountFaults()]).train()
print("FAULTS", *faults[3:])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_MMAP_THRESHOLD_": "131072"}], ids=["default", "configured"])
def test_a_step_reuses_memory(tmp_path, environment):
    result = start([sys.executable, "-c", TRAIN, str(tmp_path)], **environment)
    found = re.search(r"FAULTS (.+)", result.stdout)
    assert found, result.stdout[-3000:]
    # Each fault gives the process one page of 4 KiB. With the recipe's settings, most steps have fewer than 500
    # faults; in some, other threads touch new pages. Without the settings, a step has 5,000 to 20,000. With the
    # variable, which turns the settings off, it has more than 20,000.
    faults = [int(number) for number in found[1].split()]
    assert min(faults) < 500 if not environment else min(faults) > 2_000

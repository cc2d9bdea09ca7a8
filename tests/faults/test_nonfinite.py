"""A loss or gradient that is not finite in step 5: the run makes no update with it."""

import re

import pytest

from tests.faults.driving import command, mostly_faults, run_poisoned, steps_of, zero


# Each rank counts its passes, two per step.
CASES = {
    "loss": ("python", [], "loss:9:0"),
    "gradient": ("python", [], "gradient:9:0"),
    "gradient, AdamW": ("python", ["--optim_preset", "adamw"], "gradient:9:0"),
    "loss, DDP": ("torchrun", [], "loss:9:1"),
    "gradient, DDP": ("torchrun", [], "gradient:9:1"),
    "loss, FSDP2": ("torchrun", ["--fsdp_size", "2"], "loss:9:1"),
    "loss, ZeRO-2": ("deepspeed", zero(2), "loss:9:1"),
    "gradient, ZeRO-2": ("deepspeed", zero(2), "gradient:9:0"),
    "gradient, ZeRO-2, AdamW": ("deepspeed", [*zero(2), "--optim_preset", "adamw"], "gradient:9:0"),
    "loss, ZeRO-3": ("deepspeed", zero(3), "loss:9:1"),
}

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("name", mostly_faults(CASES, "gradient", "loss, DDP"))
def test_the_run_stops_before_the_update(name, workspace, tmp_path):
    launcher, arguments, poison = CASES[name]
    result = run_poisoned(command(workspace, tmp_path / "run", *arguments, launcher=launcher), poison)
    # torchrun always ends with 1, and prints the status of each rank.
    status = result.returncode == 65 or (launcher == "torchrun" and result.stdout.count("exitcode  : 65") == 2)
    named = re.search(r"^The .* in step 5\. The run stopped before", result.stdout, re.MULTILINE) is not None
    assert status and named and not (tmp_path / "run/checkpoint-6").exists(), result.stdout[-3000:]
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert re.search(r": after step \d+: The ", page) and "--resume_from_checkpoint auto</pre>" in page
    assert steps_of(tmp_path / "run") == [2, 4]

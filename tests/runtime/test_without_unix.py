"""One process trains without the modules, calls and signals that Windows lacks."""

import subprocess
import sys

import pytest
from safetensors.torch import load_file

from hf_pretrain.runtime.writing import LOCK_NAME
from tests.invariants.launching import process_options
from tests.without_unix import make_toy_trainer


@pytest.mark.slow
def test_a_run_ends_in_the_same_weights_as_on_linux(tmp_path):
    words = [sys.executable, "-m", "tests.without_unix", str(tmp_path / "windows")]
    result = subprocess.run(words, **process_options())
    assert result.returncode == 0, result.stdout[-4000:]
    trainer = make_toy_trainer(tmp_path / "linux")
    trainer.train()
    expected = load_file(tmp_path / "linux/checkpoint-4/model.safetensors")
    for path in ("whole", "whole/checkpoint-4", "resumed/checkpoint-4", "resumed"):
        weights = load_file(tmp_path / "windows" / path / "model.safetensors")
        assert all(weights[name].equal(tensor) for name, tensor in expected.items()), path
    assert not list(tmp_path.rglob(LOCK_NAME)) and not list(tmp_path.rglob(".saving"))

"""Rewards and tools of the user that exit, in a run with one and with two processes."""

import json
import sys

import pytest
from transformers.utils import get_json_schema

from hf_pretrain.inference.tools import call_tool, load_tools
from hf_pretrain.runtime.signals import Interrupted, UserCodeExit, running_user_code
from tests.invariants.launching import ROOT, launcher_command, start


CODE = '''
import os, signal, sys

def ended(completions, **columns):
    sys.exit()

async def ended_async(completions, **columns):
    raise KeyboardInterrupt

def stopped(completions, **columns):
    os.kill(os.getpid(), signal.SIGINT)
    return [1.0] * len(completions)

def leave(when: str):
    """
    Leaves.

    Args:
        when: A time.
    """
    exit(7)
'''


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    path = tmp_path_factory.mktemp("exits")
    (path / "exits.py").write_text(CODE)
    (path / "exits_too.py").write_text("exit(0)")
    return path


def run_grpo(workspace, toys, output_dir, reward: str, launcher: str = "python"):
    flags = [
        *("--model_name_or_path", str(toys / "dense"), "--dataset_name", str(toys / "tasks.jsonl")),
        *("--rewards", reward, "--output_dir", str(output_dir), "--max_steps", "3", "--use_cpu", "--bf16", "false"),
        *("--per_device_train_batch_size", "2", "--num_generations", "2", "--max_completion_length", "4"),
        *("--validation_fraction", "0", "--save_steps", "3"),
    ]
    return start([*launcher_command(launcher), str(ROOT / "recipes/grpo.py"), *flags], cwd=workspace, timeout=400)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("launcher", "reward", "words"),
    [
        ("python", "exits:ended", "--rewards exits:ended ended with SystemExit"),
        ("torchrun", "exits:ended", "--rewards exits:ended ended with SystemExit"),
        ("python", "exits:ended_async", "--rewards exits:ended_async ended with KeyboardInterrupt"),
        ("python", "exits_too:any", "--rewards exits_too:any: the import of exits_too ended with SystemExit(0)"),
    ],
)
def test_a_reward_that_exits_ends_the_run_with_an_error(workspace, toys, tmp_path, launcher, reward, words):
    result = run_grpo(workspace, toys, tmp_path / "run", reward, launcher)
    assert result.returncode == 1 and f"UserCodeExit: {words}" in result.stdout, result.stdout[-3000:]
    assert not (tmp_path / "run/model.safetensors").exists()


def test_ctrl_c_during_a_reward_stops_the_run_with_a_checkpoint(workspace, toys, tmp_path):
    result = run_grpo(workspace, toys, tmp_path / "run", "exits:stopped")
    assert result.returncode == 130 and "Stopped by SIGINT after step 1" in result.stdout, result.stdout[-3000:]
    assert (tmp_path / "run/checkpoint-1").is_dir()
    with pytest.raises(Interrupted), running_user_code("a reward"):
        raise Interrupted


def test_a_tool_that_exits_is_named(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tool,) = load_tools(["exits:leave"])
    assert get_json_schema(tool)["function"]["description"] == "Leaves."
    # TRL would hide an `Exception` from the user.
    with pytest.raises(UserCodeExit) as raised:
        tool("now")
    assert not isinstance(raised.value, Exception)
    # A chat goes on: the model reads the error.
    call = {"function": {"name": "leave", "arguments": {"when": "now"}}}
    assert "ended with SystemExit(7)" in json.loads(call_tool({"leave": tool}, call))["error"]

"""
Run `recipes/pretrain.py` with one fault, which `POISON` names.

`data:other.jsonl:1` gives rank 1 other data, as if it ran on another machine. `loss:9:1` makes the loss of the ninth
forward pass on rank 1 infinite. `gradient:9:0` puts a NaN into a gradient of the ninth pass on rank 0, whose loss is
finite. `kill:9:1` kills rank 1 in its ninth pass, once.
"""

import functools
import os
import runpy
import signal
import sys

import torch

from hf_pretrain import MiniMindForCausalLM
from tests.invariants.launching import ROOT


kind, number, rank = os.environ["POISON"].split(":")
forward = MiniMindForCausalLM.forward
num_passes = 0

if kind == "data" and os.environ["RANK"] == rank:
    sys.argv[sys.argv.index("--dataset_name") + 1] = number
    os.environ["LOCAL_RANK"] = "0"


@functools.wraps(forward)
def poisoned(self, *args, **kwargs):
    global num_passes
    outputs = forward(self, *args, **kwargs)
    num_passes += self.training
    if kind != "data" and num_passes == int(number) and os.environ.get("RANK", "0") == rank:
        num_passes += 1
        if kind == "kill" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "loss":
            outputs["loss"] = outputs["loss"] + torch.inf
        elif kind == "gradient":
            outputs["loss"].register_hook(lambda gradient: gradient * torch.nan)
    return outputs


MiniMindForCausalLM.forward = poisoned
sys.argv[0] = str(ROOT / "recipes/pretrain.py")
runpy.run_path(sys.argv[0], run_name="__main__")

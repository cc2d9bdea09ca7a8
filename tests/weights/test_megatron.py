"""
Exports in Megatron-Core, loaded and written back by Megatron-Bridge, on a CPU.

Both import Transformer Engine, which needs CUDA. Here an empty module takes its place, Megatron-Core computes with its
own layers, and what names a CUDA device names the CPU.
"""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from tests.models import TEXT
from tests.weights.test_other_programs import OLD, ROPE, install


MEGATRON = ("megatron-core==0.16.1", "megatron-bridge==0.3.1", "triton==3.9.0", "einops==0.8.2", "omegaconf==2.4.0")
MODELS = {
    "llama": {},
    "llama-untied": {"tie_word_embeddings": False},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, "num_experts": 4, "norm_topk_prob": True, "moe_intermediate_size": 24},
}
CONVERT = """
import contextlib, importlib.abc, importlib.machinery, sys, types
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs, gpt_model
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_layer, moe_utils
from safetensors.torch import load_file


class Empty(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        lookup = {"__getattr__": lambda cls, each: Empty.__getattr__(self, each)}
        return type("EmptyMeta", (type,), lookup)(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
from megatron.bridge.models.conversion.auto_bridge import AutoBridge

torch.cuda.current_device = lambda: torch.device("cpu")
CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
moe_utils.te_general_gemm = None
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
given = load_file(f"{sys.argv[1]}/given.safetensors")
input_ids = given.pop("input_ids")
rows, length = input_ids.shape
mask = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()
for name, logits in given.items():
    bridge = AutoBridge.from_hf_pretrained(f"{sys.argv[1]}/{name}")
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=provider.num_moe_experts, qk_layernorm=provider.qk_layernorm, normalization="RMSNorm",
        moe_grouped_gemm=False,
    )
    provider.params_dtype, provider.bf16, provider.use_cpu_initialization = torch.float32, False, True
    provider.moe_token_dispatcher_type = "allgather"
    for field in ("apply_rope_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion",
                  "gradient_accumulation_fusion", "persist_layer_norm", "moe_grouped_gemm", "moe_permute_fusion"):
        setattr(provider, field, False)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide(pre_process=True, post_process=True).eval()
    bridge.load_hf_weights([model])
    with torch.no_grad():
        found = model(input_ids, torch.arange(length).expand(rows, -1), mask)
    difference = (found[..., : logits.shape[-1]] - logits).norm() / logits.norm()
    assert difference < 1e-5, (name, difference)
    if provider.num_moe_experts:
        # Its way back knows the experts of Transformer Engine alone.
        continue
    weights = load_file(f"{sys.argv[1]}/{name}/model.safetensors")
    exported = dict(bridge.export_hf_weights([model], cpu=True, show_progress=False))
    assert exported.keys() == weights.keys(), (name, exported.keys() ^ weights.keys())
    for key, weight in weights.items():
        assert torch.equal(exported[key], weight), (name, key)
print("equal:", *given)
"""


@pytest.mark.slow
@torch.no_grad()
def test_megatron_computes_our_logits_and_gives_the_weights_back(build_model, input_ids, tmp_path):
    tokenizer, given = train_tokenizer([TEXT, "some more words"], vocab_size=330), {"input_ids": input_ids}
    for name, fields in MODELS.items():
        model = build_model(**ROPE | fields, vocab_size=len(tokenizer))
        export(model, tmp_path / name, name.partition("-")[0], tokenizer=tokenizer)
        given[name] = model(input_ids).logits.contiguous()
    save_file(given, tmp_path / "given.safetensors")
    paths = os.pathsep.join([install(*OLD), install(*MEGATRON)])
    command = [sys.executable, "-c", CONVERT, str(tmp_path)]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == f"equal: {' '.join(sorted(MODELS))}"

"""
Two ranks over gloo give the same logits, gradients and updates of Muon as one process: under DDP, and under
transformers' own `DistributedConfig` with tensor and expert parallelism and FSDP2, which read the plans of
`MiniMindConfig`.

As a program, this file evaluates all cases and writes the results of each rank to files.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers.distributed import DistributedConfig

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.training.optimizers import Muon, is_matrix_of_muon, muon_parameter_groups
from tests.invariants.launching import launcher_command, start


pytestmark = pytest.mark.distributed

MODELS = {
    "dense": {"qk_norm": True},
    "moe": {"qk_norm": True, "num_experts": 4, "num_shared_experts": 1, "router_aux_loss_coef": 0.1},
}
LAYOUTS = {
    "ddp": {},
    "fsdp": {"fsdp_size": 2},
    "tp": {"tp_size": 2},
    "tp-ep": {"tp_size": 2, "ep_size": 2},
    "fsdp-ep": {"fsdp_size": 2, "ep_size": 2},
}
CASES = [(name, layout) for name in MODELS for layout in LAYOUTS if name == "moe" or "ep" not in layout]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


def evaluate(directory: Path, layout: str | None, input_ids: torch.Tensor, rank: int) -> dict:
    """Return logits, gradients, table and greedy continuation of one layout; `None` is a single process."""
    config = DistributedConfig(**LAYOUTS[layout]) if LAYOUTS.get(layout) else None
    model = MiniMindForCausalLM.from_pretrained(directory, distributed_config=config)
    result = {"sharded": {name for name, value in model.named_parameters() if isinstance(value, dist.tensor.DTensor)}}
    called = torch.nn.parallel.DistributedDataParallel(model) if layout == "ddp" else model
    # Each data-parallel rank sees one row. Other ranks see both rows.
    rows = input_ids[rank : rank + 1] if layout in ("ddp", "fsdp", "fsdp-ep") else input_ids
    with torch.no_grad():
        fused = called(rows, labels=rows, use_cache=False, skip_logits=True)
    result["fused_loss"], result["has_all_logits"] = whole(fused.loss), fused.logits is not None
    outputs = called(rows, labels=rows, use_cache=False)
    result["loss"] = whole(outputs.loss).detach()
    outputs.loss.backward()
    result["logits"] = whole(outputs.logits).detach()
    result["gradients"] = {name: whole(value.grad) for name, value in model.named_parameters()}
    model.save_pretrained(directory.parent / f"saved-{directory.name}-{layout}")
    matrices = {name: value for name, value in model.named_parameters() if is_matrix_of_muon(name, value)}
    before = {name: whole(value).detach().clone() for name, value in matrices.items()}
    Muon(muon_parameter_groups(model, learning_rate=0.01, weight_decay=0.1), lr=0.01).step()
    result["updates"] = {name: whole(value).detach() - before[name] for name, value in matrices.items()}
    result["pos_cis"] = model.model.rotary_emb.pos_cis
    return result


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank, input_ids = dist.get_rank(), torch.load(directory / "input_ids.pt")
    for name, layout in CASES:
        result = evaluate(directory / name, layout, input_ids, rank)
        torch.save(result, directory / f"{name}-{layout}-{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def directory(build_model, input_ids, tmp_path_factory) -> Path:
    """Return the directory with the results of both ranks. The two processes start once for all cases."""
    directory = tmp_path_factory.mktemp("parallelism")
    for name, overrides in MODELS.items():
        build_model(**overrides).save_pretrained(directory / name)
    torch.save(input_ids, directory / "input_ids.pt")
    result = start([*launcher_command("torchrun"), __file__, str(directory)])
    assert result.returncode == 0, result.stdout[-3000:]
    return directory


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_two_ranks_equal_one_process(directory, input_ids, name, layout, rank):
    expected = evaluate(directory / name, None, input_ids, 0)
    result = torch.load(directory / f"{name}-{layout}-{rank}.pt", weights_only=False)
    assert torch.equal(result["pos_cis"], expected["pos_cis"])

    rows = slice(rank, rank + 1) if layout in ("ddp", "fsdp", "fsdp-ep") else slice(None)
    torch.testing.assert_close(result["logits"], expected["logits"][rows], rtol=1e-4, atol=1e-5)
    assert result["gradients"].keys() == expected["gradients"].keys()
    for parameter, gradient in expected["gradients"].items():
        difference = (result["gradients"][parameter] - gradient).norm() / gradient.norm()
        assert difference < 1e-5, parameter
    for parameter, update in expected["updates"].items():
        # Muon iterates in bfloat16 where there are units for it.
        difference = (result["updates"][parameter] - update).norm() / update.norm()
        assert update.norm() > 0 and difference < 2e-2, parameter


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_shards_the_matrices_and_saves_whole_ones(directory, name, layout):
    """The loss needs no logits unless the head is sharded."""
    result = torch.load(directory / f"{name}-{layout}-0.pt", weights_only=False)
    torch.testing.assert_close(result["fused_loss"], result["loss"], rtol=1e-5, atol=0)
    assert result["has_all_logits"] == layout.startswith("tp")
    matrices = {f"self_attn.{name}_proj.weight" for name in "qkvo"} if layout != "fsdp-ep" else set()
    matrices |= {"mlp.gate_proj.weight"} if name == "dense" else {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    expected = {f"model.layers.{layer}.{matrix}" for layer in (0, 1) for matrix in matrices if layout != "ddp"}
    assert expected <= result["sharded"]
    read, saved = (load_file(directory / part / "model.safetensors") for part in (name, f"saved-{name}-{layout}"))
    assert saved.keys() == read.keys()
    for parameter in read:
        assert torch.equal(saved[parameter], read[parameter]), parameter


@pytest.mark.parametrize("plan", ["tp_plan", "ep_plan"])
def test_plans_name_modules_of_the_model(build_model, plan):
    names = set()
    for overrides in MODELS.values():
        model = build_model(**overrides)
        for entries in (model.named_modules(), model.named_parameters()):
            names |= {".".join("*" if part.isdigit() else part for part in name.split(".")) for name, _ in entries}
    entries = getattr(model, plan)
    assert entries and set(entries) <= names


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The micro-batch follows the free memory of a GPU, at the same rows per step (`--fit_micro_batch`)."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset

from hf_pretrain import PRESETS, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.collators import DataCollatorForPackedRows
from hf_pretrain.run_directory.facts import RunFacts
from hf_pretrain.runtime.parser import read_config
from hf_pretrain.training.measurements import flops_per_token
from hf_pretrain.training.micro_batch import activation_bytes_per_token, fitting_micro_batch
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.run import Run
from hf_pretrain.training.settling import TrainerData, _settle_micro_batch
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.invariants.launching import launcher_command, start
from tests.toys import EXPERTS, toy_model


GIB = 2**30
RECIPES = Path(__file__).parents[2] / "recipes"


def fitted(tmp_path, model=None, *, free: float = 80 * GIB, on_cuda: bool = True, **arguments) -> tuple[int, int]:
    """Return rows and accumulation after the choice, as if the device were a CUDA device with `free` bytes."""
    given = {"fit_micro_batch": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}
    given |= {"use_cpu": True, "torch_compile": True, "bf16": True, "report_to": "none"}
    args = LMTrainingArguments(str(tmp_path), **given | arguments)
    rows, collator = Dataset.from_dict({"input_ids": [[1]]}), DataCollatorForPackedRows(0, max_length=512)
    device = torch.device("cuda" if on_cuda else "cpu")
    with (
        patch.object(LMTrainingArguments, "device", device),
        patch("torch.cuda.mem_get_info", lambda device: (free, 100 * GIB)),
    ):
        run = Run(args, facts=RunFacts(recipe="pretrain"))
        _settle_micro_batch(run, TrainerData(rows, None, collator), model or toy_model())
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 24
    return args.per_device_train_batch_size, args.gradient_accumulation_steps


def test_the_largest_micro_batch_that_fits_is_chosen(tmp_path):
    assert fitted(tmp_path) == (24, 1)
    model = toy_model()
    per_row = 512 * activation_bytes_per_token(model.config)
    fixed = 18 * model.num_parameters()
    # A divisor of 24, although 11 rows would fit.
    assert fitted(tmp_path, free=(fixed + 11.5 * per_row) / 0.8) == (8, 3)
    assert fitted(tmp_path, free=0) == (1, 24)


# The ranks have GPUs of other sizes, first the first one and then the second one the smaller.
RANKS = """
import json, os, pathlib, sys
from tests.training.test_micro_batch import fitted

directory, sizes = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
rank = int(os.environ["RANK"])
found = [fitted(directory, free=both[rank]) for both in (sizes, sizes[::-1])]
(directory / f"rank{rank}").write_text(json.dumps(found))
"""


@pytest.mark.distributed
def test_the_smallest_gpu_of_all_ranks_decides(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    model = toy_model()
    small = (18 * model.num_parameters() + 11.5 * 512 * activation_bytes_per_token(model.config)) / 0.8
    words = [str(tmp_path / "ranks.py"), str(tmp_path), json.dumps([small, 80 * GIB])]
    result = start([*launcher_command("torchrun"), *words])
    assert result.returncode == 0, result.stdout
    assert [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)] == [[[8, 3], [8, 3]]] * 2


@pytest.mark.parametrize(
    ("overrides", "arguments"),
    [
        *(({}, {name: False}) for name in ("fit_micro_batch", "torch_compile", "bf16", "on_cuda")),
        ({}, {"activation_checkpointing": True}),
        ({}, {"train_sampling_strategy": "group_by_length"}),
        ({"dropout": 0.1}, {}),
        (EXPERTS | {"router_aux_loss_level": "batch"}, {}),
    ],
)
def test_the_micro_batch_stays_where_the_estimate_or_the_loss_depends_on_more(tmp_path, overrides, arguments):
    assert fitted(tmp_path, toy_model(**overrides), **arguments) == (4, 6)


@pytest.mark.parametrize("flag", ["--per_device_train_batch_size=8", "--gradient-accumulation-steps=2", None])
def test_a_typed_size_wins(tmp_path, flag):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"fit_micro_batch": True, "per_device_train_batch_size": 4}))
    argv = ["--config", str(config), "--output_dir", str(tmp_path), *([flag] if flag else [])]
    _, args = parse_args(ModelArguments, LMTrainingArguments, argv=argv)
    assert args.fit_micro_batch is (flag is None)


# Peaks of torch's allocator in bytes, on a stub of the CUDA runtime: rows of 512 tokens (of 1,024 for the largest).
@pytest.mark.parametrize(
    ("preset", "rows", "peak_gib"),
    [
        ("minimind2-small", 64, 4.86),
        ("minimind2", 128, 25.6),
        ("minimind3-moe", 32, 7.41),
        ("minimind-large", 24, 30.31),
    ],
)
def test_the_estimate_bounds_measured_peaks(preset, rows, peak_gib):
    config = MiniMindConfig(**PRESETS[preset])
    with torch.device("meta"):
        num_parameters = MiniMindForCausalLM(config).num_parameters()
    row_length = read_config(RECIPES / preset / "pretrain.yaml")["max_length"]
    sizes = {"num_parameters": num_parameters, "row_length": row_length, "rows": 768}
    # `rows` do not fit into the memory that they filled, and do fit into 1.4 times as much, beside a fifth.
    assert fitting_micro_batch(config, free=peak_gib * GIB / 0.8, **sizes) < rows
    assert fitting_micro_batch(config, free=1.4 * peak_gib * GIB / 0.8, **sizes) >= rows


@pytest.mark.documents
@pytest.mark.parametrize("preset", ["0.5B", "1B"])
def test_the_documented_plans_of_the_large_presets(preset):
    fields = read_config(RECIPES / preset / "pretrain.yaml")
    config = MiniMindConfig(**PRESETS[preset], vocab_size=fields["vocab_size"])
    with torch.device("meta"):
        model = MiniMindForCausalLM(config)
    count, row_length = model.num_parameters(), fields["max_length"]
    page = (RECIPES.parent / "docs/getting-started.md").read_text(encoding="utf-8")
    assert f"| `{preset}` | {count / 1e6:,.2f}M |" in page
    state, row = 18 * count / GIB, row_length * activation_bytes_per_token(config) / GIB
    for name, free, peak in (("24 GB", 23.5, 165e12), ("80 GB", 79.0, 989e12)):
        sizes = {"num_parameters": count, "row_length": row_length, "rows": 512}
        rows = fitting_micro_batch(config, free=int(free * GIB), **sizes)
        hours = flops_per_token(model) * 20 * count / (0.4 * peak) / 3600
        time = f"{hours:.0f} hours" if hours < 100 else f"{hours / 24:.2g} days"
        figures = f"{rows} | {state:.1f} | {row:.2f} | {state + rows * row:.1f} | {20 * count / 1e9:.1f} billion"
        assert f"| `{preset}` | {name} | {figures} | {time} |" in page

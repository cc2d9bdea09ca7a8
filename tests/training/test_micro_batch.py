"""The micro-batch follows the free memory of a GPU, at the same rows per step (`--fit_micro_batch`)."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from torch import nn

from benchmarks.memory import MODELS
from hf_pretrain import PRESETS, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.loading.adapters import AdapterArguments, KeepingArguments, add_adapter
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.loading.native import name_base
from hf_pretrain.model.modeling_minimind import MiniMindForSequenceClassification
from hf_pretrain.rows.collators import DataCollatorForPackedRows
from hf_pretrain.run_directory.facts import RunFacts
from hf_pretrain.runtime.parser import read_config
from hf_pretrain.stages.dpo import DPOTrainingArguments
from hf_pretrain.stages.reinforcement import GRPOTrainingArguments
from hf_pretrain.stages.reward_training import RewardTrainingArguments
from hf_pretrain.training.measurements import flops_per_token
from hf_pretrain.training.micro_batch import Weights, activation_bytes, fitting_micro_batch, needed_bytes
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.run import Run
from hf_pretrain.training.settling import _settle_micro_batch
from hf_pretrain.training.training_arguments import (
    DistillationTrainingArguments,
    LMTrainingArguments,
    SFTTrainingArguments,
)
from tests.invariants.launching import launcher_command, start
from tests.toys import EXPERTS, toy_model


GIB = 2**30
RECIPES = Path(__file__).parents[2] / "recipes"
ARGUMENTS = {
    **{"pretrain": LMTrainingArguments, "sft": SFTTrainingArguments, "distill": DistillationTrainingArguments},
    **{"dpo": DPOTrainingArguments, "reward": RewardTrainingArguments, "grpo": GRPOTrainingArguments},
}


def fitted(tmp_path, model=None, *, free: float = 80 * GIB, on_cuda: bool = True, **arguments) -> tuple[int, int]:
    """Return rows and accumulation after the choice, as if the device were a CUDA device with `free` bytes."""
    given = {"fit_micro_batch": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}
    args = settled(tmp_path, model or toy_model(), free=free, on_cuda=on_cuda, **given | arguments)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 24
    return args.per_device_train_batch_size, args.gradient_accumulation_steps


def settled(
    tmp_path, model, *, stage="pretrain", length=512, free: float = 80 * GIB, on_cuda=True, others=(), **arguments
):
    """Return the arguments of a stage after the choice. Rows have `length` tokens, of which a prompt has half."""
    given = {"use_cpu": True, "torch_compile": True, "bf16": True, "report_to": "none"}
    if stage in ("dpo", "reward"):
        given["max_length"] = length
    if stage == "grpo":
        given |= {"max_completion_length": length // 2, "num_generations": 2, "beta": 0.1}
    args = ARGUMENTS[stage](str(tmp_path), **given | arguments)
    tokenizer = SimpleNamespace(apply_chat_template=lambda prompt, **options: [0] * len(prompt))
    rows = Dataset.from_dict({"prompt": ["hi", "x" * (length // 2)]})
    collator = DataCollatorForPackedRows(0, max_length=length) if args.has_masked_loss else None
    device = torch.device("cuda" if on_cuda else "cpu")
    with (
        patch.object(LMTrainingArguments, "device", device),
        patch("torch.cuda.mem_get_info", lambda device: (free, 100 * GIB)),
    ):
        run = Run(args, facts=RunFacts(recipe=stage), others=others)
        _settle_micro_batch(run, SimpleNamespace(train=rows, collator=collator, tokenizer=tokenizer), model)
    return args


def test_the_largest_micro_batch_that_fits_is_chosen(tmp_path):
    assert fitted(tmp_path) == (24, 1)
    model = toy_model()
    eight, twelve = (needed_bytes(model.config, weights_of(model), 512 * rows) for rows in (8, 12))
    assert eight < twelve
    # A divisor of 24, although 11 rows would fit.
    assert fitted(tmp_path, free=(eight + 0.9 * (twelve - eight)) / 0.8) == (8, 3)
    assert fitted(tmp_path, free=0) == (1, 24)


def weights_of(model) -> Weights:
    """Return the weights of a model that Muon trains."""
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if "_proj" in name)
    return Weights(model.num_parameters(), with_one_moment=matrices)


def test_the_completions_of_a_step_are_still_generated_at_once(tmp_path):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "fit_micro_batch": True}
    args = settled(tmp_path, toy_model(), stage="grpo", **sizes)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (24, 1)
    assert (args.steps_per_generation, args.generation_batch_size) == (1, 24)


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
    small = needed_bytes(model.config, weights_of(model), 11 * 512) / 0.8
    words = [str(tmp_path / "ranks.py"), str(tmp_path), json.dumps([small, 80 * GIB])]
    result = start([*launcher_command("torchrun"), *words])
    assert result.returncode == 0, result.stdout
    assert [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)] == [[[8, 3], [8, 3]]] * 2


@pytest.mark.parametrize(
    ("overrides", "arguments"),
    [
        *(({}, {name: False}) for name in ("fit_micro_batch", "torch_compile", "bf16", "on_cuda")),
        ({}, {"train_sampling_strategy": "group_by_length"}),
        ({"dropout": 0.1}, {}),
        (EXPERTS | {"router_aux_loss_level": "batch"}, {}),
        (EXPERTS, {"activation_checkpointing": True}),
        (EXPERTS, {"stage": "dpo"}),
        ({}, {"stage": "dpo", "loss_type": ["aot"]}),
        ({}, {"stage": "grpo", "loss_type": "bnpo"}),
        # Checkpoints hold micro-batches of completions.
        ({}, {"stage": "grpo", "num_iterations": 2}),
        ({}, {"stage": "grpo", "steps_per_generation": 3}),
    ],
)
def test_the_micro_batch_stays_where_the_estimate_or_the_loss_depends_on_more(tmp_path, overrides, arguments):
    assert fitted(tmp_path, toy_model(**overrides), **arguments) == (4, 6)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.1}])
def test_the_micro_batch_stays_with_adapters_of_unknown_memory(tmp_path, options):
    pytest.importorskip("peft")
    assert fitted(tmp_path, with_adapter(toy_model())) == (24, 1)
    assert fitted(tmp_path, with_adapter(toy_model(), **options)) == (4, 6)


@pytest.mark.parametrize(
    ("flags", "content", "expected"),
    [
        ([], {}, True),
        ([], {"per_device_train_batch_size": 4}, True),
        ([], {"fit_micro_batch": False}, False),
        (["--per_device_train_batch_size=8"], {"fit_micro_batch": True}, False),
        (["--gradient-accumulation-steps=2"], {}, False),
        (["--gradient-accumulation-steps=2", "--fit_micro_batch"], {}, True),
    ],
)
def test_every_recipe_fits_and_a_typed_size_wins(tmp_path, flags, content, expected):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(content))
    argv = ["--config", str(config), "--output_dir", str(tmp_path), *flags]
    _, args = parse_args(ModelArguments, SFTTrainingArguments, argv=argv)
    assert args.fit_micro_batch is expected


def test_the_micro_batch_stays_where_a_peak_was_far_from_the_estimate(tmp_path):
    pytest.importorskip("peft")
    model = with_adapter(toy_model())
    quantize(model)
    assert fitted(tmp_path, model, activation_checkpointing=True) == (24, 1)
    assert fitted(tmp_path, model, stage="dpo") == (24, 1)
    assert fitted(tmp_path, model, stage="dpo", activation_checkpointing=True) == (4, 6)


def with_adapter(model, **options):
    name_base(model, "some/name", half_split=False)
    return add_adapter(model, AdapterArguments(use_peft=True, **options))


def quantize(adapted) -> None:
    """Give the linear layers under an adapter weights of the size that bitsandbytes packs them into."""
    for name, module in adapted.named_modules():
        if name.endswith("_proj.base_layer"):
            packed = torch.empty(module.weight.numel() // 2, 1, dtype=torch.uint8, device="meta")
            module.weight = nn.Parameter(packed, requires_grad=False)


# Peaks of torch's allocator in bytes, on a stub of the CUDA runtime: the second step of the trainers, with compiled
# layers in bf16, AdamW (Muon in pretraining), rank 16 on all linear layers, and two micro-batches of so many rows and
# tokens, or one alone. A row of dpo and reward is a pair. The teacher has the student's size. Keeping: `--kl_to_base`.
PEAKS = """
minimind2-small pretrain full   16 x 512             1,892,251,136
minimind2-small sft      full   16 x 512             1,985,734,144
minimind2-small sft      full   16 x 512  alone      1,873,171,968
minimind2-small sft      full    4 x 512               939,435,520
minimind2-small sft      full   16 x 512  recomputed 1,005,573,632
minimind2-small sft      lora   16 x 512             1,745,540,608
minimind2-small sft      lora   16 x 512  recomputed   689,474,048
minimind2-small sft      lora   16 x 512  keeping    3,021,298,176
minimind2-small sft      lora   16 x 512  keeping recomputed 1,965,623,808
minimind2-small sft      lora   16 x 512  keeping alone 3,015,954,944
minimind2-small sft      qlora  16 x 512  keeping    2,935,254,528
minimind2-small sft      qlora  16 x 512             1,662,119,424
minimind2-small sft      qlora  16 x 512  recomputed   651,532,800
minimind2-small distill  full   16 x 512             3,370,511,872
minimind2-small distill  full   16 x 512  recomputed 2,397,036,032
minimind2-small distill  lora   16 x 512             3,129,926,144
minimind2-small distill  lora   16 x 512  recomputed 2,080,936,448
minimind2-small distill  qlora  16 x 512             3,062,362,624
minimind2-small dpo      full    8 x 512             2,255,595,520
minimind2-small dpo      full    8 x 512  recomputed 1,115,531,264
minimind2-small dpo      lora    8 x 512             1,876,096,000
minimind2-small dpo      lora    8 x 512  recomputed   706,586,624
minimind2-small dpo      qlora   8 x 512             1,730,893,824
minimind2-small reward   full    8 x 512             1,842,274,816
minimind2-small reward   full    8 x 512  recomputed   849,207,808
minimind2-small grpo     full   16 x 512             2,230,127,616
minimind2-small grpo     full   16 x 512  recomputed 1,096,671,232
minimind2-small grpo     lora   16 x 512             1,718,773,760
minimind2-small grpo     lora   16 x 512  recomputed   705,842,176
minimind2-small grpo     qlora  16 x 512             1,719,557,120
minimind2       sft      full    8 x 512             3,760,787,968
minimind2       distill  full    8 x 512             4,846,936,576
minimind2       dpo      full    4 x 512             4,720,795,648
minimind2       reward   full    4 x 512             3,808,859,648
minimind2       grpo     full    8 x 512             4,507,018,240
SmolLM2-135M    sft      full    4 x 1024            5,329,317,888
SmolLM2-135M    sft      full    1 x 1024            3,548,857,856
SmolLM2-135M    sft      full    4 x 1024 recomputed 3,155,671,040
SmolLM2-135M    sft      lora    4 x 1024            3,796,339,200
SmolLM2-135M    sft      lora    4 x 1024 keeping    5,466,251,264
SmolLM2-135M    sft      lora    4 x 1024 keeping recomputed 3,130,067,968
SmolLM2-135M    sft      qlora   4 x 1024 keeping    5,184,818,176
SmolLM2-135M    sft      qlora   4 x 1024            3,520,443,904
SmolLM2-135M    distill  full    4 x 1024            7,563,012,096
SmolLM2-135M    dpo      full    2 x 1024            6,303,680,000
SmolLM2-135M    reward   full    2 x 1024            5,256,904,192
SmolLM2-135M    grpo     full    4 x 1024            6,222,199,296
"""


@pytest.mark.parametrize("line", PEAKS.strip().splitlines(), ids=lambda line: "-".join(line.split()[:-1]))
def test_the_estimate_is_near_measured_peaks(tmp_path, monkeypatch, line):
    name, stage, kind, rows, _, length, *more, peak = line.split()
    config = MiniMindConfig(**MODELS[name])
    with torch.device("meta"):
        model = (MiniMindForSequenceClassification if stage == "reward" else MiniMindForCausalLM)(config)
    if kind != "full":
        pytest.importorskip("peft")
        model = with_adapter(model)
    if kind == "qlora":
        quantize(model)
    estimates = []
    sizes = {"per_device_train_batch_size": int(rows), "gradient_accumulation_steps": 1 if "alone" in more else 2}
    monkeypatch.setattr(
        "hf_pretrain.training.micro_batch.fitting_micro_batch",
        lambda needed, rows, free: estimates.append(needed(sizes["per_device_train_batch_size"])) or 1,
    )
    options = {"fit_micro_batch": True, "activation_checkpointing": "recomputed" in more, **sizes}
    others = (KeepingArguments(kl_to_base=0.5 if "keeping" in more else 0),)
    settled(tmp_path, model, stage=stage, length=int(length), others=others, **options)
    # A teacher is on the GPU before the choice.
    teacher = 4 * model.num_parameters() if stage == "distill" and kind == "full" else 0
    if stage == "distill" and kind != "full":
        teacher = 4 * sum(weight.numel() for weight in MiniMindForCausalLM(config).parameters())
    assert estimates[0] + teacher == pytest.approx(int(peak.replace(",", "")), rel=0.1)


# Pretraining with Muon: rows of 512 tokens (of 1,024 for the largest).
@pytest.mark.parametrize(
    ("preset", "rows", "peak_gib"),
    [
        ("minimind2-small", 64, 4.86),
        ("minimind2", 128, 25.6),
        ("minimind3-moe", 32, 7.41),
        ("minimind-large", 24, 30.31),
        ("minimind3", 256, 30.92),
    ],
)
def test_the_estimate_of_pretraining_is_near_measured_peaks(preset, rows, peak_gib):
    config = MiniMindConfig(**PRESETS[preset])
    with torch.device("meta"):
        weights = weights_of(MiniMindForCausalLM(config))
    row_length = read_config(RECIPES / preset / "pretrain.yaml")["max_length"]
    assert needed_bytes(config, weights, rows * row_length) / GIB == pytest.approx(peak_gib, rel=0.1)


@pytest.mark.documents
@pytest.mark.parametrize("preset", ["0.5B", "1B"])
def test_the_documented_plans_of_the_large_presets(preset):
    fields = read_config(RECIPES / preset / "pretrain.yaml")
    config = MiniMindConfig(**PRESETS[preset], vocab_size=fields["vocab_size"])
    with torch.device("meta"):
        model = MiniMindForCausalLM(config)
    count, row_length, weights = model.num_parameters(), fields["max_length"], weights_of(model)
    page = (RECIPES.parent / "docs/getting-started.md").read_text(encoding="utf-8")
    assert f"| `{preset}` | {count / 1e6:,.2f}M |" in page

    def needed(rows: int) -> float:
        return needed_bytes(config, weights, rows * row_length, accumulates=rows < 512)

    state, row = (weights.kept_bytes + 6 * count) / GIB, activation_bytes(config, row_length) / GIB
    for name, free, peak in (("24 GB", 23.5, 165e12), ("80 GB", 79.0, 989e12)):
        rows = fitting_micro_batch(needed, rows=512, free=int(free * GIB))
        hours = flops_per_token(model) * 20 * count / (0.4 * peak) / 3600
        time = f"{hours:.0f} hours" if hours < 100 else f"{hours / 24:.2g} days"
        figures = f"{rows} | {state:.1f} | {row:.2f} | {needed(rows) / GIB:.1f} | {20 * count / 1e9:.1f} billion"
        assert f"| `{preset}` | {name} | {figures} | {time} |" in page

"""The tables of docs/memory.md and docs/weights.md are those of benchmarks/memory.py, and its parts fit real runs."""

import re

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import GIB
from tests.test_figures import read, record
from tests.toys import toy_model


pytestmark = pytest.mark.documents

PAGES = ("docs/memory.md", "docs/zh/memory.md")
PARTS = {  # by the name that the page gives, in the order of the table
    "Weights": ["trained", "frozen", "adapter", "reference"],
    "activation_bytes": ["activations", "masked", "recomputed"],
    "loss_bytes": ["logits", "gradient", "tile", "teacher"],
    "cache_bytes": ["cache"],
}


def gib(size: float, digits: int = 1) -> str:
    return f"{size / GIB:.{digits}f}"


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_methods_is_calculated(page):
    assert re.findall(r"^\| [\d.]+[MB] \|.*\|$", read(page), re.M) == memory.methods_table(1024)


@pytest.mark.parametrize("page", PAGES)
def test_the_parts_are_those_of_their_functions(page):
    found = re.findall(r"^\|[^|]+\| `(\w+)` \|[^|]+\| (\d[\d.]*) \| (\d[\d.]*) \|$", read(page), re.M)
    small, large = (memory.parts(name, 1024) for name in ("SmolLM2-135M", "Qwen3-0.6B"))
    expected = [(name, gib(small[part], 2), gib(large[part], 2)) for name, parts in PARTS.items() for part in parts]
    assert found == expected


@pytest.mark.parametrize("page", PAGES)
def test_the_remedies_are_calculated(page):
    text, sizes = read(page), memory.remedies("Qwen3-0.6B", 8, 1024)
    rows = re.findall(r"^\| `(--[^`]+)` \| ([\d.]+) \|", text, re.M)
    names = ("rows", "--activation_checkpointing", "--max_length", "--use_peft", "--load_in_4bit", "zero2_offload")
    assert [figure for _, figure in rows] == [gib(sizes[name]) for name in names]
    # The flags stand in the order of their cost.
    assert [flags.split()[0 if "4bit" not in flags else -1] for flags, _ in rows] == [
        *("--per_device_train_batch_size", "--activation_checkpointing", "--max_length", "--use_peft"),
        *("--load_in_4bit", "--deepspeed"),
    ]
    alone = memory.lora(memory.build("Qwen3-0.6B"), 1024)
    assert {gib(sizes["none"]), gib(alone)} <= set(re.findall(r"(\d+\.\d) GiB", text))


def test_the_table_of_published_models_is_calculated():
    rows = re.findall(r"^\| (\S+) \| ([\d,]+)M \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", read("docs/weights.md"), re.M)
    assert {name for name, *_ in rows} == {name for name in memory.MODELS if not name.startswith("minimind")}
    for name, number, *figures in rows:
        model = memory.build(name)
        assert number == f"{model.num_parameters() / 1e6:,.0f}"
        assert figures == [gib(method(model, 1024)) for method in (memory.full, memory.lora, memory.qlora)]


def test_the_sums_are_near_the_recorded_peaks():
    model = memory.build("SmolLM2-135M")
    weights = memory.Weights(model.num_parameters())
    sums = {name: method(model, 1024) for name, method in memory.METHODS.items()}
    sums["--activation_checkpointing"] = memory.needed_bytes(model.config, weights, 4096, recomputes=True)
    shares = {
        peak["method"]: sums[peak["method"]] / (peak["peak_gib"] * GIB)
        for peak in record("cuda-calls")["memory"]["peaks"]
    }
    assert len(shares) == 5
    assert all(0.9 < share < 1.1 for share in shares.values()), shares


def test_the_cache_of_rollouts_has_the_bytes_of_a_real_one():
    model = toy_model(num_key_value_heads=2).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layers = model(input_ids=torch.full((3, 7), 5), use_cache=True).past_key_values.layers
    size = sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))
    assert memory.cache_bytes(model.config, 3 * 7) == size


def test_an_adapter_has_the_parameters_of_a_real_one():
    peft = pytest.importorskip("peft")
    model = toy_model()
    modules = sorted({name.split(".")[-2] for name, _ in model.named_parameters() if "_proj" in name})
    expected = memory.adapter_size(model, rank=4)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules))
    assert expected == sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)

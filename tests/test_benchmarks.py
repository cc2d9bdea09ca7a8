"""`make bench` runs all programs in one precision."""

import pytest
import torch
from datasets import Dataset
from torch.nn.modules.module import register_module_forward_hook

from benchmarks import bench, programs
from hf_pretrain import MiniMindConfig
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import EXPERTS


@pytest.mark.parametrize(
    ("features", "expected"), [({"avx512_f": True}, "float32"), ({"avx2": True, "amx_bf16": True}, "bf16")]
)
def test_the_precision_is_the_fastest_of_the_device(monkeypatch, features, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert bench.fastest_precision() == expected


def make_setting(tmp_path, *, bf16: bool = False, **fields) -> programs.Setting:
    documents = Dataset.from_dict({"text": [f"{number} is a number, {number + 1} the next." for number in range(100)]})
    config = MiniMindConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **fields)
    tokenizer = train_tokenizer(documents["text"][:], vocab_size=300)
    return programs.Setting(documents, tokenizer, config, max_length=32, batch_size=2, output_dir=tmp_path, bf16=bf16)


@pytest.mark.parametrize("bf16", [False, True])
def test_all_programs_compute_in_the_same_precision(tmp_path, bf16):
    setting = make_setting(tmp_path, bf16=bf16)
    for build in (programs.ours, programs.bare_loop, programs.upstream_style, programs.stock_trainer):
        run, found = build(setting), set()

        def note(module, inputs, output, found=found):
            if isinstance(module, torch.nn.Linear) and module.out_features == setting.config.hidden_size:
                found.add(output.dtype)

        hook = register_module_forward_hook(note)
        try:
            run(1)
        finally:
            hook.remove()
        assert found == {torch.bfloat16 if bf16 else torch.float32}, build.__name__


@pytest.mark.parametrize("quiet", [1.0, 1e15])
def test_the_limit_is_the_best_measurement_and_never_below_the_reached_speed(tmp_path, monkeypatch, quiet):
    rates = iter([1.0, quiet, 1.0, 1.0])
    monkeypatch.setattr(bench, "measure_gemm_rate", lambda device, dtype: next(rates))
    # A model with experts has two programs.
    found = bench.compare(make_setting(tmp_path, **EXPERTS), rounds=2, steps=1)
    share = max(row["share_of_limit"] for row in found["programs"].values())
    assert share == pytest.approx(1.0) if quiet == 1.0 else found["gemm_flops_per_second"] == quiet


def test_the_table_says_its_precision(capsys):
    row = {"tokens_per_second": 2.0, "step_seconds": 1.0, "share_of_limit": 0.5, "ours_is_times_as_fast": 1.0}
    size = dict.fromkeys(("limit_tokens_per_second", "overhead_over_bare_loop", "loader_share"), 0.0)
    size |= {"programs": {"ours": row}, "growth_with_documents": 0.0}
    settings = {"precision": "float32"}
    bench.print_table({"machine": "a CPU", "settings": settings, "sizes": {"26M": size}, "cost_of_experts": 1.0})
    assert "26M in float32 on a CPU" in capsys.readouterr().out

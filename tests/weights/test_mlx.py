"""Exports in mlx-lm, as people run them on Macs; its CPU backend runs on Linux."""

import platform

import pytest
import torch

from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.exporting import export
from tests.models import FIXTURES
from tests.weights.test_gguf import MODELS, build


FORMATS = {"qwen3moe": "qwen3_moe", "ernie4_5-moe": "ernie4_5_moe"}


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="mlx is tested with its wheel for Linux"
)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_in_mlx(name, tmp_path):
    import mlx.core as mx
    from mlx_lm import load

    model = build(**MODELS[name])
    tokenizer = load_tokenizer(FIXTURES / "tokenizers" / ("v3" if model.config.qk_norm else "v1"))
    export(model, tmp_path / "out", FORMATS.get(name, name), tokenizer=tokenizer)
    ids = torch.randint(100, 6400, (1, 40), generator=torch.Generator().manual_seed(1))
    found, read = load(str(tmp_path / "out"))
    logits = torch.tensor(found(mx.array(ids.numpy())).astype(mx.float32).tolist())
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-4)
    chat = [{"role": "user", "content": "What is two and two?"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids
    assert read.apply_chat_template(chat, add_generation_prompt=True) == expected

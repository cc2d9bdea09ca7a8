"""Words that a run adds to a tokenizer (`--add_tokens`), and tokenizers without bos."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.encoding import encode_conversation
from hf_pretrain.tokenizer.control_tokens import encode_documents, encode_rendered
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT, start
from tests.toys import toy_model, write_jsonl


SIZES = "hidden_size=32,num_attention_heads=4,num_key_value_heads=2,vocab_size=320"


@pytest.fixture
def toy(tmp_path) -> ModelArguments:
    """Return the arguments of a toy model whose tokenizer gets two words."""
    words = ("river", "stone", "green light", "seven", "quiet animal")
    texts = [f"the {word} walks under the bridge" for word in words]
    tokenizer = train_tokenizer(texts * 4, vocab_size=320)
    assert len(tokenizer) == 320
    toy_model(vocab_size=320).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    (tmp_path / "words.txt").write_text("watershed\n\n天气预报\n", encoding="utf-8")
    return ModelArguments(model_name_or_path=str(tmp_path / "toy"), add_tokens=str(tmp_path / "words.txt"))


def test_words_are_tokens_in_text_and_their_rows_begin_at_the_mean(toy):
    tokenizer = toy.load_tokenizer()
    text = "the watershed <think> <|im_end|>天气预报"
    ids = encode_documents([text], tokenizer)[0]
    assert ids.count(320) == ids.count(321) == 1 and tokenizer.decode(ids[1:-1]) == text
    # Control tokens are still spelled letter by letter.
    assert tokenizer.eos_token_id not in ids[:-1] and tokenizer.convert_tokens_to_ids("<think>") not in ids
    set_template(tokenizer)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "watershed"}]
    chat, is_generated = encode_conversation(tokenizer, messages)
    assert chat.count(320) == 2 and is_generated[len(chat) - 1 - chat[::-1].index(320)]
    model = load_model(toy, tokenizer)
    old = MiniMindForCausalLM.from_pretrained(toy.model_name_or_path)
    assert model.config.vocab_size == 322 and model.lm_head.weight is model.model.embed_tokens.weight
    rows, old_rows = model.get_input_embeddings().weight, old.get_input_embeddings().weight
    torch.testing.assert_close(rows[:320], old_rows, rtol=0, atol=0)
    torch.testing.assert_close(rows[320:], old_rows.mean(0).expand(2, -1), rtol=0, atol=1e-3)
    inputs = torch.tensor([encode_documents(["the river"], tokenizer)[0]])
    torch.testing.assert_close(model(inputs).logits[..., :320], old(inputs).logits)
    names = {"tokenizer_name_or_path": toy.model_name_or_path, "add_tokens": toy.add_tokens}
    new = ModelArguments(**names, config_overrides=SIZES)
    assert load_model(new, new.load_tokenizer()).get_input_embeddings().weight.shape == (322, 32)
    # An untied head still computes the loss without all logits.
    untied = dataclasses.replace(new, config_overrides=f"{SIZES},tie_word_embeddings=false")
    load_model(untied, toy.load_tokenizer()).save_pretrained(f"{toy.model_name_or_path}-untied")
    Path(toy.add_tokens).write_text("watershed\n\n天气预报\nestuary\n", encoding="utf-8")
    toy.model_name_or_path += "-untied"
    resized = load_model(toy, new.load_tokenizer())
    assert resized.lm_head.weight.shape == (323, 32)
    outputs, whole = (resized(inputs, labels=inputs, skip_logits=is_fused) for is_fused in (True, False))
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, whole.loss)


@pytest.mark.parametrize("is_tied", [True, False])
def test_words_in_a_padded_vocabulary_begin_at_the_mean_of_the_trained_rows(toy, tmp_path, is_tied):
    """As in all Qwen3: the model has more rows than its tokenizer has tokens, and nobody has trained them."""
    path = tmp_path / "padded"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": is_tied}
    stock = Qwen3ForCausalLM(Qwen3Config(vocab_size=330, **sizes))
    matrices = [stock.get_input_embeddings().weight, *([] if is_tied else [stock.lm_head.weight])]
    for matrix in matrices:
        matrix.data[320:] = 50.0
    stock.save_pretrained(path)
    load_tokenizer(toy.model_name_or_path).save_pretrained(path)
    args = dataclasses.replace(toy, model_name_or_path=str(path))
    model = load_model(args, args.load_tokenizer())
    for new, old in zip((model.get_input_embeddings(), model.lm_head), matrices + matrices[:is_tied], strict=True):
        assert new.weight.shape == (330, 32)
        torch.testing.assert_close(new.weight[:320], old[:320], rtol=0, atol=0)
        torch.testing.assert_close(new.weight[320:322], old[:320].mean(0).expand(2, -1), rtol=0, atol=1e-3)
    # A model that has learnt the words keeps their rows.
    model.get_input_embeddings().weight.data[320:322] = 7.0
    model.save_pretrained(tmp_path / "learnt")
    args.load_tokenizer().save_pretrained(tmp_path / "learnt")
    args.model_name_or_path = str(tmp_path / "learnt")
    assert (load_model(args, args.load_tokenizer()).get_input_embeddings().weight[320:322] == 7.0).all()


def test_words_keep_their_ids_beside_control_tokens_outside_the_base_vocabulary():
    """As in Qwen's tokenizers, whose added tokens all have ids above the base vocabulary."""
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_tokens(["zebra", "watershed"])
    assert encode_documents(["zebrawatershed"], tokenizer) == [[259, 260, 257]]
    assert encode_rendered(tokenizer, "<|im_start|>watershed<think>")[0] == [256, 260, 258]
    assert not {256, 257, 258} & {*encode_documents(["<|im_start|><|im_end|><think>"], tokenizer)[0][:-1]}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["pretrain", "sft"])
def test_a_run_trains_the_new_rows_and_resumes(toy, tmp_path, recipe):
    texts = [f"the watershed {n} 天气预报" for n in range(40)]
    records = texts if recipe == "pretrain" else [{"prompt": text, "completion": text} for text in texts]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    command = [sys.executable, str(ROOT / f"recipes/{recipe}.py"), "--model_name_or_path", toy.model_name_or_path]
    command += ["--add_tokens", toy.add_tokens, "--dataset_name", data, "--max_length", "64", "--use_cpu"]
    command += "--bf16 false --report_to none --max_steps 2 --save_steps 1 --warmup_steps 0".split()
    result = start([*command, "--output_dir", str(tmp_path / "run")])
    assert result.returncode == 0, result.stdout[-3000:]
    assert load_tokenizer(tmp_path / "run").convert_tokens_to_ids("天气预报") == 321
    weights = load_file(tmp_path / "run/model.safetensors")
    begun = load_model(toy, toy.load_tokenizer()).get_input_embeddings().weight
    assert ((weights["model.embed_tokens.weight"] - begun)[320:].abs().amax(1) > 1e-5).all()
    resume = ["--resume_from_checkpoint", str(tmp_path / "run/checkpoint-1"), "--output_dir", str(tmp_path / "again")]
    result = start([*command, *resume])
    assert result.returncode == 0, result.stdout[-3000:]
    for name, weight in load_file(tmp_path / "again/model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6)
    result = start([*command, "--use_peft", "--optim_preset", "adamw", "--output_dir", str(tmp_path / "adapter")])
    assert result.returncode == 2 and "--add_tokens trains new rows, which --use_peft freezes" in result.stdout


@pytest.mark.slow
def test_a_tokenizer_without_bos_trains_and_evaluates(toy, tmp_path):
    tokenizer = load_tokenizer(toy.model_name_or_path)
    plain = encode_documents(["the river"], tokenizer)
    tokenizer.bos_token = None
    assert encode_documents(["the river"], tokenizer) == [plain[0][1:]]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = write_jsonl(tmp_path / "data.jsonl", [f"the river {n} under the bridge" for n in range(40)])
    flags = ["--dataset_name", data, *"--use_cpu --bf16 false --report_to none --validation_fraction 0.2".split()]
    train = ["--tokenizer_name_or_path", str(tmp_path / "tokenizer"), "--config_overrides", SIZES]
    train += ["--max_length", "32", "--max_steps", "2", "--output_dir", str(tmp_path / "run")]
    result = start([sys.executable, str(ROOT / "recipes/pretrain.py"), *flags, *train])
    assert result.returncode == 0 and "Validation loss" in result.stdout, result.stdout[-3000:]
    assert MiniMindForCausalLM.from_pretrained(tmp_path / "run").config.bos_token_id is None
    assert load_tokenizer(tmp_path / "run").bos_token is None

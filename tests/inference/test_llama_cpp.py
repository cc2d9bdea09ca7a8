"""Answers by llama.cpp, beside those of `generate` of transformers with the same arguments."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import psutil
import pytest
import requests
import torch
from gguf import GGUFWriter
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.inference.inference_arguments import with_engine
from hf_pretrain.inference.llama_cpp import NUM_SEQUENCES, EngineEnded, LlamaCppModel
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.weights import gguf
from tests.invariants.launching import ROOT, cpu_environment
from tests.talking import SUM
from tests.weights.test_gguf import MODELS, build


@pytest.fixture(scope="module")
def engine(model) -> LlamaCppModel:
    return LlamaCppModel(model, num_sequences=NUM_SEQUENCES)


def prompt_of(tokenizer, messages) -> dict[str, torch.Tensor]:
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return dict(tokenizer.apply_chat_template(messages, **options))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_each_architecture(name):
    model = build(**MODELS[name])
    ids = torch.randint(6400, (1, 24), generator=torch.Generator().manual_seed(0))
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert LlamaCppModel(model).generate(ids, **how).tolist() == model.generate(ids, **how).tolist()


def test_a_batch_of_prompts_of_several_lengths(model, tokenizer, engine, monkeypatch):
    texts = ["two and two?", "hello", "What is the weather in Oslo?"] * 8
    chats = [prompt_of(tokenizer, [{"role": "user", "content": text}])["input_ids"][0].tolist() for text in texts]
    batch = tokenizer.pad({"input_ids": chats}, padding_side="left", return_tensors="pt")
    how = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    expected = model.generate(**batch, **how)
    assert engine.generate(**batch, **how).tolist() == expected.tolist()
    # The cache has room for one of them at a time.
    monkeypatch.setattr(engine, "_room", type(engine._room)(100))
    assert engine.generate(**batch, **how).tolist() == expected.tolist()


TOP_P = [TopPLogitsWarper(0.7)]


@pytest.mark.parametrize(
    ("options", "processors"),
    [
        ({}, [TopKLogitsWarper(50)]),
        ({"top_k": 0}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6), TopKLogitsWarper(50)]),
        ({"temperature": 1.5, "top_k": 5}, [TemperatureLogitsWarper(1.5), TopKLogitsWarper(5)]),
        ({"temperature": 2.5, "top_k": 0, "top_p": 0.7}, [TemperatureLogitsWarper(2.5), *TOP_P]),
        ({"temperature": 2.5, "top_k": 9, "top_p": 0.7}, [TemperatureLogitsWarper(2.5), TopKLogitsWarper(9), *TOP_P]),
        ({"top_k": 0, "repetition_penalty": 1.8}, [RepetitionPenaltyLogitsProcessor(1.8)]),
        ({"top_k": 0, "sequence_bias": {(70,): 2.0}}, [SequenceBiasLogitsProcessor({(70,): 2.0})]),
    ],
)
@torch.no_grad()
def test_tokens_are_drawn_from_the_distribution_of_transformers(options, processors, monkeypatch):
    model = build()
    engine, post, seen = LlamaCppModel(model), LlamaCppModel._post, []

    def ask_for_probabilities(self, **content):
        seen[:] = post(self, **content, n_probs=6400, post_sampling_probs=True)
        yield seen[0]

    monkeypatch.setattr(LlamaCppModel, "_post", ask_for_probabilities)
    ids = torch.randint(6400, (1, 24), generator=torch.Generator().manual_seed(1))
    config = GenerationConfig(max_new_tokens=1, do_sample=True, **options)
    engine.generate(ids, torch.ones_like(ids), generation_config=config)
    expected = LogitsProcessorList(processors)(ids, model(ids).logits[:, -1].float()).softmax(-1)[0]
    found = {entry["id"]: entry["prob"] for entry in seen[0]["completion_probabilities"][0]["top_probs"]}
    # Rounded logits may move the bound of `top_p` by some improbable tokens.
    assert sum(probability for token, probability in found.items() if expected[token] == 0) <= 0.002
    for token, probability in found.items():
        assert probability == pytest.approx(expected[token].item(), rel=0.02, abs=1e-5) or expected[token] == 0
    # The server leaves out improbable tokens.
    assert sum(found.values()) == pytest.approx(1, abs=0.02)


def test_samples_differ_and_a_seed_repeats_them(engine, tokenizer):
    prompt = prompt_of(tokenizer, SUM[:1])
    how = {"max_new_tokens": 12, "do_sample": True, "temperature": 50.0, "pad_token_id": 0}
    samples = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        samples += [engine.generate(**prompt, **how).tolist() for _ in range(2)]
    assert samples[:2] == samples[2:4] and samples[0] != samples[1] != samples[4] != samples[0]


def test_threads_and_a_streamer_that_stops_early(engine, tokenizer):
    """Ctrl-C, or a client that leaves, ends one answer and no other."""
    prompt = prompt_of(tokenizer, SUM[:1])
    how = {"do_sample": False, "pad_token_id": 0}

    class Impatient(BaseStreamer):
        def put(self, value):
            if value.numel() == 1:
                raise KeyboardInterrupt

    with ThreadPoolExecutor() as threads:
        others = [threads.submit(engine.generate, **prompt, **how, max_new_tokens=40) for _ in range(8)]
        with pytest.raises(KeyboardInterrupt):
            engine.generate(**prompt, **how, max_new_tokens=900, streamer=Impatient())
    answers = {tokenizer.decode(other.result()[0]) for other in others}
    assert len(answers) == 1 and "It is four." in answers.pop()


def test_other_programs_of_the_machine_get_no_answer(engine):
    assert requests.post(f"{engine._address}/completion", json={"prompt": [5]}, timeout=60).status_code == 401


def test_an_adapter_answers(model, tokenizer):
    """The adapter is merged. Its second half is zero at first, so change it."""
    adapted = add_adapter(MiniMindForCausalLM(model.config).eval(), AdapterArguments(use_peft=True))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.randint(300, (1, 24), generator=torch.Generator().manual_seed(0))
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = adapted.generate(input_ids=ids, **how).tolist()
    found = with_engine(adapted, None)
    assert isinstance(found, LlamaCppModel) and found.generate(ids, **how).tolist() == expected


# What llama.cpp cannot run, or computes differently


def changed(change, **fields):
    model = build(**fields)
    change(model)
    return model


SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: changed(lambda m: m.generation_config.update(min_p=0.9)), "llama.cpp does not know min_p of the"),
        (lambda: changed(lambda m: m.model.norm.weight.data.fill_(torch.nan)), "they differ by nan nats"),
        (lambda: build(**SCALED), "scaled rotary positions"),
        (lambda: build(hidden_act="gelu"), "the activation gelu"),
        (lambda: changed(lambda m: m.lm_head.weight.data.mul_(1e9), tie_word_embeddings=False), "overflow float16"),
    ],
)
def test_transformers_generates_what_llama_cpp_cannot(make, words, capsys):
    model = make()
    assert with_engine(model, None) is model
    assert "transformers generates, which is slower" in (said := capsys.readouterr().err) and words in said
    with pytest.raises(UserError):
        with_engine(model, "llama.cpp")
    assert with_engine(model, "transformers") is model and not capsys.readouterr().err


def test_other_probabilities_are_noticed(monkeypatch):
    """Without the change of the rotated channels, or with another base, the file holds another model."""
    model, add = build(qk_norm=True), GGUFWriter.add_float32
    for place, change in (
        ((gguf, "is_rotated"), lambda name: False),
        ((GGUFWriter, "add_float32"), lambda self, key, x: add(self, key, x * (1 + key.endswith("freq_base")))),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError):
            patch.setattr(*place, change)
            LlamaCppModel(model)


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_that_breaks_off_is_no_answer(endless, is_stream):
    """The kernel kills llama.cpp when memory is out. The answer would take a minute."""
    engine, ids = LlamaCppModel(MiniMindForCausalLM.from_pretrained(endless).eval()), torch.tensor([[234]])

    class Killer(BaseStreamer):
        num_tokens = 0

        def put(self, value):
            self.num_tokens += 1
            if self.num_tokens == 20:
                engine._process.kill()

    timer = threading.Timer(1, engine._process.kill)
    if not is_stream:
        timer.start()
    for streamer in (Killer() if is_stream else None, None):
        with pytest.raises(EngineEnded):
            engine.generate(ids, torch.ones_like(ids), max_new_tokens=8000, streamer=streamer)
    engine._stop()
    assert engine._process.returncode == -signal.SIGKILL


def test_a_damaged_answer_is_no_answer(engine, tokenizer, monkeypatch):
    """The process lives, and its response has no last part, or an error in the middle."""
    body = b'data: {"tokens": [5], "stop": false}\n'
    for rest in (b"", b'data: {"tokens": [6], "st', b'data: {"error": {"message": "Compute error"}}\n'):
        monkeypatch.setattr(HTTPConnection, "getresponse", lambda self, rest=rest: Response(body + rest))
        monkeypatch.setattr(engine._process, "wait", lambda seconds: None)
        with pytest.raises(EngineEnded):
            engine.generate(**prompt_of(tokenizer, SUM[:1]), max_new_tokens=9)


class Response(io.BytesIO):
    status = 200


@pytest.mark.slow
def test_a_signal_while_the_file_is_written_leaves_nothing_behind(endless, tmp_path):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        words = ["--model_name_or_path", str(endless), "--use_cpu", "--prompt", "two", "--max_new_tokens", "1"]
        command = [sys.executable, str(ROOT / "recipes/chat.py"), *words]
        for _ in range(9):
            with subprocess.Popen(command, env=cpu_environment() | {"TMPDIR": str(tmp_path)}) as process:
                while not [*tmp_path.glob("*/model.gguf")]:
                    assert process.poll() is None
                    time.sleep(0.005)
                # On a busy machine, the file may be whole before this process sees it.
                process.send_signal(signal.SIGSTOP)
                files = [file.path for file in psutil.Process(process.pid).open_files()]
                is_early = any(path.endswith("model.gguf") for path in files)
                process.send_signal(number if is_early else signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
            assert [*tmp_path.glob("tmp*")] == []
            if is_early:
                break
        assert process.returncode == -number


def test_the_process_does_not_outlive_a_killed_program(model):
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        try:
            engine = LlamaCppModel(model)
            os.write(writer, str(engine._process.pid).encode())
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(writer)
    child = psutil.Process(int(os.read(reader, 20)))
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    child.wait(30)
    assert not child.is_running()

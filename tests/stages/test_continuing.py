"""Raw continuation of text, and the choice between continuing and chatting."""

import json
import os
import re
import shutil
import sys

import pytest
import torch

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.hub.model_card import RunFacts
from hf_pretrain.stages.continuing import Continuation, is_base_model
from hf_pretrain.stages.generating import Generator
from hf_pretrain.tokenizer.loading import load_tokenizer
from hf_pretrain.training.running import train_and_evaluate
from tests.invariants.launching import ROOT, start
from tests.training.test_trainer import make_documents, make_model, make_trainer


@pytest.fixture
def generator(talker) -> Generator:
    model = MiniMindForCausalLM.from_pretrained(talker).eval()
    return Generator(model, load_tokenizer(talker), temperature=0, max_new_tokens=8)


@pytest.fixture
def continuation(generator) -> Continuation:
    return Continuation(generator)


def expected(generator: Generator, ids: list[int]) -> str:
    """Return the greedy continuation of a prompt, one forward pass per token, without control tokens."""
    new: list[int] = []
    while len(new) < generator.max_new_tokens and generator.tokenizer.eos_token_id not in new:
        logits = generator.model(torch.tensor([ids + new])).logits
        new.append(int(logits[0, -1].argmax()))
    return generator.tokenizer.decode(new, skip_special_tokens=True)


def test_the_text_is_continued_as_a_document(continuation, generator):
    """The prompt is bos and the text, with the white space at its end, without a chat template around it."""
    shown = []
    assert continuation.say(" two and ")
    text = continuation.answer(shown.append)
    tokenizer = generator.tokenizer
    prompt = [tokenizer.bos_token_id, *tokenizer(" two and ", add_special_tokens=False)["input_ids"]]
    assert text == "".join(shown) == expected(generator, prompt) != ""
    assert continuation.text == " two and " + text


def test_an_empty_line_continues_the_last_text_and_another_begins_a_new_one(continuation, tmp_path):
    assert not continuation.say("")
    continuation.say("two")
    first = continuation.answer(list)
    assert continuation.say("")
    second = continuation.answer(list)
    assert continuation.text == "two" + first + second
    continuation.run_command(f"/save {tmp_path}/texts.jsonl")
    assert json.loads((tmp_path / "texts.jsonl").read_text()) == {"text": continuation.text}
    continuation.say("It")
    assert continuation.text == "It"
    continuation.run_command("/reset")
    assert not continuation.say("")


def test_the_text_cannot_contain_control_tokens(continuation, monkeypatch):
    prompts = []
    generate = continuation.generator.model.generate
    record = lambda ids, **kwargs: prompts.append(ids) or generate(ids, **kwargs)  # noqa: E731
    monkeypatch.setattr(continuation.generator.model, "generate", record)
    continuation.say("hi<|im_end|>")
    continuation.answer(list)
    tokenizer = continuation.generator.tokenizer
    control = [i for i in prompts[0][0].tolist() if i in tokenizer.added_tokens_decoder]
    assert control == [tokenizer.bos_token_id]


def test_a_text_is_saved_only_if_there_is_one(continuation, tmp_path):
    """Pretraining counts an empty text as a bad line."""
    with pytest.raises(ValueError, match="there is no text yet"):
        continuation.run_command(f"/save {tmp_path}/texts.jsonl")
    assert not (tmp_path / "texts.jsonl").exists()


def test_commands(continuation):
    assert continuation.run_command("/temperature 0.5") == "temperature: 0.5"
    assert continuation.generator.temperature == 0.5
    assert "An empty line continues" in continuation.run_command("/help")
    for line in ("/system Be brief.", "/think on", "/save"):
        with pytest.raises(ValueError, match="is not a command for raw continuation"):
            continuation.run_command(line)


@pytest.mark.parametrize(
    ("launches", "is_base"),
    [
        ([{"recipe": "pretrain"}], True),
        ([{"recipe": "sft"}], False),
        ([{"recipe": "sft"}, {"recipe": "pretrain"}], True),
        ([{"recipe": "distill", "arguments": {"dataset_kind": "text"}}], True),
        ([{"recipe": "distill", "arguments": {"dataset_kind": "auto"}}], False),
        # The last launch ended before its training.
        ([{"recipe": "pretrain"}, {}], True),
        ([{"recipe": "sft"}, {}], False),
        # A record of an earlier version, and none.
        ([{}], None),
        ([], None),
    ],
)
def test_the_record_of_the_run_tells_base_models(generator, tmp_path, launches, is_base):
    (tmp_path / "run.json").write_text(json.dumps(launches))
    model, tokenizer = generator.model, generator.tokenizer
    for do_sample in (True, False, None):
        model.generation_config.do_sample = do_sample
        expected = do_sample is False if is_base is None else is_base
        assert is_base_model(str(tmp_path), model, tokenizer) == expected
        assert is_base_model(str(tmp_path / "checkpoint-10"), model, tokenizer) == expected
        assert is_base_model("owner/name", model, tokenizer) == (do_sample is False)
    tokenizer.chat_template = None
    assert is_base_model("owner/name", model, tokenizer)


@pytest.mark.parametrize("start", [{"do_sample": True, "temperature": 0.5, "top_k": 20}, {"do_sample": False}])
@pytest.mark.parametrize(
    ("kind", "is_base"), [("text", True), ("conversations", False), ("preferences", False), ("tasks", False)]
)
def test_the_files_of_the_model_alone_tell_base_models(generator, tmp_path, kind, is_base, start):
    """`run.json` is never pushed to the Hub. A run may begin with a chat model or with a base model."""
    model = make_model()
    model.generation_config.update(**start)
    trainer = make_trainer(tmp_path / "run", make_documents(), model=model, arguments={"max_steps": 1})
    trainer.run_facts = RunFacts(data_kind=kind)
    train_and_evaluate(trainer, checkpoint=None)
    (tmp_path / "run/run.json").unlink()
    written = MiniMindForCausalLM.from_pretrained(tmp_path / "run")
    assert is_base_model(str(tmp_path / "run"), written, generator.tokenizer) == is_base
    # Training on preferences or tasks keeps the settings of a chat model.
    keeps = kind in ("preferences", "tasks") and start["do_sample"]
    assert written.generation_config.temperature == (None if is_base else 0.5 if keeps else 0.8)


def test_the_recipe_continues_or_answers(talker, tmp_path):
    shutil.copytree(talker, tmp_path / "base")
    (tmp_path / "base/run.json").write_text('[{"recipe": "pretrain"}]')
    command = [sys.executable, str(ROOT / "recipes/chat.py"), "--greedy", "--model_name_or_path"]
    command.append(str(tmp_path / "base"))
    result = start([*command, "--max_new_tokens", "4"], typed="two\n\n/reset\n\n/quit\n", apart=True)
    assert "a base model: it continues your text" in result.stdout, result.stderr[-3000:]
    # The empty line after /reset gets no answer.
    assert len(re.findall(r"\[\d tokens?, [\d.]+ tokens/s\]", result.stdout)) == 2
    result = start([*command, "--no-raw", "--think", "off", "--prompt", "two and two?"], apart=True)
    assert result.stdout == "It is four.\n", result.stderr[-3000:]
    for words, message in (
        (["--system", "Be brief."], "--system has no effect on raw continuation."),
        (["--prompt", ""], "--prompt is empty."),
        (["--temperature", "-1"], "The temperature -1.0 must be 0 or a positive number"),
    ):
        result = start([*command[:2], *command[3:], *words], apart=True)
        assert result.returncode == 2 and message in result.stderr


def test_a_newer_base_model_does_not_hide_the_chat_model(talker, tmp_path):
    for seconds, (name, recipe) in enumerate([("old chat", "sft"), ("mine", "sft"), ("side", "pretrain")]):
        run = tmp_path / "out" / name
        shutil.copytree(talker, run)
        (run / "run.json").write_text(json.dumps([{"recipe": recipe}]))
        os.utime(run / "model.safetensors", (seconds, seconds))
    hint = "The newest chat model is out/mine: --model_name_or_path out/mine\n"
    command = [sys.executable, str(ROOT / "recipes/chat.py")]
    result = start(command, cwd=tmp_path, typed="/quit\n", apart=True)
    assert result.stdout.startswith(
        f"out/side, a base model: it continues your text\n/help lists the commands.\n{hint}"
    )
    # The user has chosen this model, or this way.
    for words in (["--model_name_or_path", "out/side"], ["--raw"]):
        result = start([*command, *words], cwd=tmp_path, typed="/quit\n", apart=True)
        assert "newest chat model" not in result.stdout and "a base model" in result.stdout

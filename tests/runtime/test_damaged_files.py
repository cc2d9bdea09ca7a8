"""A file that is damaged, or a path that cannot be, ends in one line that names it; a bug keeps its traceback."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config

from hf_pretrain.checkpoints.directory import find_newest_run
from hf_pretrain.inference.inference_arguments import SamplingArguments, load_for_inference
from hf_pretrain.inference.serving import serve_model
from hf_pretrain.run_directory.directory import RunDirectory
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.parser import read_config
from hf_pretrain.stages.distillation import load_teacher
from hf_pretrain.stages.from_scratch import Budget
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import toy_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, an adapter on it, and a file that lies where a directory should be."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(["What is 12 + 30? Blue sky."] * 9, vocab_size=320)
    toy_model(vocab_size=320).save_pretrained(path / "model")
    adapted = get_peft_model(toy_model(vocab_size=320), LoraConfig(target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(path / "model")
    adapted.save_pretrained(path / "adapter")
    for name in ("model", "adapter"):
        tokenizer.save_pretrained(path / name)
    return path


@pytest.fixture
def error_line(capsys):
    """Return a function that calls another one, which ends in one line and status 2, and returns the line."""

    def call(action, *words) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end, one_line_errors():
            action(*words)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert end.value.code == 2
        return line

    return call


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize(
    "file",
    [
        *("model/config.json", "model/generation_config.json", "model/model.safetensors", "model/tokenizer.json"),
        *("model/tokenizer_config.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
    ],
)
def test_a_damaged_model_is_named_in_one_line(file, content, models, tmp_path, error_line):
    directory = tmp_path / "the-model"
    shutil.copytree((models / file).parent, directory)
    (directory / Path(file).name).write_bytes(content)
    assert "the-model" in error_line(LOADERS["recipe"], str(directory))


class _Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


LOADERS = {
    "recipe": lambda name: load_for_inference(SamplingArguments(model_name_or_path=name)),
    "serve": lambda name: serve_model(name, host="127.0.0.1", port=0, hosts=[]),
    "teacher": lambda name: load_teacher(name, load_tokenizer(name)),
}


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        *((kind, load) for kind in ("model", "adapter") for load in ("recipe", "serve")),
        ("model", "teacher"),
        *(("gpt2", load) for load in ("serve", "teacher")),
    ],
)
def test_a_pickle_of_code_ends_in_one_line_and_runs_nothing(kind, load, models, tmp_path, error_line):
    directory = tmp_path / "the-model"
    shutil.copytree(models / ("adapter" if kind == "adapter" else "model"), directory)
    (weights,) = directory.glob("*.safetensors")
    weights.unlink()
    torch.save(
        {"a": _Code(tmp_path / "ran")}, directory / f"{'adapter' if kind == 'adapter' else 'pytorch'}_model.bin"
    )
    if kind == "gpt2":
        GPT2Config(vocab_size=320, n_embd=8, n_layer=1, n_head=1).save_pretrained(directory)
    assert "the-model" in error_line(LOADERS[load], str(directory)) or kind == "gpt2"
    assert not (tmp_path / "ran").exists()


READERS = {
    "config": read_config,
    "extends": lambda path: path.write_text("extends: plan.json") and read_config(path),
    "plan": lambda path: Budget(path.parent, 60),
    "template": lambda path: set_template(train_tokenizer(["one"], vocab_size=300), str(path)),
    "module": lambda path: compile(path.read_bytes(), path, "exec"),
    "directory": lambda path: (path / "run").mkdir(parents=True),
    "long name": lambda path: (path.parent / (path.name + "x" * 300)).stat(),
}


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_cannot_be_used_is_named_in_one_line(read, tmp_path, error_line):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe def f(:")
    assert "plan.json" in error_line(READERS[read], path)


@pytest.mark.parametrize("text", ["[]", "{", "[1]"])
def test_a_damaged_run_is_left_out_with_a_line(text, tmp_path, caplog):
    for name in ("good", "bad"):
        toy_model(vocab_size=64).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
    (tmp_path / "bad/config.json").write_text(text)
    (tmp_path / "bad/run.json").write_text("{" if text == "[]" else text)
    with caplog.at_level("WARNING"):
        assert find_newest_run(str(tmp_path)) == str(tmp_path / "good")
        assert RunDirectory(tmp_path / "bad").launches == []


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "status"), [("/dev/full", 74), ("pipe", 141)])
def test_a_lost_result_is_no_success(stream, status):
    code = "from hf_pretrain.runtime.command_line import one_line_errors, print_result\n"
    code += "with one_line_errors():\n  print('lost'); print_result('the result')"
    if stream == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(stream, os.O_WRONLY)
    result = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert result.returncode == status and "Traceback" not in result.stderr
    assert ("No space left on device" in result.stderr) == (status == 74)

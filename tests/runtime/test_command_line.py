"""
Mistakes end a recipe with one line and status 2; bugs keep their tracebacks. A recipe says on standard error what it
does, and prints its result to standard output.
"""

import errno
import io
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import uuid
from contextlib import suppress
from threading import Thread

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import get_session
from huggingface_hub.constants import ENDPOINT, HF_HOME
from transformers import Trainer

from hf_pretrain import MiniMindConfig
from hf_pretrain.inference.tools import load_tools
from hf_pretrain.model.mlp import MiniMindMLP
from hf_pretrain.runtime import command_line
from hf_pretrain.runtime.command_line import announce, one_line_errors, progress
from hf_pretrain.runtime.errors import UserError, install_command
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.resuming import checkpoint_to_resume
from hf_pretrain.weights.layouts import LAYOUTS
from tests.checkpoints.test_checkpointing import arguments
from tests.hub_server import connect
from tests.invariants.launching import ROOT, start
from tests.models import GOLDEN
from tests.toys import needs_posix, write_jsonl
from tests.trainers import make_run_trainer


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """Return a function that runs a recipe in this process, and returns its exit status and its stderr."""

    def run(recipe: str, *words: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        # A directory of its own for each run in this process.
        words = tuple(str(tmp_path / word) if word in ("run", "used") else word for word in words)
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"recipes/{recipe}.py"), *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return end.value.code, capfd.readouterr().err

    return run


NO_MODEL = "'nope' is neither a directory here nor a Hub id with a tokenizer"
RUN = ("--use_cpu", "--output_dir", "run")
SMALL = ("--dataset_name", "text.jsonl", "--vocab_size", "300", "--bf16", "false", "--report_to", "none")
SMALL += ("--config_overrides", "hidden_size=32,num_hidden_layers=1,num_attention_heads=4", "--max_length", "32")


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("pretrain", ["--learning_rat", "1"], "Unknown argument '--learning_rat'; the nearest one is "),
        ("chat", ["--temprature=1"], "Unknown argument '--temprature=1'; the nearest one is temperature."),
        ("pretrain", ["--lr_scheduler_type", "cosin"], "--lr_scheduler_type: invalid choice: 'cosin'"),
        ("pretrain", ["--output_dir="], "--output_dir is empty. Give it a value, or leave the flag out."),
        ("pretrain", ["--optim", "adamw_tourch", *RUN], "adamw_tourch is not a valid OptimizerNames"),
        ("pretrain", ["--config_overrides", "hiden_size=8", *RUN], "'hiden_size' is not a field of MiniMindConfig"),
        # transformers refuses this one.
        ("pretrain", ["--save_steps", "1.5", *RUN], "--save_steps must be an integer if bigger than 1: 1.5"),
        ("pretrain", ["--use_peft", *RUN], "--optim_preset muon trains no adapters. Pass --optim_preset adamw"),
        ("pretrain", ["--deepspeed", str(ROOT / "ds_configs/zero2.json"), *RUN], "--deepspeed needs a launcher"),
        ("pretrain", ["--dataset_name", "nope.jsonl", *RUN], "There is no file or directory nope.jsonl"),
        ("pretrain", ["--streaming", "--max_steps", "-1", *RUN], "--streaming needs --max_steps"),
        ("pretrain", ["--config", "missing.yaml"], "--config missing.yaml cannot be read: [Errno 2] No such file"),
        ("pretrain", ["--config", "twice.yaml"], "'max_steps' stands twice"),
        ("pretrain", ["--config", "unknown.yaml"], "unknown.yaml: unknown key `learning_rat`; the nearest one"),
        (
            "sft",
            ["--config", "factory.yaml"],
            "unknown key `stage`, `cutoff_len`; here it is max_length, `lora_rank`; here it is lora_r.",
        ),
        (
            "sft",
            ["--evaluation_strategy=no", "--bf17", *RUN],
            "'--evaluation_strategy=no'; here it is eval_strategy, '--bf17'. `--help`",
        ),
        ("sft", ["--config", str(ROOT / "recipes/tiny/sft.yaml"), *RUN], "There is no directory out/pretrain-tiny"),
        ("pretrain", ["--report_to", "wandbb", *RUN], "--report_to wandbb is unknown or not installed. Here: "),
        ("pretrain", ["--metric_for_best_model", "perplexty", *RUN], "perplexty is unknown; the nearest one is"),
        ("pretrain", ["--metric_for_best_model", "foo", *SMALL, *RUN], "foo is no figure of this run. It has loss,"),
        ("pretrain", ["--metric_for_best_model", "kl", *SMALL, *RUN], "kl is no figure of this run. It has loss,"),
        ("pretrain", ["--dataset_name", "caf\udce9.jsonl", *RUN], r"'caf\udce9.jsonl' is not UTF-8. Rename the file"),
        ("pretrain", ["--use_cpu", "--output_dir", "used"], "used is not empty"),
        ("pretrain", ["--use_cpu", "--output_dir", "used", "--dry_run"], "used is not empty"),
        ("grpo", ["--use_vllm", *RUN], "--use_vllm needs vLLM, which is not installed"),
        ("from_scratch", ["--sft_args", "--learning_rat 1"], "Unknown argument '--learning_rat'; the nearest one is"),
        ("from_scratch", ["--sft_args", "--max_length 1"], "--max_length 1 must be at least 8"),
        ("from_scratch", ["--sft_args", "--dataset_name nope.jsonl"], "There is no file or directory nope.jsonl"),
        ("from_scratch", ["--sft_args", "--nproc many"], "argument --nproc: invalid int value: 'many'"),
        ("from_scratch", ["--pretrain_args", "--run_name 'a"], "--pretrain_args \"--run_name 'a\" cannot be read: "),
        ("evaluate", ["--use_cpu"], "No model in out/"),
        ("chat", ["--model_name_or_path", "nope"], NO_MODEL),
        ("chat", ["--model_name_or_path", "wrong", "--prompt", "hi"], "rms_norm_eps"),
        ("serve", [], "No model in out/"),
        ("convert", ["--from", "nope", "--to", "x"], "nope: no such file or directory"),
        ("data", ["inspect", "embedded:chaterbot"], "embedded:chaterbot is unknown; the nearest one is"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(run, toys, tmp_path, recipe, words, message):
    (tmp_path / "twice.yaml").write_text("max_steps: 1\nmax_steps: 2\n")
    # PyYAML recognises UTF-16.
    (tmp_path / "unknown.yaml").write_text("learning_rat: 1", encoding="utf-16")
    (tmp_path / "factory.yaml").write_text("stage: sft\ncutoff_len: 64\nlora_rank: 8\nlearning_rate: 1.0e-4\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "some words to learn {n}"}}\n' for n in range(300)))
    if "wrong" in words:
        shutil.copytree(toys / "dense", tmp_path / "wrong")
        path = tmp_path / "wrong/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": -1}))
    status, output = run(recipe, *words)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and message in errors[0], output
    assert "Traceback" not in output and "usage:" not in output
    # The corrected command starts in the same directory.
    assert checkpoint_to_resume(arguments(tmp_path / "run")) is None


def test_debug_shows_the_traceback(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "recipes/evaluate.py"), "--log_level", "debug", "--use_cpu"])
    with pytest.raises(UserError):
        runpy.run_path(sys.argv[0], run_name="__main__")


BUGS = {
    "recipe": lambda: int("three"),
    # Three halves of experts: zip() raises the ValueError.
    "package": lambda: LAYOUTS["v2"].join("experts.gate_up_proj", 3 * [torch.zeros(2)], MiniMindConfig()),
    "library": lambda: json.loads("{"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_keeps_its_traceback(bug, capsys):
    with pytest.raises(Exception) as raised, one_line_errors():
        BUGS[bug]()
    assert not isinstance(raised.value, SystemExit) and not isinstance(raised.value, UserError)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (MiniMindMLP, "forward"),
        (Accelerator, "backward"),
        (torch.optim.AdamW, "step"),
        (Trainer, "prediction_step"),
    ],
)
def test_memory_that_does_not_suffice_is_one_line(owner, name, monkeypatch, tmp_path, capsys):
    """More bytes than a process can address, in each part of a training."""
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: torch.empty(2**50))
    trainer = make_run_trainer(tmp_path, optim_preset="adamw", eval_strategy="steps", eval_steps=1)
    with pytest.raises(SystemExit) as end, one_line_errors():
        trainer.train()
    line = capsys.readouterr().err.splitlines()[-1]
    refused = r"error: The memory does not suffice: 4,294,967,296.0 MiB were refused; .* are free\."
    assert end.value.code == 71 and re.match(refused, line), line
    assert all(flag in line for flag in ("--gradient_accum", "--activation_checkp", "--max_length")), line


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation."),
        RuntimeError("MPS backend out of memory (MPS allocated: 18.0 GiB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        MemoryError(),
    ],
    ids=repr,
)
def test_the_allocators_of_other_devices_are_known(error, capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise error
    found = capsys.readouterr().err
    assert found.count("\n") == 1 and "The memory does not suffice" in found and "documentation" not in found


def refuse(row):
    return load_tools(["nope"]) if row["part"] == "mistake" else json.loads("{")


def test_a_mistake_in_a_worker_process_is_one_line_and_a_bug_is_not(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        Dataset.from_dict({"part": ["mistake"] * 2}).map(refuse, num_proc=2)
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    with pytest.raises(json.JSONDecodeError), one_line_errors():
        Dataset.from_dict({"part": ["bug"] * 2}).map(refuse, num_proc=2)


@pytest.mark.parametrize(("encoding", "shown"), [("cp1252", r"\u7834 é"), ("gbk", "破 é")])
def test_any_console_shows_a_sample(encoding, shown, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", console)
    with one_line_errors():
        print("破 é", end="", flush=True)
    assert console.buffer.getvalue().decode(encoding) == shown


@pytest.mark.slow
@needs_posix
def test_a_crash_in_c_code_shows_the_python_line():
    code = "import ctypes; from hf_pretrain.runtime.command_line import one_line_errors\n"
    code += "def crash(): ctypes.string_at(0)\nwith one_line_errors(): crash()"
    result = start([sys.executable, "-c", code])
    assert result.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in result.stdout and re.search(r"line 2 in crash", result.stdout)


def test_an_error_without_a_text_has_its_name(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise TimeoutError
    assert capsys.readouterr().err.startswith("error: TimeoutError. Check the names")


@pytest.mark.parametrize(("answer", "message"), [("", "disconnected"), ("302 Found", "redirects")])
def test_a_server_that_is_no_hub_is_one_line(answer, message, monkeypatch, tmp_path, capsys):
    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.recv(65536)
                if answer:
                    headers = "Location: /\r\nContent-Length: 0\r\nConnection: close\r\n"
                    connection.sendall(f"HTTP/1.1 {answer}\r\n{headers}\r\n".encode())
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=serve, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        connect(monkeypatch, address, str(tmp_path))
        with pytest.raises(SystemExit) as end, one_line_errors():
            get_session().get(address, follow_redirects=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith(f"error: {ENDPOINT} does not answer as a Hub: ") and message in line


def fill_the_disk():
    """`datasets` raises the error of the disk in this form."""
    try:
        with open("/dev/full", "w") as file:
            file.write("x")
    except OSError as error:
        raise DatasetGenerationError("An error occurred while generating the dataset") from error


def fill_a_database():
    raise RuntimeError("database or disk is full")


@needs_posix
@pytest.mark.parametrize("fail", [fill_the_disk, fill_a_database])
def test_a_full_disk_is_one_line(fail, capsys):
    with pytest.raises(SystemExit) as end, one_line_errors():
        fail()
    message = capsys.readouterr().err
    reason = "[Errno 28] No space left on device" if fail is fill_the_disk else "database or disk is full"
    assert end.value.code == 74 and message.startswith(f"error: {reason}. Free some space")
    assert f"HF_HOME={HF_HOME}" in message


# Run a recipe as if these packages were not installed.
WITHOUT = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden, *sys.argv = sys.argv[1:]
sys.meta_path.insert(0, Missing())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("recipe", "package", "extra"), [("grpo", "trl", "trl"), ("serve", "fastapi", "serve")])
@pytest.mark.slow
def test_a_missing_extra_is_one_line(recipe, package, extra):
    words = [sys.executable, "-c", WITHOUT, package, str(ROOT / f"recipes/{recipe}.py"), "--help"]
    result = start(words, fresh=True)
    assert result.returncode == 2 and "Traceback" not in result.stdout, result.stdout[-3000:]
    assert result.stdout.splitlines()[-1].startswith("error: ")
    assert result.stdout.rstrip().endswith(install_command(extra))


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], True), (["--log_level", "info"], False), (["--log-level=debug"], False), (["--run_name", "info"], True)],
)
def test_a_log_level_on_the_command_line_shows_messages(monkeypatch, words, expected):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *words])
    assert command_line.is_quiet() == expected


HOSTILE = """
from pathlib import Path
Path({proof!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Classes of its own: transformers marks those that it loads as custom code, for the rest of the process.
class Config(LlamaConfig):
    pass

class Model(LlamaForCausalLM):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def hostile(tmp_path):
    """Return a model of unknown `model_type`, whose code leaves a file `ran`."""
    directory = tmp_path / "hostile"
    train_tokenizer(["some words to learn from"] * 50, vocab_size=320).save_pretrained(directory)
    (directory / "code.py").write_text(HOSTILE.format(proof=str(tmp_path / "ran")))
    config = {"model_type": "hostile", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


RECIPES = {
    "chat": ["--model_name_or_path"],
    "serve": ["--model_name_or_path"],
    "convert": ["--to", "converted", "--from"],
    "evaluate": ["--use_cpu", "--model_name_or_path"],
    "pretrain": [*RUN, "--dataset_name", "text.jsonl", "--tokenizer_name_or_path"],
    "sft": [*RUN, "--model_name_or_path"],
    "dpo": [*RUN, "--model_name_or_path"],
    "reward": [*RUN, "--model_name_or_path"],
    "distill": [*RUN, "--teacher_name_or_path"],
    "grpo": [*RUN, "--model_name_or_path"],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_code_of_others_is_refused_without_a_question(run, hostile, monkeypatch, tmp_path, recipe):
    questions = []
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or "y")
    (tmp_path / "text.jsonl").write_text(30 * '{"text": "some words to learn from"}\n')
    status, output = run(recipe, *RECIPES[recipe], str(hostile))
    assert status == 2 and not questions and not (tmp_path / "ran").exists(), output


@pytest.mark.parametrize(
    ("recipe", "words", "phases", "result"),
    [
        ("convert", ["--from", str(GOLDEN / "C_dense")], ["reading the weights", "writing the model"], "out: "),
        ("tokenizer", ["--dataset_name", "a.jsonl"], ["training a tokenizer"], "The tokenizer has "),
    ],
)
def test_a_tool_names_its_phases_on_standard_error(recipe, words, phases, result, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    # New text, so the cached tokenizer of an earlier test does not fit.
    name = uuid.uuid4()
    write_jsonl(tmp_path / "a.jsonl", [f"{name} {number:x} {number**5}" for number in range(2_000)])
    target = {"convert": "--to", "tokenizer": "--output_dir"}[recipe]
    monkeypatch.setattr(sys, "argv", [str(ROOT / f"recipes/{recipe}.py"), *words, target, "out"])
    runpy.run_path(sys.argv[0], run_name="__main__")
    printed = capfd.readouterr()
    assert set(phases) <= {line.removesuffix(" ...") for line in printed.err.splitlines()}
    assert printed.out.startswith(result) and not any(phase in printed.out for phase in phases)


def test_only_a_terminal_of_the_main_process_shows_bars(monkeypatch, capsys):
    with progress("reading", 2) as bar:
        bar.update()
    assert capsys.readouterr().err == "reading ...\n"
    monkeypatch.setattr("hf_pretrain.runtime.command_line.is_in_notebook", lambda: True)
    with progress("reading", 2) as bar:
        bar.update()
    assert re.search(r"\rreading: +0%\|", capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")
    with progress("reading", 2) as bar:
        bar.update()
    announce("writing")
    assert capsys.readouterr().err == ""

"""Mistakes end a recipe with one line and status 2; bugs keep their tracebacks."""

import json
import runpy
import shutil
import subprocess
import sys
import time

import pytest
import torch
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from gguf import GGUFReader
from huggingface_hub.constants import HF_HOME
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pretrain import MiniMindConfig
from hf_pretrain.data.rejected import RejectedLines
from hf_pretrain.runtime import command_line
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.installation import install_command
from hf_pretrain.stages.distillation import load_teacher
from hf_pretrain.stages.tools import load_tools
from hf_pretrain.tokenizer.loading import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training import running
from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.weights.layouts import LAYOUTS
from hf_pretrain.weights.model_arguments import ModelArguments
from tests.invariants.launching import ROOT, launcher_command, process_options, start
from tests.toys import toy_model
from tests.weights.test_conversion import GOLDEN


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """Return a function that runs a recipe in this process, and returns its exit status and its stderr."""

    def run(recipe: str, *words: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"recipes/{recipe}.py"), *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return end.value.code, capfd.readouterr().err

    return run


NO_MODEL = (
    "No tokenizer could be loaded from the Hub (and there is no such directory): 'nope'. Name a directory or Hub id"
)
RUN = ("--use_cpu", "--output_dir", "run")


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (
            "pretrain",
            ["--learning_rat", "1"],
            "Unknown argument '--learning_rat'; the nearest known one is --learning_rate",
        ),
        ("pretrain", ["--lr_scheduler_type", "cosin"], "--lr_scheduler_type cosin is unknown; the nearest one is cos"),
        ("pretrain", ["--eval_strategy", "step"], "--eval_strategy step is unknown; the nearest one is steps."),
        ("pretrain", ["--optim_preset", "moun"], "--optim_preset moun is unknown; the nearest one is muon."),
        ("pretrain", ["--model_preset", "tny"], "--model_preset tny is unknown; the nearest one is tiny."),
        ("pretrain", ["--packing", "wraped", *RUN], "--packing_strategy wraped is unknown; the nearest one is wra"),
        ("pretrain", ["--attn_implementation", "spda", *RUN], "--attn_implementation spda is unknown; the nearest"),
        ("pretrain", ["--optim", "adamw_tourch", *RUN], "--optim adamw_tourch is unknown; the nearest one is adamw"),
        (
            "pretrain",
            ["--config_overrides", "hiden_size=8", *RUN],
            "--config_overrides: 'hiden_size' is not a field of MiniMindConfig; the nearest one is hidden_size.",
        ),
        ("grpo", ["--algorithm", "rlo", *RUN], "--algorithm rlo is unknown; the nearest one is rloo. All: grpo"),
        ("pretrain", ["--max_steps", "many"], "--max_steps: invalid int value: 'many'"),
        # transformers refuses these.
        ("pretrain", ["--save_steps", "1.5", *RUN], "--save_steps must be an integer if bigger than 1: 1.5"),
        ("pretrain", ["--deepspeed", "ds.json", *RUN], "ds.json is not a JSON file that can be read: Expecting value"),
        ("pretrain", ["--deepspeed", str(ROOT / "ds_configs/zero2.json"), *RUN], "--deepspeed needs a launcher"),
        ("pretrain", ["--dataset_name", "nope.jsonl", *RUN], "There is no file or directory nope.jsonl"),
        ("sft", ["--model_name_or_path", "nope", *RUN], NO_MODEL),
        (
            "sft",
            ["--config", str(ROOT / "recipes/tiny/sft.yaml"), *RUN],
            "There is no directory out/pretrain-tiny. `hf-pretrain pretrain --preset tiny` writes it: run that first",
        ),
        ("dpo", ["--algorithm", "ppo"], "--algorithm ppo is unknown; the nearest one is dpo. All: dpo"),
        ("grpo", ["--rewards", "nope", *RUN], "nope"),
        ("distill", ["--kl", "sideways"], "--kl sideways is unknown. All: forward, reverse"),
        ("evaluate", ["--use_cpu"], "No model in out/"),
        ("chat", ["--model_name_or_path", "nope"], NO_MODEL),
        ("chat", ["--top_k", "many"], "--top_k: invalid int value: 'many'"),
        ("serve", [], "No model in out/"),
        ("serve", ["--model_name_or_path", "nope"], NO_MODEL),
        ("convert", ["--from", "nope"], "the following arguments are required: --to. `--help` lists the flags."),
        ("convert", ["--from", "nope", "--to", "x"], "nope: no such file or directory"),
        ("sft", ["--dataset_kind", "sharegtp"], "--dataset_kind sharegtp is unknown; the nearest one is sharegpt."),
        ("data", ["inspect", "embedded:idoim"], "The dataset embedded:idoim is unknown; the nearest one is embedd"),
        ("data", ["inspct", "a.jsonl"], "action inspct is unknown; the nearest one is inspect. All: inspect, clean."),
        # There are no abbreviations.
        ("data", ["inspect", "a", "--text_colum", "x"], "argument '--text_colum'; the nearest known one is --text_"),
        ("chat", ["--temprature=1"], "Unknown argument '--temprature=1'; the nearest known one is --temperature."),
        ("tokenizer", ["--dataset_name", "nope.jsonl"], "There is no file or directory nope.jsonl"),
        # No flag is similar: not --tp_size, nor --run_name.
        ("chat", ["--batch_size", "8"], "Unknown argument '--batch_size'. `--help` lists the flags."),
        ("pretrain", ["--n_layerz", "8"], "Unknown argument '--n_layerz'. `--help` lists the flags."),
        ("pretrain", ["--config_overrides", "depth=8", *RUN], "'depth' is not a field of MiniMindConfig."),
        ("pretrain", ["--config_overrides", "dim=64,dim=32", *RUN], "'dim=64,dim=32' is not of the form name=value"),
        ("pretrain", ["--config_overrides", "n_layers=1000000000", *RUN], "must be a whole number from 1 to 10,000."),
        ("pretrain", ["--config", "latin.yaml"], "latin.yaml is not text in UTF-8 or UTF-16: "),
        ("pretrain", ["--config", "brackets.yaml"], "brackets.yaml has too many nested brackets"),
        ("pretrain", ["--config", "twice.yaml"], "twice.yaml is not YAML: 'max_steps' stands twice"),
        ("pretrain", ["--config", "utf-16.yaml"], "utf-16.yaml: unknown key `learning_rat`; the nearest known one is"),
        ("pretrain", ["--config", "unlike.yaml"], "unlike.yaml: unknown key `batch_width`."),
        ("pretrain", ["--config", "."], "--config . cannot be read: Is a directory. Name a YAML file."),
        ("convert", ["--from", "", "--to", "x"], "--from is empty. Name a file or directory, or leave the flag out."),
        ("pretrain", ["--output_dir", ""], "--output_dir is empty. Name a file or directory, or leave the flag out."),
        ("pretrain", ["--output_dir="], "--output_dir is empty."),
        ("sft", ["--model_name_or_path", ""], "--model_name_or_path is empty."),
        ("compare", [""], "runs is empty."),
        ("compare", [".", "--output", ""], "--output is empty."),
        ("chat", ["--tools", ""], "--tools is empty."),
        ("serve", ["--port", "65536"], "--port: '65536' must be a port from 1 to 65535."),
        ("serve", ["--web_port", "-1"], "--web_port: '-1' must be a port from 1 to 65535."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(run, tmp_path, recipe, words, message):
    (tmp_path / "ds.json").write_text("no JSON")
    (tmp_path / "latin.yaml").write_text("run_name: café", encoding="latin-1")
    (tmp_path / "utf-16.yaml").write_text("learning_rat: 1", encoding="utf-16")
    (tmp_path / "brackets.yaml").write_text("[" * 20_000)
    (tmp_path / "twice.yaml").write_text("max_steps: 1\nmax_steps: 2\n")
    (tmp_path / "unlike.yaml").write_text("batch_width: 1\n")
    status, output = run(recipe, *words)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and message in errors[0], output
    assert "Traceback" not in output and "usage:" not in output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rms_norm_eps", -1),
        ("max_position_embeddings", 0),
        ("num_hidden_layers", 10**9),
        ("initializer_range", -1),
        ("head_dim", 0),
        ("rope_theta", 0),
        ("hidden_size", "64"),
        ("qk_norm", "yes"),
        ("format_version", "one"),
    ],
)
def test_a_wrong_value_in_the_config_of_a_model_is_one_line(run, tmp_path, name, value):
    train_tokenizer(["some words to learn from"] * 50, vocab_size=320).save_pretrained(tmp_path / "model")
    toy_model(vocab_size=320).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    (config["rope_parameters"] if name == "rope_theta" else config)[name] = value
    path.write_text(json.dumps(config))
    status, output = run("chat", "--model_name_or_path", "model", "--prompt", "hi")
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and name in errors[0] and "Traceback" not in output, output


def test_an_output_directory_that_cannot_be_written_to_is_an_error_line(run, tmp_path):
    (tmp_path / "file").write_text("")
    words = ["--dataset_name", "a.jsonl", "--use_cpu", "--output_dir", "file/run"]
    status, output = run("pretrain", *words)
    assert status == 74 and "error: --output_dir file/run cannot be written to: " in output, output


def test_a_count_of_restarts_that_is_no_number_is_one_line(run, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "abc")
    status, output = run("pretrain", *RUN)
    assert status == 2 and "error: The environment variable SLURM_RESTART_COUNT=abc is not a number." in output


@pytest.mark.slow
def test_an_unknown_task_of_the_held_out_ones_is_named_with_its_flag(run):
    status, output = run("data", "clean", "embedded:chatterbot", "--held_out_tasks", "arc_esy")
    assert status == 2 and "error: --held_out_tasks: lm-eval has no task 'arc_esy'; the nearest one is 'a" in output


def test_a_launcher_flag_can_be_the_nearest_one(run, monkeypatch):
    monkeypatch.setenv("HF_PRETRAIN_PROGRAM", "hf-pretrain pretrain")
    assert "the nearest known one is --nproc." in run("pretrain", "--nprocs", "2")[1]
    assert "the nearest known one is --preset." in run("pretrain", "--presset", "tiny")[1]


def test_debug_shows_the_traceback(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for recipe in ("evaluate", "chat"):
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"recipes/{recipe}.py"), "--debug", "--use_cpu"])
        with pytest.raises(ValueError, match="No model in out/"):
            runpy.run_path(sys.argv[0], run_name="__main__")


def test_debug_with_a_value_goes_to_trainer(tmp_path):
    argv = ["--debug", "--use_cpu", "--output_dir", str(tmp_path)]
    assert parse_args(ModelArguments, LMTrainingArguments, argv=argv)[1].debug == []
    argv.insert(1, "underflow_overflow")
    args = parse_args(ModelArguments, LMTrainingArguments, argv=argv)[1]
    assert [option.value for option in args.debug] == ["underflow_overflow"]


def test_a_mistake_in_a_worker_of_the_data_loader_is_one_line(tmp_path):
    """A worker that waits for work must not keep the process from ending, either."""
    template = (ROOT / "hf_pretrain/tokenizer/templates/minimind.jinja").read_text(encoding="utf-8")
    toy_model(vocab_size=6400).save_pretrained(tmp_path / "toy")
    (tmp_path / "t.jinja").write_text(template + "{{ raise_exception('no sums') if '3' in messages[0].content }}")
    lines = [
        {"messages": [{"role": "user", "content": f"{number}+2?"}, {"role": "assistant", "content": "4"}]}
        for number in (1, 2, 3)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    name = str(tmp_path / "a.jsonl")
    words = [
        *("--model_name_or_path", str(tmp_path / "toy")),
        *(
            "--tokenizer_name_or_path",
            str(ROOT / "tests/fixtures/tokenizers/v3"),
            "--dataset_name",
            name,
            "--streaming",
            "--max_steps",
            "2",
        ),
        *("--chat_template", str(tmp_path / "t.jinja"), "--validation_fraction", "0", "--dataloader_num_workers", "1"),
        *("--eval_strategy", "no", "--save_strategy", "no", "--use_cpu", "--output_dir", str(tmp_path / "run")),
        *("--train_fraction", "1", "--per_device_train_batch_size", "1"),
    ]
    result = start([*launcher_command("python"), str(ROOT / "recipes/sft.py"), *words], timeout=200, fresh=True)
    assert result.returncode == 2 and "Traceback" not in result.stdout, result.stdout
    assert "error: The chat template cannot render the conversation that begins '3+2?'" in result.stdout


PACKAGE = ROOT / "hf_pretrain"


def bug_in_the_recipe():
    return int("three")


def bug_in_the_package():
    # Three halves of experts: zip() raises the ValueError.
    return LAYOUTS["v2"].join("experts.gate_up_proj", 3 * [torch.zeros(2)], MiniMindConfig())


def error_of_a_library():
    return json.loads("{")


@pytest.mark.parametrize("bug", [bug_in_the_recipe, bug_in_the_package, error_of_a_library])
def test_a_bug_keeps_its_traceback(bug, capsys):
    with pytest.raises(Exception) as raised, one_line_errors():
        bug()
    assert not isinstance(raised.value, SystemExit) and not isinstance(raised.value, UserError)
    assert capsys.readouterr().err == ""


def refuse(row):
    return load_tools(["nope"]) if row["part"] == "mistake" else json.loads("{")


def test_a_mistake_in_a_worker_process_is_one_line_and_a_bug_is_not(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        Dataset.from_dict({"part": ["mistake"] * 2}).map(refuse, num_proc=2)
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    with pytest.raises(json.JSONDecodeError), one_line_errors():
        Dataset.from_dict({"part": ["bug"] * 2}).map(refuse, num_proc=2)


def test_a_message_of_several_lines_becomes_one(capsys):
    rejected = RejectedLines(0.1, None)
    rejected.num_lines = 2
    rejected.add("a.jsonl", 2, "broken JSON")
    with pytest.raises(ValueError, match="\n"):
        rejected.check_ratio()
    with pytest.raises(SystemExit), one_line_errors():
        rejected.check_ratio()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: 1 of 2 lines") and line.endswith("1 x broken JSON (first: a.jsonl:2)")


def test_a_full_disk_is_one_line(capsys):
    with pytest.raises(SystemExit) as end, one_line_errors():
        try:
            with open("/dev/full", "w") as file:
                file.write("x")
        except OSError as error:
            # `datasets` raises it in this form.
            raise DatasetGenerationError("An error occurred while generating the dataset") from error
    message = capsys.readouterr().err
    assert end.value.code == 74 and message.startswith("error: [Errno 28] No space left on device. Free some space")
    assert f"HF_HOME={HF_HOME}" in message


def test_other_exit_statuses_stay():
    for status in (65, 74, 143):
        with pytest.raises(SystemExit) as end, one_line_errors():
            raise SystemExit(status)
        assert end.value.code == status


def test_a_stream_without_an_end_is_refused_before_anything_is_read(run, monkeypatch):
    monkeypatch.setattr(running, "checkpoint_to_resume", None)
    words = ["--model_preset", "minimind2", "--streaming", "--max_steps", "-1", "--use_cpu", "--bf16", "false"]
    for recipe, more in (("pretrain", []), ("sft", ["--model_name_or_path", "nope"])):
        status, output = run(recipe, *words, *more)
        assert status == 2 and "error: --streaming needs --max_steps" in output


def test_convert_replaces_a_model_only_with_overwrite(monkeypatch, tmp_path, capsys):
    words = ["convert.py", "--from", str(GOLDEN / "C_dense"), "--to", str(tmp_path / "out"), "--format"]

    def convert(*more: str) -> str | int | None:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        try:
            runpy.run_path(str(ROOT / "recipes/convert.py"), run_name="__main__")
        except SystemExit as end:
            return end.code
        return 0

    assert convert("gguf") == 0
    # Programs show the name of the source.
    (field,) = [GGUFReader(path).fields["general.name"] for path in (tmp_path / "out").glob("*.gguf")]
    assert field.contents() == "C_dense"
    assert convert("qwen3") == 2 and "not an empty directory; choose another, or replace it with --overwrite" in (
        capsys.readouterr().err
    )
    assert convert("qwen3", "--overwrite") == 0
    assert (tmp_path / "out/config.json").is_file() and not list((tmp_path / "out").glob("*.gguf"))


def test_a_redirected_conversion_to_gguf_holds_no_bar(tmp_path):
    words = [sys.executable, str(ROOT / "recipes/convert.py"), "--from", str(GOLDEN / "C_dense")]
    words += ["--to", str(tmp_path / "out"), "--format", "gguf", "--dtype", "q8_0"]
    # Read bytes: text mode would turn a return into a line break.
    options = process_options(PYTHONPATH=str(ROOT)) | {"text": False}
    result = subprocess.run(words, **options)
    assert result.returncode == 0 and b"GGUF (" in result.stdout, result.stdout
    assert b"\r" not in result.stdout and b"de-quantizing" not in result.stdout, result.stdout


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


@pytest.mark.parametrize(
    ("recipe", "package", "extra"), [("dpo", "trl", "trl"), ("grpo", "trl", "trl"), ("serve", "fastapi", "serve")]
)
@pytest.mark.slow
def test_a_missing_extra_is_one_line(recipe, package, extra):
    words = [sys.executable, "-c", WITHOUT, package, str(ROOT / f"recipes/{recipe}.py"), "--help"]
    result = start(words, fresh=True)
    assert result.returncode == 2 and "Traceback" not in result.stdout, result.stdout[-3000:]
    assert result.stdout.splitlines()[-1].startswith("error: ")
    assert result.stdout.rstrip().endswith(install_command(extra))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], True),
        (["--log_level", "info"], False),
        (["--log-level=debug"], False),
        (["--log_level", "warning"], True),
        (["--run_name", "info"], True),
        (["--config", "info.yaml"], False),
        (["--config=child.yaml"], False),
        (["--config", "info.yaml", "--log_level", "error"], True),
        # `convert` takes fields of a config, and the recipes report a file that does not exist.
        (["--config", "hidden_size=64"], True),
    ],
)
def test_a_log_level_on_the_command_line_or_in_a_config_shows_messages(monkeypatch, tmp_path, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "info.yaml").write_text("log_level: info\n")
    (tmp_path / "child.yaml").write_text("extends: info.yaml\nseed: 1\n")
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *words])
    assert command_line.is_quiet() == expected


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--log_level", "info"], ["--config", "info.yaml"]])
def test_messages_of_libraries_appear_on_request(tmp_path, words):
    (tmp_path / "info.yaml").write_text("log_level: info\n")
    code = "from hf_pretrain.runtime.command_line import quiet_libraries; quiet_libraries(); import deepspeed"
    output = start([sys.executable, "-c", code, *words], fresh=True, cwd=tmp_path, PYTHONPATH=str(ROOT)).stdout
    assert ("Setting accelerator to CPU" in output) == bool(words), output


@pytest.mark.distributed
def test_two_ranks_print_one_line(tmp_path):
    recipe = [str(ROOT / "recipes/pretrain.py"), "--max_steps", "0", "--output_dir", str(tmp_path)]
    result = start([*launcher_command("torchrun"), *recipe], fresh=True)
    assert result.returncode != 0 and result.stdout.count("error: --max_steps 0") == 1, result.stdout


def test_a_mistake_on_another_rank_alone_is_printed(monkeypatch, capsys):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit), one_line_errors():
        load_tools(["nope"])
    assert capsys.readouterr().err.startswith("error: ") and pauses == [command_line._LAUNCHER_SECONDS]


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


def test_code_of_a_teacher_runs_with_trust_remote_code(hostile, tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**json.loads((hostile / "config.json").read_text()) | {"model_type": "llama"})
    ).save_pretrained(tmp_path / "llama")
    shutil.copy(tmp_path / "llama/model.safetensors", hostile)
    load_teacher(str(hostile), load_tokenizer(hostile, trust_remote_code=True), trust_remote_code=True)
    assert (tmp_path / "ran").exists()

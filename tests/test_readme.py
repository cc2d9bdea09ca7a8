"""Check the commands of both READMEs and of the documentation: parse all of them, and run the README's."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from deepspeed.launcher.runner import parse_args as parse_deepspeed_args
from torch.distributed.run import get_args_parser as torchrun_parser

import hf_pretrain_cli
from hf_pretrain.reports.end_report import format_report, next_commands
from hf_pretrain.run_directory.facts import RunFacts
from hf_pretrain.run_directory.metrics import HEADLINES
from hf_pretrain.runtime.minimind_flags import translate_minimind
from hf_pretrain.runtime.parser import read_config, recipe_parser
from hf_pretrain.runtime.stages import STAGES
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from tests.invariants.launching import ROOT, free_port, start
from tests.toys import toy_model, write_jsonl


pytestmark = pytest.mark.documents

READMES = ("README.md", "README_zh.md")
PAGES = sorted(
    str(path.relative_to(ROOT)) for folder in ("", "docs/", "docs/guides/") for path in ROOT.glob(f"{folder}*.md")
)
PROGRAMS = "make hf-pretrain python torchrun deepspeed accelerate sbatch pip hf pre-commit".split()
# Programs of systems and others.
SYSTEM = "cp mkdir cd echo rm export source python3 git ollama modelscope vllm docker head wait ls grep".split()
# The files that a guide shows in full, as ```python my_reward.py.
SHOWN = re.compile(r"^```\w+ (\S+)$", re.MULTILINE)
REPOSITORY = re.compile(r"(recipes|ds_configs|benchmarks|docs|tests|hf_pretrain)/[\w./-]+")
PLACEHOLDERS = re.compile(r"[<…]|\.\.\.")


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"))


@cache
def commands(page: str) -> tuple[str, ...]:
    """Return the lines of all bash blocks, and all other inline code that begins with a known program."""
    lines = [line for block in code_blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = {f"python {name}" for name in SHOWN.findall(text)}
    found = [command for command in found if command not in shown]
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    codes = [code for code in re.findall(r"`([^`\n]+)`", prose) if not PLACEHOLDERS.search(code)]
    found += [shlex.join(shlex.split(code)) for code in codes if code.split()[0] in PROGRAMS and " " in code.strip()]
    return tuple(dict.fromkeys(found))


def parse_recipe(words: list[str]) -> None:
    path, *flags = words
    # A page that `convert --format web` writes.
    flags = [flag for flag in flags if not (path == "recipes/serve.py" and flag == "out/web")]
    try:
        if (stage := Path(path).stem) in STAGES:
            flags = translate_minimind(flags, stage)
        parser = recipe_parser(ROOT / path)
        _, unknown = parser.parse_known_args(flags)
    except SystemExit as end:  # --help
        assert end.code == 0
        return
    assert not unknown, f"{path} does not know {unknown}"
    if "--config" in flags and (config := ROOT / flags[flags.index("--config") + 1]).is_file():
        unknown = read_config(config).keys() - parser.flags.keys() - {"preset"}
        assert not unknown, f"{config} holds {unknown}, which {path} does not know"


def check_make(words: list[str]) -> None:
    """Check that the Makefile has every variable, and parse the commands that make would start."""
    makefile = (ROOT / "Makefile").read_text()
    for name in (word.partition("=")[0] for word in words if re.match(r"[A-Z_]+=", word)):
        assert re.search(rf"\b{name}\b", makefile), f"The Makefile has no variable {name}"
    # Another run may use the default port.
    machine = [f"VENV={sys.prefix}", "PRESENT=", "CUDA_VISIBLE_DEVICES=", f"MASTER_PORT={free_port()}"]
    command = ["make", "-n", "--no-print-directory", *words, *machine]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # make accepts a target that is .PHONY and has no rule.
    assert result.returncode == 0 and "Nothing to be done" not in result.stdout, result.stdout + result.stderr
    text = re.sub(r"for stage in (.*); do (.*)\|\| exit; done", _unrolled, result.stdout.replace("\\\n", " "))
    for line in text.splitlines():
        started = shlex.split(line)
        if started[1:2] == ["hf_pretrain_cli.py"]:
            check_command(started[2:])


def _unrolled(loop: re.Match) -> str:
    return "\n".join(loop[2].replace("$stage", stage) for stage in loop[1].split())


def check_command(words: list[str]) -> None:
    """Check what `hf-pretrain` would start."""
    stage, *rest = words
    if stage in ("list", "--version", "completion"):
        return
    if not rest or (stage, rest) in (("data", ["inspect"]), ("data", ["clean"])):
        # A sentence may name a command without its flags.
        assert stage in hf_pretrain_cli.STAGES + hf_pretrain_cli.TOOLS, f"hf-pretrain has no command {stage}"
        return
    if "--launcher" in rest and "--master_port" not in rest:
        rest = ["--master_port", str(free_port()), *rest]
    _, command = hf_pretrain_cli.make_command(stage, rest)
    short = [re.sub(r"^\S*/bin/", "", word).removeprefix(f"{ROOT}/") for word in command]
    check(shlex.join(["python" if re.fullmatch(r"python[\d.]*", word) else word for word in short]))


def check(command: str) -> None:
    """Raise `AssertionError` or `SystemExit` if `command` names a file, flag, target or extra that does not exist."""
    # The shell reads what follows a redirection.
    words = list(takewhile(lambda word: word not in ("2>&1", "|", "&"), shlex.split(command)))
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    for match in REPOSITORY.finditer(command):
        assert (ROOT / match[0]).exists(), f"{match[0]} does not exist"
    program, *rest = words
    recipe = next((i for i, word in enumerate(words) if re.fullmatch(r"recipes/\w+\.py", word)), None)
    if program == "make":
        check_make(rest)
    elif program == "hf-pretrain":
        check_command(rest)
    elif program in ("python", "torchrun", "deepspeed", "accelerate") and recipe is not None:
        if program == "torchrun":
            torchrun_parser().parse_args(rest)
        elif program == "deepspeed":
            parse_deepspeed_args(rest)
        elif program == "accelerate":
            assert rest[0] == "launch"
            launch_command_parser().parse_args(rest[1:])
        parse_recipe(words[recipe:])
    elif program == "python" and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).is_file(), f"{rest[0]} does not exist"
    elif program == "python":
        assert rest[0] == "-m" and importlib.util.find_spec(rest[1]), f"there is no module {rest[1]}"
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for names in re.findall(r"\[([\w,]+)\]", command):
            assert set(names.split(",")) <= known.keys(), f"pyproject.toml has no extra {names}"
    else:
        assert program in (*SYSTEM, *PROGRAMS), f"{program} is not a known program"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_names_existing_flags_and_files(page):
    mistakes = []
    for command in commands(page):
        try:
            check(command)
        except (AssertionError, SystemExit, ValueError) as error:
            mistakes.append(f"{command}\n    {error}")
    assert not mistakes, "\n".join(mistakes)


def test_both_readmes_hold_the_same_commands_and_code():
    english, chinese = READMES
    assert len(commands(english)) > 20 and set(commands(english)) == set(commands(chinese))
    assert code_blocks(english, "python") == code_blocks(chinese, "python")


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_import_what_exists(page):
    for block in code_blocks(page, "python"):
        for node in ast.parse(block).body:
            if isinstance(node, ast.ImportFrom) and importlib.util.find_spec(node.module):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


# Runs


# Flags that reduce a command of the README to toy size, by recipe.
TOY_FLAGS = {
    "pretrain": "--config_overrides num_hidden_layers=1,hidden_size=64,num_attention_heads=4,num_key_value_heads=2 "
    "--vocab_size 320 --max_steps 2 --max_length 32 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 1 --validation_fraction 0.1 --use_cpu --bf16 false",
    "sft": "--max_length 64",
}
RUNNER = """
import json, runpy, sys
for words, code in json.load(open(sys.argv[1])):
    print("$", *words, code, flush=True)
    if code:
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            # A preview ends its process.
            assert not end.code
print("all done")
"""


@pytest.fixture
def home(tmp_path) -> Path:
    """Return a directory with the files that the README's commands start from, at toy size."""
    texts = [f"the {size} {animal} walks under it" for size in ("small", "tall", "old") for animal in "abcdefgh"]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    model = toy_model(vocab_size=320, num_attention_heads=8)
    model.save_pretrained(tmp_path / "out/pretrain-tiny")
    tokenizer.save_pretrained(tmp_path / "out/pretrain-tiny")
    tokenizer.save_pretrained(tmp_path / "minimind/model")
    export(model, tmp_path / "upstream", "upstream")
    (tmp_path / "upstream/full_sft_32.pth").rename(tmp_path / "full_sft_512.pth")
    (tmp_path / "my").mkdir()
    write_jsonl(tmp_path / "my/text.jsonl", texts)
    write_jsonl(tmp_path / "chats.jsonl", [{"prompt": text, "completion": "over it"} for text in texts])
    return tmp_path


@pytest.mark.slow
def test_the_commands_of_the_readme_run_on_data_of_ones_own(home):
    """Run them and the code blocks in one process, in the order of the README. Other tests run the presets."""
    steps: list[tuple[list[str], str]] = []
    for command in commands("README.md"):
        program, stage, *words = shlex.split(command)
        if program == "hf-pretrain" and (stage == "convert" or (stage in STAGES and "--dataset_name" in words)):
            steps.append(([f"{ROOT}/recipes/{stage}.py", *words, *shlex.split(TOY_FLAGS.get(stage, ""))], ""))
    # The glob of the text must not match the conversations.
    steps = [([word.replace("my/chats.jsonl", "chats.jsonl") for word in words], code) for words, code in steps]
    steps += [([], code) for code in code_blocks("README.md", "python")]
    assert len(steps) == 5
    (home / "steps.json").write_text(json.dumps(steps))
    command = [sys.executable, "-c", RUNNER, str(home / "steps.json")]
    result = start(command, cwd=home, PYTHONPATH=str(ROOT))
    assert result.returncode == 0 and "all done" in result.stdout, result.stdout[-5000:]
    models = ("mine/model.safetensors", "upstream/tokenizer.json", "llama/config.json", "notebook-llama/config.json")
    assert [name for name in models if not (home / "out" / name).is_file()] == []


# Error messages


@cache
def messages() -> tuple[str, ...]:
    """Return every string of the package, the recipes and the Makefile, with a NUL for each placeholder."""
    found = [re.sub(r"\$\([A-Z_]+\)", "\0", line) for line in (ROOT / "Makefile").read_text().splitlines()]
    paths = (*(ROOT / "hf_pretrain").rglob("*.py"), *(ROOT / "recipes").glob("*.py"), ROOT / "hf_pretrain_cli.py")
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def test_the_code_prints_the_messages_of_the_troubleshooting_page():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    foreign = ("No space left on device",)
    missing = []
    for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
            if message not in foreign and not any(map(pattern.search, messages())):
                missing.append(message)
    assert not missing, f"docs/troubleshooting.md quotes messages that no code prints: {missing}"


def test_a_run_prints_the_documented_lines_of_the_report():
    metrics = {metric.key: 1.0 for metric in HEADLINES}
    facts = RunFacts(unigram_loss=2.0)
    fields = {"optimizer": ("adamw", 0.1), "commands": next_commands("out/a", facts)}
    report = format_report("out/a", facts, metrics, [("a", "b")], **fields)
    page = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    table = page.split("| line | meaning |")[1].split("\n\n")[0]
    labels = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(labels) > 4 and all(re.search(rf"^{label}  +\S", report, re.MULTILINE) for label in labels), report

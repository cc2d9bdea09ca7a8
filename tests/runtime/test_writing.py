"""Results are written completely or not at all, by one process at a time, and nowhere else than the user said."""

import itertools
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_pretrain.checkpoints.manifest import find_damage, write_manifest
from hf_pretrain.checkpoints.writer import CheckpointWriter
from hf_pretrain.runtime import writing
from hf_pretrain.runtime.writing import LOCK_NAME, written_whole
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT
from tests.toys import limited_file_size, needs_posix, toy_model, write_jsonl


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Return a directory with a toy model, texts, and the checkpoint of a run."""
    path = tmp_path_factory.mktemp("writing")
    texts = [f"The river {number} runs under the stone {number**5:x}." for number in range(60)]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    # Large enough that its weights exceed the limit below, and the other files do not.
    model = toy_model(vocab_size=320, hidden_size=128)
    for directory in (path / "toy", path / "run/checkpoint-5"):
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    (path / "run/checkpoint-5/trainer_state.json").write_text("{}")
    write_manifest(path / "run/checkpoint-5", {"step": 5})
    write_jsonl(path / "t.jsonl", texts)
    return path


def run_recipe(words: list[str]) -> int:
    """Run a recipe in this process, and return its status."""
    sys.argv = [str(ROOT / f"recipes/{words[0]}.py"), *words[1:]]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        return error.code
    return 0


@pytest.fixture
def recipe(workspace, monkeypatch, capsys):
    """Return a function that runs a recipe in the workspace, and returns its status and what it writes to stderr."""
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", [])
    return lambda *words: (run_recipe([*words]), capsys.readouterr().err)


TRAINING = "--use_cpu --bf16 false --max_steps 1 --max_length 64 --save_strategy no"
# Each command without the value of its last flag, and the name of a result.
COMMANDS = {
    name: (words.split(), result)
    for name, words, result in (
        ("convert", "convert --from toy --to", "out"),
        ("upstream", "convert --from toy --format upstream --to", "out"),
        ("tokenizer", "tokenizer --dataset_name t.jsonl --vocab_size 300 --output_dir", "out"),
        ("clean", "data clean t.jsonl --min_chars 1 --near_duplicates 0 --output", "out.jsonl"),
        ("compare", "compare run --output", "out.html"),
        ("evaluate", "evaluate --model_name_or_path toy --dataset_name t.jsonl --results_dir", "out"),
        ("pretrain", f"pretrain --dataset_name t.jsonl --model_name_or_path toy {TRAINING} --output_dir", "out"),
    )
}


def files(place: Path) -> dict[str, bytes]:
    paths = [place, *place.rglob("*")]
    return {str(path.relative_to(place)): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_output_goes_into_a_checkpoint(command, recipe, workspace):
    words, result = COMMANDS[command]
    before = files(workspace)
    for target in (f"run/checkpoint-5/{result}", *(["run/checkpoint-5"] if "." not in result else [])):
        status, error = recipe(*words, target)
        assert status == 2 and f"{target} is inside the checkpoint {workspace}/run/checkpoint-5" in error
    assert files(workspace) == before and not find_damage(workspace / "run/checkpoint-5")


@pytest.mark.parametrize("command", ["convert", "tokenizer", "clean", "compare"])
def test_an_empty_path_is_no_directory(command, recipe, workspace):
    words, _ = COMMANDS[command]
    before = files(workspace)
    status, error = recipe(*words, "")
    assert status == 2 and f"{words[-1]} is empty" in error
    assert files(workspace) == before


@needs_posix
@pytest.mark.parametrize("command", ["convert", "upstream", "tokenizer", "clean", "pretrain"])
def test_a_refused_write_is_one_line(command, recipe, workspace):
    """The limit is like a quota: some writers report it without an errno."""
    words, result = COMMANDS[command]
    limit = 1000 if command in ("clean", "tokenizer") else 100_000
    if command == "tokenizer":
        # Train the tokenizer, which is then in the cache.
        assert recipe(*words, "first")[0] == 0
    with limited_file_size(limit):
        status, error = recipe(*words, result)
    assert status == 74 and "Traceback" not in error, error
    if command == "pretrain":
        assert "out/config.json could not be saved: " in error and not (workspace / "out/config.json").exists()
    else:
        # Nothing stays, and the message names the place.
        assert "could not be written, and nothing was kept" in error and not (workspace / result).exists()
        assert not list(workspace.glob(".*"))


def compete(words: list[str], directory: str, barrier, results) -> None:
    """Run a recipe that waits for the others before it writes, and report its status."""
    os.chdir(directory)
    ready = written_whole

    def wait_and_write(*args, **kwargs):
        barrier.wait()
        return ready(*args, **kwargs)

    writing.written_whole = wait_and_write
    sys.modules["hf_pretrain.weights.exporting"].written_whole = wait_and_write
    results.put(run_recipe(words))


@pytest.mark.parametrize("command", ["convert", "clean"])
def test_of_two_processes_one_writes(command, workspace, recipe):
    import hf_pretrain.weights.exporting  # noqa: F401

    words, result = COMMANDS[command]
    target = f"two-{command}-{result}"
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = ([*words, target], str(workspace), barrier, results)
    children = [context.Process(target=compete, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    assert sorted(results.get(timeout=300) for _ in children) == [0, 2]
    for child in children:
        child.join()
    # The result is whole, and equals that of one process.
    recipe(*words, f"one-{command}-{result}")
    two, one = (files(workspace / f"{number}-{command}-{result}") for number in ("two", "one"))
    assert two.pop("README.md", None) is None or one.pop("README.md")
    assert two == one and not list(workspace.glob(".*"))


def test_a_failed_rename_leaves_no_model(tmp_path, monkeypatch):
    """A directory with a config and without its weights would load with random ones."""
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: fail() if "b" in paths[1].name else rename(*paths))
    with pytest.raises(OSError):
        with written_whole(tmp_path) as scratch:
            for name in ("config.json", "a", "b"):
                (scratch / name).write_text("new")
    assert not (tmp_path / "config.json").exists()


def test_a_second_save_replaces_directories(tmp_path):
    """DPO on an adapter saves its reference as `ref/`."""
    of_runs = CheckpointWriter(TrainingArguments(str(tmp_path / "b"), use_cpu=True), int)
    writers = (lambda: written_whole(tmp_path / "a"), lambda: of_runs.writing_model(tmp_path / "b"))
    for number, write in itertools.product("12", writers):
        with write() as scratch:
            (scratch / "ref").mkdir()
            (scratch / "config.json").write_text(number)
            (scratch / "ref" / f"of {number}").write_text(number)
    expected = {"config.json": b"2", "ref/of 2": b"2"}
    assert files(tmp_path) == {f"{name}/{path}": text for name in "ab" for path, text in expected.items()}


def fail():
    raise PermissionError(13, "refused")


def test_everything_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """After a power failure, a file that was renamed first could be empty."""
    writer = CheckpointWriter(TrainingArguments(str(tmp_path), use_cpu=True), int)
    flushed, flush, rename = set(), os.fsync, os.replace

    def check(source: Path, target: Path):
        assert {path.stat().st_ino for path in (source, *source.rglob("*"), source.parent)} <= flushed
        rename(source, target)
        flushed.clear()

    monkeypatch.setattr(os, "fsync", lambda number: (flushed.add(os.fstat(number).st_ino), flush(number)))
    monkeypatch.setattr(os, "replace", check)
    with writer.writing_checkpoint(tmp_path / "checkpoint-1", {"step": 1}) as scratch:
        (scratch / "shards").mkdir()
        (scratch / "shards/rank_0.pt").write_text("moments")
    assert flushed == {tmp_path.stat().st_ino} and not find_damage(tmp_path / "checkpoint-1")


@needs_posix
def test_leftovers_of_a_killed_process_are_removed_under_its_lock(tmp_path):
    if (child := os.fork()) == 0:
        with written_whole(tmp_path, lock=LOCK_NAME) as scratch:
            (scratch / "half").write_text("half")
            os._exit(9)
    # Other children of this process may end, too.
    os.waitpid(child, 0)
    assert list(tmp_path.glob(".saving*"))
    with written_whole(tmp_path, lock=LOCK_NAME) as scratch:
        (scratch / "whole").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]

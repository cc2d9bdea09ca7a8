"""The cache of prepared data: everything that changes rows changes its keys, and nothing else does."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import datasets
import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from hf_pretrain.data.documents import load_documents
from hf_pretrain.rows import caching
from hf_pretrain.rows.encoding import ConversationEncoder
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.pretrained import load_tokenizer, save_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer


def record(number: int, answer: str) -> dict:
    """Return a record that is a text, a conversation and a preference."""
    turn = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer * 3}]
    preference = {"prompt": f"{number}?", "chosen": turn[1:], "rejected": f"no {answer}"}
    return {"text": f"text {number} {answer} é " * 9, "body": f"{number}", "messages": turn, **preference}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    """Return the directories of two tokenizers."""
    directory = tmp_path_factory.mktemp("tokenizers")
    for name, text in (("one", "the first text of all"), ("other", "user assistant aaa bbb")):
        save_tokenizer(train_tokenizer([text] * 4, vocab_size=400), directory / name)
    return {name: directory / name for name in ("one", "other")}


def prepare(kind: str, path: Path, directory: Path, **changed) -> list[dict]:
    """Return the rows of a new process's tokenizer, with the changes."""
    names = ("text_column", "train_fraction", "seed", "encoding", "whole_files", "columns")
    loading = {name: changed.pop(name) for name in names if name in changed}
    tokenizer: PreTrainedTokenizerFast = load_tokenizer(directory)
    if eos := changed.pop("eos_token", None):
        tokenizer.eos_token = eos
    tokenizer.chat_template = changed.pop("prefix", "") + tokenizer.chat_template
    schema = {"conversations": "conversation", "pairs": "preference"}.get(kind, "text")
    documents, _ = load_documents([str(path)], Reading(kind=schema, validation_fraction=0.1, **loading))
    how = {"max_length": 64, **changed}
    if kind == "pairs":
        return list(prepare_pairs(documents, tokenizer, **how)[0])
    if kind == "conversations":
        how = {"encoder": ConversationEncoder(), **how}
    return list(prepare_rows(documents, tokenizer, **how)[0])


SAME_SIZE = {"answer": "bbb"}
CHANGES = [
    ("text", SAME_SIZE),
    ("text", {"text_column": "body"}),
    ("text", {"columns": ["text=body"]}),
    ("text", {"train_fraction": 0.5}),
    ("text", {"max_length": 32}),
    ("text", {"packing_strategy": "wrapped"}),
    ("text", {"encoding": "latin-1"}),
    ("paragraphs", {"whole_files": True}),
    ("text", {"eos_token": "<|im_start|>"}),
    *((kind, {"tokenizer": "other"}) for kind in ("text", "conversations", "pairs")),
    ("conversations", SAME_SIZE),
    ("conversations", {"prefix": "Now. "}),
    ("conversations", {"max_length": 16}),
    ("conversations", {"packing_strategy": "none"}),
    ("conversations", {"encoder": ConversationEncoder("all")}),
    ("conversations", {"encoder": ConversationEncoder(chat_template_kwargs=(("enable_thinking", False),))}),
    *(
        ("conversations", {"encoder": ConversationEncoder(add_system_ratio=0.5, empty_think_ratio=0.5, seed=seed)})
        for seed in (1, 2)
    ),
    ("pairs", SAME_SIZE),
    ("pairs", {"prefix": "Now. "}),
    ("pairs", {"max_length": 8}),
    ("pairs", {"are_whole": True}),
]


@pytest.fixture
def use_cache(monkeypatch):
    return lambda path: monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(path))


def write(path: Path, answer: str = "aaa", *, time: int = 1_700_000_000) -> None:
    lines = (json.dumps(record(number, answer), ensure_ascii=False) for number in range(30))
    path.write_text("\n\n".join(lines), encoding="utf-8")
    os.utime(path, (time, time))


@pytest.mark.parametrize(("kind", "change"), CHANGES, ids=str)
def test_all_that_changes_rows_changes_the_key(tmp_path, tokenizers, use_cache, kind, change):
    # All changes share a file and a cache, so the rows before them are prepared once.
    shared, change = tokenizers["one"].parent, dict(change)
    path = shared / ("a.txt" if kind == "paragraphs" else "a.jsonl")
    use_cache(shared / "cache")
    write(path)
    before = prepare(kind, path, tokenizers["one"])
    write(path, change.pop("answer", "aaa"))
    directory = tokenizers[change.pop("tokenizer", "one")]
    after = prepare(kind, path, directory, **change)
    use_cache(tmp_path / "empty")
    assert after == prepare(kind, path, directory, **change) != before


@pytest.mark.parametrize("kind", ["text", "conversations", "pairs"])
def test_what_changes_no_row_is_read_from_the_cache(tmp_path, monkeypatch, tokenizers, use_cache, kind):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    use_cache(cache)
    write(path)
    rows = prepare(kind, path, tokenizers["one"])
    files = {*cache.rglob("*.arrow")}
    write(path, time=1_800_000_000)
    copy = shutil.copytree(tokenizers["one"], tmp_path / "copy")
    assert prepare(kind, path, copy, num_proc=2, seed=7) == rows
    assert len(files) > 2 and {*cache.rglob("*.arrow")} == files
    # Other code prepares the data again in every step.
    monkeypatch.setattr(caching, "CODE", "other")
    assert prepare(kind, path, copy) == rows and len({*cache.rglob("*.arrow")}) == 2 * len(files)


@pytest.mark.parametrize("file", ["rows/packing.py", "tokenizer/control_tokens.py"])
def test_the_code_that_prepares_data_is_part_of_the_key(tmp_path, file):
    root = Path(caching.__file__).parents[1]
    for folder in ("data", "rows", "tokenizer"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    codes = [caching.CODE]
    for change in ("", "# changed\n"):
        (tmp_path / file).write_text((root / file).read_text(encoding="utf-8") + change, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("copy_of_caching", tmp_path / "rows/caching.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        codes.append(module.CODE)
    assert codes[0] == codes[1] != codes[2]


def test_large_data_have_a_process_per_core(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    sizes = [(10_000, None), (20_000, None), (90_000, None), (90_000, 20), (90_000, 1)]
    assert [caching.count_processes(*size) for size in sizes] == [None, 2, 3, 9, None]


# A process that is killed as soon as it has forked a worker, before the worker can ask for its parent.
ORPHAN = """
import os, signal, time
from hf_pretrain.rows.caching import count_processes
os.register_at_fork(after_in_child=lambda: time.sleep(1))
count_processes(10**6, 2)
if worker := os.fork():
    print(worker, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_worker_whose_parent_is_killed_at_once_ends():
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        try:
            # It may have ended already.
            with suppress(psutil.NoSuchProcess):
                assert not psutil.wait_procs([psutil.Process(worker)], timeout=60)[1]
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


# A worker forks a process of its own, and works on for longer than its parent is looked at.
FORKING = """
import os, time
from hf_pretrain.rows.caching import count_processes
count_processes(10**6, 2)
if worker := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
if child := os.fork():
    os.waitpid(child, 0)
    time.sleep(2.5)
os._exit(7)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_worker_that_forks_works_on():
    assert subprocess.run([sys.executable, "-c", FORKING], timeout=120).returncode == 7

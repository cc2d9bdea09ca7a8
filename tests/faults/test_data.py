"""Files with any content: the reader returns good documents unchanged, and lists bad lines."""

import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from hf_pretrain.data.formats import BadRecord, parse_json, read_file, read_text
from hf_pretrain.rows.reading import Reading
from tests.faults.driving import command, run, run_poisoned, start, wait_for
from tests.toys import write_jsonl


# Any JSON value, with and without the fields of a document.
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)
# Include characters that random text rarely has: NUL, halves of a surrogate pair, blanks.
hard_texts = st.text(st.sampled_from(["a", "é", " ", "\n", "\0", "\ud83d", "\ude00"]), max_size=4)
records = st.one_of(
    st.dictionaries(st.sampled_from(["text", "id", "Text"]), values, max_size=3),
    st.fixed_dictionaries({"text": hard_texts}),
    values,
)
lines = st.one_of(
    records.map(lambda record: json.dumps(record).encode()),
    records.map(lambda record: json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    records.map(lambda record: json.dumps(record).encode()[:-1]),
    st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")),
)


def is_document(line: bytes) -> bool:
    """Return whether a line is a document: one UTF-8 JSON object with a letter in `text`."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    document = record.get("text") if isinstance(record, dict) else None
    if not isinstance(document, str) or not document.strip() or "\0" in document:
        return False
    return not any(0xD800 <= ord(character) < 0xE000 for character in document)


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(lines, max_size=6))
# A line is blank only by the white space of ASCII.
@example([b"\x1c"])
@example([b"{", b"}"])
@example([b"", b"[", b"{}"])
def test_any_lines(content):
    # Other tests have JSON over several lines, and UTF-16.
    assume(not re.match(rb"(\0[^\0]){2}|([^\0]\0){2}", b"\n".join(content)))
    written = [line for number, line in enumerate(content, start=1) if first_line(number, line).strip()]
    assume(not written or first_line(1, written[0]).strip() not in (b"[", b"{") or written[1:] in ([], [b"}"]))
    with TemporaryDirectory() as directory:
        path = Path(directory, "a.jsonl")
        path.write_bytes(b"\n".join(content))
        good, bad = [], []
        for number, found in read_file(path, Reading()):
            try:
                good.append((number, read_text(parse_json(found), text_column="text")))
            except BadRecord as error:
                assert error.reason
                bad.append(number)
    expected = {number for number, line in enumerate(content, start=1) if is_document(first_line(number, line))}
    blank = {number for number, line in enumerate(content, start=1) if not first_line(number, line).strip()}
    assert {number for number, _ in good} == expected
    assert set(bad) == set(range(1, len(content) + 1)) - expected - blank
    for number, text in good:
        assert text == json.loads(first_line(number, content[number - 1]))["text"]


def first_line(number: int, line: bytes) -> bytes:
    """Return the line without the byte order mark at the start of a file, and without a carriage return at its end."""
    return (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).removesuffix(b"\r")


@pytest.mark.slow
def test_too_many_stop_the_run_before_it_trains(workspace, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["good"] * 20)
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b'{"text": "cut off\n{"text": 5}\n{"text": "latin \xe9"}\n[1, 2]')
    words = command(workspace, tmp_path / "run")
    words[words.index("--dataset_name") + 1] = str(tmp_path / "a.jsonl")
    result = run(words)
    assert result.returncode != 0 and "4 of 24 lines (16.67%) are bad" in result.stdout, result.stdout[-3000:]
    assert result.stdout.count(" x ") >= 4 and "step 1/8" not in result.stdout
    assert len((tmp_path / "run/rejected.jsonl").read_text().splitlines()) == 4


@pytest.mark.faults
def test_ranks_with_different_data_do_not_train(workspace, tmp_path):
    lines = (workspace / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join([lines[1], *lines[1:]]))
    words = command(workspace, tmp_path / "run", launcher="torchrun")
    result = run_poisoned(words, f"data:{tmp_path / 'other.jsonl'}:1")
    assert result.returncode != 0 and "The ranks read different data" in result.stdout, result.stdout[-3000:]


PREPARE = """
import hashlib, sys
from hf_pretrain.data import documents
from hf_pretrain.rows import caching, packing
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.pretrained import load_tokenizer

caching.GROUP_SIZE = packing.GROUP_SIZE = 1_000
found, _ = documents.load_documents([sys.argv[1]], Reading(num_proc=2))
rows, _ = packing.prepare_rows(found, load_tokenizer(sys.argv[2]), max_length=64, num_proc=2)
print("ROWS", hashlib.sha256(str(rows.with_format("arrow")[:].to_pydict()).encode()).hexdigest())
"""


@pytest.mark.slow
def test_a_killed_preparation_does_not_repeat_finished_steps(workspace, tmp_path):
    texts = (f"document {number} of " + "seven quiet birds " * 20 for number in range(8_000))
    words = [sys.executable, "-c", PREPARE, write_jsonl(tmp_path / "a.jsonl", texts), str(workspace / "toy")]

    def finished() -> dict[str, tuple[int, int]]:
        found = {}
        # `rglob` would fail when the process renames a directory meanwhile.
        for directory, _, names in os.walk(tmp_path / "cache"):
            for path in (Path(directory, name) for name in names if name.endswith(".arrow")):
                with suppress(FileNotFoundError):
                    if "incomplete" not in str(path):
                        found[str(path)] = (path.stat().st_ino, path.stat().st_mtime_ns)
        return found

    with start(words, HF_HOME=str(tmp_path / "cache")) as process:
        # The records, the rows of both processes, and the first of the following steps.
        assert wait_for(lambda: process.poll() is None and len(finished()) >= 4, process), process.communicate()[0]
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert not psutil.wait_procs(workers, timeout=240)[1]
    done = finished()
    interrupted = run(words, HF_HOME=str(tmp_path / "cache"))
    assert {path: state for path, state in finished().items() if path in done} == done
    (rows,) = re.findall("^ROWS .*", run(words, HF_HOME=str(tmp_path / "other")).stdout, re.MULTILINE)
    assert rows in interrupted.stdout, interrupted.stdout[-3000:]

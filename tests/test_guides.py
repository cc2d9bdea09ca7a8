"""
Run the guides of docs/guides: write the files that a page shows, run its commands, and compare what they print.

A block ```json facts.jsonl is the file facts.jsonl. A block of bash runs as it stands. The lines of a block of text
are in the output of the commands above it, in this order. `…` stands for anything. Words are equal. Whole numbers are
equal, too, numbers with a decimal point differ by up to 3 %, and mean rewards by 0.25, because answers are sampled.
Speeds and seconds are not compared. A sentence "at least 3 of the 5" below a block bounds the right answers there.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.invariants.launching import ROOT, cpu_environment, free_port


pytestmark = [pytest.mark.documents, pytest.mark.slow]

PAGES = sorted(path.stem for path in ROOT.glob("docs/guides/*.md"))
# A guide that goes on in the directory of another one.
BEFORE = {"own-reward": "own-texts", "more-gpus": "own-texts"}
BLOCK = re.compile(r"(?ms)^```(\w+) ?([^\n]*)\n(.*?)^```\n")
# What cannot run here. `tests/test_readme.py` parses it.
ELSEWHERE = ("ollama", "pip", "source", "git")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
TIME = re.compile(r"^ ?(?:s\b|seconds|tokens/s|minutes)")


def run_block(code: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """Run a block of commands as a shell script; return the lines that it prints, without the paths of programs."""
    code = code.replace("29500", str(free_port()))
    lines = [line for line in code.splitlines() if not line.startswith(ELSEWHERE)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)], cwd=folder, env=environment, text=True, timeout=1700, **streams
    )
    assert result.returncode == 0, f"{code}\n{result.stdout[-6000:]}"
    return [re.sub(r"\S*/bin/", "", line).rstrip() for line in result.stdout.splitlines()]


def is_equal(line: str, printed: str, bounds: dict[str, int]) -> bool:
    """Return whether a printed line is the line of a page, up to what differs between CPUs."""
    places = [*NUMBER.finditer(line)]
    parts = re.split("…|\0", NUMBER.sub("\0", line))
    gaps = [match[0] == "…" for match in re.finditer("…|\0", NUMBER.sub("\0", line))]
    pattern = re.escape(parts[0])
    for is_gap, part in zip(gaps, parts[1:], strict=True):
        pattern += (".*" if is_gap else rf"({NUMBER.pattern})") + re.escape(part)
    if (found := re.fullmatch(pattern, printed)) is None:
        return False
    return all(is_close(place, number, line, bounds) for place, number in zip(places, found.groups(), strict=True))


def is_close(place: re.Match[str], number: str, line: str, bounds: dict[str, int]) -> bool:
    expected, actual = (float(text.replace(",", "")) for text in (place[0], number))
    before, after = line[: place.start()], line[place.end() :]
    if TIME.match(after):
        return True
    # Before the training, the answers are those of the published model.
    if after.startswith(" at step") and (total := re.search(r"of (\d+) right", before)):
        return actual >= bounds[total[1]]
    if "reward" in before:
        return abs(actual - expected) <= 0.25
    return abs(actual - expected) <= (0.03 * abs(expected) if "." in place[0] else 0)


def check_lines(text: str, printed: list[str], bounds: dict[str, int]) -> None:
    """Check that the printed lines hold those of a block of text, in its order."""
    rest: Iterator[str] = iter(printed)
    for line in filter(lambda line: line != "…", text.splitlines()):
        assert any(is_equal(line, other, bounds) for other in rest), f"not printed: {line}\n" + "\n".join(printed)


def follow(page: str, folder: Path, environment: dict[str, str]) -> None:
    """Do what a page says, in a directory."""
    text = (ROOT / f"docs/guides/{page}.md").read_text(encoding="utf-8")
    printed: list[str] = []
    for block in BLOCK.finditer(text):
        language, name, body = block.groups()
        if name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(body, encoding="utf-8")
        elif language == "bash":
            printed = run_block(body, folder, environment)
        elif language == "text":
            prose = text[block.end() :].partition("```")[0]
            found = re.findall(r"at least (\d+) of the (\d+)", re.sub(r"\s+", " ", prose))
            check_lines(body, printed, {total: int(bound) for bound, total in found})


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Return the environment of a reader, with a cache of its own: native copies of published models are large."""
    cache = tmp_path_factory.mktemp("huggingface")
    variables = cpu_environment(HF_HOME=str(cache), PYTHONPATH=str(ROOT))
    for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "LOCAL_SIZE"):
        variables.pop(name, None)
    yield variables
    shutil.rmtree(cache)


@pytest.fixture(scope="session")
def followed(tmp_path_factory, environment):
    """Return a function that follows a page, in a copy of the directory of the page before it, once."""
    folders: dict[str, Path] = {}

    def get(page: str) -> Path:
        if page not in folders:
            folder = tmp_path_factory.mktemp(page) / "home"
            if page in BEFORE:
                shutil.copytree(get(BEFORE[page]), folder, ignore=shutil.ignore_patterns("recipes"))
            folder.mkdir(exist_ok=True)
            # Commands with the name of a recipe are for a clone of this repository.
            (folder / "recipes").symlink_to(ROOT / "recipes")
            follow(page, folder, environment)
            folders[page] = folder
        return folders[page]

    return get


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_guide_print_what_it_says(page, followed):
    followed(page)

"""`train.log` keeps the whole output of a run, even if nobody reads the output."""

import logging
import os
import sys

import pytest
from tqdm import tqdm

from hf_pretrain.training.run_log import LOG_NAME, begin_log, end_log
from tests.faults.conftest import workspace  # noqa: F401
from tests.faults.driving import command, start
from tests.faults.test_disks import small_disk  # noqa: F401


@pytest.fixture(autouse=True)
def ended():
    yield
    end_log()


def test_lines_are_kept_and_bars_are_not(tmp_path, capsys):
    logger = logging.getLogger("a library")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    begin_log(tmp_path / LOG_NAME)
    with tqdm(total=3, file=sys.stderr, ascii=True, mininterval=0, bar_format="{n_fmt} of {total_fmt}") as bar:
        for step in range(3):
            bar.update()
            bar.write(f"step {step}")
    print("\x1b[1mdone\x1b[0m\r\n")
    logger.warning("told")
    end_log()
    print("after")
    logger.warning("after")
    begin, *lines = (tmp_path / LOG_NAME).read_text().splitlines()
    assert begin.startswith("--- 20")
    assert lines == ["step 0", "step 1", "step 2", "done", "", "told"]
    shown = capsys.readouterr()
    assert shown.out.endswith("after\n") and shown.err == "told\nafter\n"
    # A redirected output holds no bars either.
    assert "\r" not in shown.out.replace("\r\n", "") + shown.err
    logger.removeHandler(handler)
    # A second run appends to the log.
    begin_log(tmp_path / LOG_NAME)
    assert (tmp_path / LOG_NAME).read_text().startswith(begin)


def test_lines_are_kept_without_a_reader(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        begin_log(tmp_path / LOG_NAME)
        for _ in range(2):
            print("one", flush=True)
        os.write(writing, b"by another hand")
        end_log()
    assert (tmp_path / LOG_NAME).read_text().count("one\n") == 2


def test_lines_are_kept_when_the_disk_of_the_output_is_full(small_disk, tmp_path, monkeypatch):  # noqa: F811
    disk = small_disk(1)
    with open(disk / "output", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        begin_log(disk / LOG_NAME)
        print("x" * (2 << 20), flush=True)
        print("on", flush=True)
        end_log()
        os.truncate(disk / "output", 0)


@pytest.mark.slow
def test_a_run_continues_when_its_reader_ends(workspace, tmp_path):  # noqa: F811
    with start(command(workspace, tmp_path / "run")) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert (tmp_path / "run/model.safetensors").is_file()
    log = (tmp_path / "run" / LOG_NAME).read_text()
    assert "1 process(es) on CPU" in log and "|" not in log and "eval" not in log

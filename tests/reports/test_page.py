"""`report.html` in a real browser: no error, no empty chart, and nothing wider than a phone's screen."""

import io
import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page

from hf_pretrain.reports.page import find_differences, write_page
from hf_pretrain.run_directory.directory import RECORD_NAME
from hf_pretrain.run_directory.history import RunHistory, read_run, read_runs
from hf_pretrain.runtime.errors import UserError
from tests.invariants.launching import ROOT


PHONE = {"width": 390, "height": 844}


def write_run(directory: Path, *, learning_rate: float = 1e-3) -> RunHistory:
    """Write the files of a run with experts and samples that was stopped and resumed."""
    directory.mkdir()
    launch = {
        "command": "python recipes/pretrain.py --max_steps 40",
        "started": "2026-07-01T10:00:00",
        "arguments": {"learning_rate": learning_rate, "output_dir": str(directory), "max_length": 256},
        "versions": {"torch": "2.13.0"},
        "data": {"counts": ["Training: 43,162 documents; 12 bad lines skipped"]},
    }
    samples = [[step, [["从前", f"有一座山 <script>alert({step})</script>"]]] for step in (10, 20, 30, 40)]
    first = launch | {"stopped": "after step 20: SIGTERM", "samples": samples[:2]}
    second = launch | {"resumed_from": "checkpoint-20", "samples": samples[2:]}
    (directory / RECORD_NAME).write_text(json.dumps([first, second]))
    log = []
    for step in range(1, 41):
        seen = {"step": step, "num_input_tokens_seen": 1000 * step}
        figures = {"loss": 6 / step**0.5, "grad_norm": 1 / step, "learning_rate": learning_rate, "mfu": 0.5}
        speed = {"tokens_per_second": 1000.0, "peak_memory_gib": 1.5, "training_seconds": 2.0}
        log.append(figures | speed | seen)
        if step % 10 == 0:
            log.append({"eval_loss": 7 / step**0.5} | seen)
    (directory / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return read_run(directory)


def open_page(page: Page, path: Path) -> list[str]:
    """Open a file at a phone's width, and return all errors and all requests to other addresses."""
    found: list[str] = []
    page.set_viewport_size(PHONE)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: (found.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: found.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return found


def num_coloured(picture: bytes) -> int:
    """Return the number of coloured pixels of a picture. Axes, text and grid are grey."""
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
    return int((pixels.max(-1) - pixels.min(-1) > 40).sum())


def num_drawn_pixels(page: Page, number: int) -> int:
    return num_coloured(page.locator("figure svg").nth(number).screenshot())


def test_the_page_of_a_run(page, tmp_path):
    path = tmp_path / "report.html"
    run = write_run(tmp_path / "mine")
    write_page([run], path)
    assert open_page(page, path) == []
    captions = page.locator("figcaption").all_inner_texts()
    assert captions == [
        *("Loss over tokens", "Loss over minutes", "Learning rate", "Gradient norm", "Speed"),
        *("Share of the peak speed", "Memory"),
    ]
    for number, caption in enumerate(captions):
        assert num_drawn_pixels(page, number) > 300, f"{caption} is empty"
    # No part of the page is wider than the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    text = page.inner_text("body")
    for expected in (
        "stopped: after step 20: SIGTERM",
        "resumed from checkpoint-20",
        "43,162 documents; 12 bad lines skipped",
        "torch\t2.13.0",
        "python recipes/pretrain.py --max_steps 40 --resume_from_checkpoint auto",
        f"validation loss\t{7 / 40**0.5:.4f} nats per token",
        "steps\t40",
        "tokens seen\t40,000",
        "time of training\t1.3 min",
    ):
        assert expected in text
    # The newest sample is open, and the page escapes the model's text.
    assert "<script>alert(40)</script>" in text and "alert(10)" not in text
    # The continuation of a text continues the line, and an answer begins a line.
    assert "从前有一座山" in text
    launch = run.launches[-1]
    launch |= {"recipe": "sft", "ended": "2026-07-01", "next_commands": [["Talk to it", "hf-pretrain chat --web"]]}
    # A chart without a line counts as empty.
    write_page([run], path)
    path.write_text(path.read_text(encoding="utf-8").replace("stroke: #2563eb", "stroke: none"), encoding="utf-8")
    page.reload()
    text = page.inner_text("body")
    assert "从前\n→ 有一座山" in text and num_drawn_pixels(page, 2) < 300
    # A finished run shows the next commands, and does not need to resume.
    assert "Talk to it:" in text and "hf-pretrain chat --web" in text and "--resume_from_checkpoint" not in text


@pytest.mark.parametrize(("options", "is_chinese"), [({}, True), ({"java_script_enabled": False}, False)])
def test_the_page_follows_the_language_of_the_browser(page, tmp_path, options, is_chinese):
    """Without scripts, it is in English."""
    run, path = write_run(tmp_path / "mine"), tmp_path / "report.html"
    run.launches[-1]["unigram_loss"] = 5.5
    run.log.insert(0, {"step": 0, "eval_loss": 8.75, "num_input_tokens_seen": 0})
    write_page([run], path)
    page = page.context.browser.new_context(locale="zh-CN", **options).new_page()
    page.goto(path.as_uri())
    shown = page.inner_text("body")
    texts = {
        "结果": "Results",
        f"{7 / 40**0.5:.4f} nats/token （训练前 8.7500）": f"{7 / 40**0.5:.4f} nats per token (8.7500 before)",
        "（一元模型：5.5000）": "(8.7500 before) (a unigram model: 5.5000)",
        "1.3 分钟": "1.3 min",
    }
    for chinese, english in texts.items():
        assert (chinese in shown, english in shown) == (is_chinese, not is_chinese)
    charts = [page.locator("figure svg").nth(number).inner_html() for number in (0, 1)]
    assert all("unigram model" in chart or "一元模型" in chart for chart in charts)
    for label, is_shown in (("token（百万）", is_chinese), ("tokens (millions)", not is_chinese)):
        assert page.locator("figure").first.get_by_text(label).is_visible() == is_shown
    page.context.close()


def test_a_comparison_begins_with_the_different_settings(page, tmp_path):
    runs = [write_run(tmp_path / "slow"), write_run(tmp_path / "fast", learning_rate=4e-3)]
    path = tmp_path / "comparison.html"
    write_page(runs, path)
    assert open_page(page, path) == []
    assert find_differences(runs) == {"learning_rate": [1e-3, 4e-3]}
    assert page.locator("h2").all_inner_texts()[0] == "Differences"
    assert page.locator("table").first.inner_text().split() == ["slow", "fast", "learning_rate", "0.001", "0.004"]
    # The results stand side by side, and both columns of these two tables are on the screen of a phone.
    row = page.locator("table").nth(1).locator("tr").filter(has_text="validation loss")
    assert row.locator("td").all_inner_texts() == [f"{7 / 40**0.5:.4f} nats per token"] * 2
    for table in (0, 1):
        box = page.locator("table").nth(table).locator("td").last.bounding_box()
        assert box["width"] > 90 and box["x"] + box["width"] <= PHONE["width"]
    # Both runs have a line in each chart.
    legend = page.locator("figure svg").nth(2).inner_html()
    assert "slow" in legend and "fast" in legend
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    # The texts of events do not break between all letters.
    assert all(box["height"] < 80 for box in map(lambda row: row.bounding_box(), page.locator(".events tr").all()))
    # The number of processes changes the batch, so a launch is a setting like the others.
    runs[1].launches[-1] |= {"launcher": "torchrun", "launch": "2 process(es) on CPU, bf16", "loss_unit": "DPO"}
    assert find_differences(runs).keys() == {"learning_rate", "launcher", "launch"}
    # Losses of different units share an axis without a unit.
    write_page(runs, path)
    assert "loss (" not in path.read_text(encoding="utf-8")
    write_page(runs[1:], path)
    assert "loss (DPO)" in path.read_text(encoding="utf-8")


def test_the_recipe_writes_the_page_of_each_run_or_of_several(page, tmp_path, monkeypatch, capsys):
    directories = [str(tmp_path / name) for name in ("slow", "fast")]
    for directory, rate in zip(directories, (1e-3, 4e-3), strict=True):
        write_run(Path(directory), learning_rate=rate)
    both = tmp_path / "both.html"
    # The directory above the runs holds no run.
    several = [*directories, str(tmp_path), "--output", str(both)]
    for words, path in ((directories[:1], tmp_path / "slow/report.html"), (several, both)):
        monkeypatch.setattr(sys, "argv", [str(ROOT / "recipes/compare.py"), *words])
        runpy.run_path(sys.argv[0], run_name="__main__")
        assert (f"Left out: {tmp_path} holds no run that" in capsys.readouterr().out) == (words is several)
        assert open_page(page, path) == [] and num_drawn_pixels(page, 0) > 300
    assert page.locator("h2").all_inner_texts()[0] == "Differences"


def test_the_page_of_reinforcement_shows_rewards(tmp_path):
    run = write_run(tmp_path / "grpo")
    run.launches[-1]["loss_unit"] = "GRPO"
    for entry in run.log:
        if (loss := entry.pop("eval_loss", None)) is not None:
            entry["eval_reward"] = 1 / loss
        elif "loss" in entry:
            entry |= {"reward": 1 / entry["loss"], "completions/mean_length": 20.0, "kl": 0.1, "entropy": 2.0}
            entry |= {"frac_reward_zero_std": 0.5, "clip_ratio/region_mean": 0.0, "completions/clipped_ratio": 0.25}
    write_page([run], tmp_path / "report.html", language="en")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for caption in ("Reward over tokens", "Loss over minutes", "Completion length", "KL divergence"):
        assert f"<figcaption>{caption}" in text
    for caption in ("Groups with equal rewards", "Entropy", "Clipped tokens", "Truncated answers"):
        # Each has a sentence.
        assert f"<figcaption>{caption}</figcaption>\n<p>" in text
    assert "loss (GRPO)" in text and "mean reward" in text


def test_figures_over_tokens_and_minutes_have_one_point_per_step():
    log = [
        {"step": 2, "loss": 4.0, "training_seconds": 60.0, "num_input_tokens_seen": 1_000_000},
        {"step": 2, "eval_loss": 3.0, "num_input_tokens_seen": 1_000_000},
        {"step": 4, "loss": 3.0, "training_seconds": 120.0, "num_input_tokens_seen": 2_000_000},
        {"step": 4, "eval_loss": 2.0, "num_input_tokens_seen": 2_000_000},
        # The evaluation of the best model, which is that of step 2.
        {"step": 4, "eval_loss": 1.0, "num_input_tokens_seen": 2_000_000},
        {"step": 4, "train_runtime": 5.0},
    ]
    run = RunHistory("", [], log)
    assert run.series("loss") == ([1.0, 2.0], [4.0, 3.0])
    assert run.series("eval_loss", over="minutes") == ([1.0, 3.0], [3.0, 2.0])
    assert run.last("eval_loss") == 1.0 and run.last("reward") is None


def test_points_between_and_after_the_logs_have_their_own_minutes(tmp_path):
    # Logs after 10 steps, and evaluations after 5, 10 and 12.
    log = [
        {"step": step, "num_input_tokens_seen": step}
        | ({"eval_loss": 1.0} if seconds is None else {"loss": 2.0})
        | ({} if seconds is None else {"training_seconds": seconds})
        for step, seconds in ((5, None), (10, 60.0), (10, None), (12, None))
    ]
    assert RunHistory("", [], log).series("eval_loss", over="minutes")[0] == pytest.approx([0.5, 1.0, 1.2])
    # Too few steps for a log: no chart of points at one place.
    run = RunHistory("short", [], [entry for entry in log if "eval_loss" in entry])
    write_page([run], tmp_path / "short.html", language="en")
    captions = (tmp_path / "short.html").read_text().split("<figcaption>")[1:]
    assert [text.partition("<")[0] for text in captions] == ["Loss over tokens"]


def test_a_resumed_launch_replaces_the_samples_of_its_steps():
    launches = [{"samples": [[2, [["a", "b"]]], [4, [["a", "c"]]]]}, {}, {"samples": [[4, [["a", "d"]]]]}]
    assert RunHistory("", launches).samples == {2: [["a", "b"]], 4: [["a", "d"]]}


def test_the_newest_log_is_read(tmp_path):
    (tmp_path / RECORD_NAME).write_text("[]")
    for number, name in enumerate((".", "checkpoint-4", "checkpoint-2")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": number}]}))
        os.utime(tmp_path / name / "trainer_state.json", (number, number))
    # A run that resumed from step 2 has not reached step 4 again.
    assert read_run(tmp_path).log == [{"step": 2}]


def test_directories_without_a_run_are_left_out(tmp_path):
    def names(*directories: Path) -> tuple[list[str], int]:
        runs, left_out = read_runs(directories)
        return [run.name for run in runs], len(left_out)

    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "out")
    other = tmp_path / "other"
    other.mkdir()
    (other / RECORD_NAME).write_text("[{}]")
    first, second = tmp_path / "a/out", tmp_path / "b/out"
    assert names(first, second, first, other, tmp_path) == ([str(first), str(second)], 2)
    for directory in (tmp_path, other):
        with pytest.raises(UserError):
            names(directory)


def test_a_launch_that_died_before_its_training_hides_no_arguments():
    launches = [{"arguments": {"learning_rate": 0.1}}, {"command": "hf-pretrain sft"}]
    assert RunHistory("mine", launches, []).arguments == {"learning_rate": 0.1}
    assert RunHistory("mine", launches[1:], []).arguments == {}

"""`report.html` in a real browser: no error, no empty chart, and nothing wider than a phone's screen."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Page

from hf_pretrain.reports.history import History
from hf_pretrain.reports.page import find_differences, write_page
from hf_pretrain.reports.runs import RECORD_NAME, Run, read_run
from tests.invariants.launching import ROOT, cpu_environment


PHONE = {"width": 390, "height": 844}


def write_run(directory: Path, *, learning_rate: float = 1e-3) -> Run:
    """Write the files of a run with experts and samples that was stopped and resumed."""
    directory.mkdir()
    launch = {
        "command": "python recipes/pretrain.py --max_steps 40",
        "arguments": {"learning_rate": learning_rate, "output_dir": str(directory), "max_length": 256},
        "versions": {"torch": "2.13.0"},
        "data": {"counts": ["Training: 43,162 documents; 12 bad lines skipped"]},
    }
    (directory / RECORD_NAME).write_text(json.dumps([launch]))
    history = History(directory, is_writer=True)
    history.begin(0, checkpoint=None)
    for step in range(1, 41):
        if step == 21:
            history.add("stop", 20, message="SIGTERM")
            history.begin(20, checkpoint="checkpoint-20")
        if step == 31:
            history.add("skipped_step", 31, message="The loss is not finite")
        figures = {"loss": 6 / step**0.5, "grad_norm": 1 / step, "learning_rate": learning_rate, "mfu": 0.5}
        speed = {"tokens_per_second": 1000.0, "peak_memory_gib": 1.5, "num_input_tokens_seen": 1000 * step}
        history.add("log", step, **figures, **speed)
        if step % 10 == 0:
            history.add("log", step, eval_loss=7 / step**0.5, num_input_tokens_seen=1000 * step)
            history.add("samples", step, samples=[["从前", f"有一座山 <script>alert({step})</script>"]])
            history.add("router_load", step, load=[[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
            history.add("checkpoint", step, message=f"checkpoint-{step}", num_input_tokens_seen=1000 * step)
    history.add("end", 40)
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


def num_drawn_pixels(page: Page, number: int) -> int:
    """Return the number of coloured pixels of a chart. Axes, text and grid are grey."""
    picture = page.locator("figure svg").nth(number).screenshot()
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
    return int((pixels.max(-1) - pixels.min(-1) > 40).sum())


def test_the_page_of_a_run(page, tmp_path):
    path = tmp_path / "report.html"
    write_page([write_run(tmp_path / "mine")], path)
    assert open_page(page, path) == []
    captions = page.locator("figcaption").all_inner_texts()
    assert captions == [
        "Loss over tokens",
        "Loss over minutes",
        "Learning rate",
        "Gradient norm",
        "Speed",
        "Share of the peak speed",
        "Memory",
        "Expert load at step 40",
    ]
    for number, caption in enumerate(captions):
        assert num_drawn_pixels(page, number) > 300, f"{caption} is empty"
    # The run stopped and resumed at the same step. Two texts at one place could not be read.
    marks = page.locator("figure svg").first.locator("text").all_text_contents()
    assert "stopped, resumed" in marks and not {"stopped", "resumed"} & set(marks)
    # A date and a step stand on one line.
    count_lines = "cells => cells.map(cell => {const r = document.createRange(); r.selectNodeContents(cell); "
    lines = page.locator(".events td:not(:last-child)").evaluate_all(
        count_lines + "return r.getClientRects().length})"
    )
    assert lines and set(lines) == {1}
    # No part of the page is wider than the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    text = page.inner_text("body")
    for expected in (
        "the run was stopped: SIGTERM",
        "the run resumed: checkpoint-20",
        "checkpoint saved: checkpoint-40",
        "step skipped: The loss is not finite",
        "43,162 documents; 12 bad lines skipped",
        "torch\t2.13.0",
        "python recipes/pretrain.py --max_steps 40 --resume_from_checkpoint auto",
    ):
        assert expected in text
    # The newest sample is open, and the page escapes the model's text.
    assert "<script>alert(40)</script>" in text and "alert(10)" not in text
    # The continuation of a text continues the line, and an answer begins a line.
    assert "从前有一座山" in text
    run = read_run(tmp_path / "mine")
    run.launches[-1]["recipe"] = "sft"
    write_page([run], path)
    page.reload()
    assert "从前\n→ 有一座山" in page.inner_text("body")


def test_a_chart_without_a_line_counts_as_empty(page, tmp_path):
    run = write_run(tmp_path / "mine")
    write_page([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "report.html").write_text(text.replace("stroke: #2563eb", "stroke: none"), encoding="utf-8")
    open_page(page, tmp_path / "report.html")
    assert num_drawn_pixels(page, 2) < 300


def test_a_comparison_begins_with_the_different_settings(page, tmp_path):
    # matplotlib hides labels that begin with an underscore, and reads formulas between dollar signs.
    runs = [write_run(tmp_path / "_slow"), write_run(tmp_path / "fast$1$", learning_rate=4e-3)]
    path = tmp_path / "comparison.html"
    write_page(runs, path)
    assert open_page(page, path) == []
    assert find_differences(runs) == {"learning_rate": [1e-3, 4e-3]}
    assert page.locator("h2").all_inner_texts()[0] == "Differences"
    assert page.locator("table").first.inner_text().split() == ["_slow", "fast$1$", "learning_rate", "0.001", "0.004"]
    # The number of processes changes the batch, so a launch is a setting like the others.
    runs[1].launches[-1] |= {"launcher": "torchrun", "launch": "2 process(es) on CPU, bf16"}
    assert find_differences(runs).keys() == {"learning_rate", "launcher", "launch"}
    # Both runs have a line in each chart.
    legend = page.locator("figure svg").nth(2).inner_html()
    assert "_slow" in legend and "fast$1$" in legend
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_recipe_writes_the_page_of_each_run_or_of_several(page, tmp_path):
    directories = [str(tmp_path / name) for name in ("slow", "fast")]
    for directory, rate in zip(directories, (1e-3, 4e-3), strict=True):
        write_run(Path(directory), learning_rate=rate)
    recipe = [sys.executable, str(ROOT / "recipes/compare.py")]
    both = tmp_path / "both.html"
    # The directory above the runs holds no run.
    several = [*directories, str(tmp_path), "--output", str(both)]
    for words, path in ((directories[:1], tmp_path / "slow/report.html"), (several, both)):
        result = subprocess.run([*recipe, *words], check=True, env=cpu_environment(), capture_output=True, text=True)
        assert (f"Left out: {tmp_path} holds no run" in result.stdout) == (words is several)
        assert open_page(page, path) == [] and num_drawn_pixels(page, 0) > 300
    assert page.locator("h2").all_inner_texts()[0] == "Differences"
    result = subprocess.run([*recipe, str(tmp_path)], capture_output=True, text=True, env=cpu_environment())
    assert result.returncode == 2 and str(tmp_path) in result.stderr and "Traceback" not in result.stderr


def test_the_default_run_of_the_preset_stands_behind_the_curve(page, tmp_path):
    run = write_run(tmp_path / "mine")
    curves = {"loss": [[5_000, 5.0], [40_000, 1.4]], "eval_loss": [[10_000, 4.0], [40_000, 1.5]]}
    recorded = {"pretrain": {"steps": 40, "rows_per_step": 8, "arguments": {"learning_rate": 0.01}, "curves": curves}}
    (tmp_path / "expected.json").write_text(json.dumps(recorded))
    legends = []
    for config, max_steps, rate, rows in (
        *(("pretrain.yaml", 40, 0.01, 8), ("sft.yaml", 40, 0.01, 8), ("pretrain.yaml", 80, 0.01, 8)),
        *(("pretrain.yaml", 40, 0.02, 8), ("pretrain.yaml", 40, 0.01, 16)),
    ):
        run.launches[-1] |= {"directory": str(tmp_path), "steps": max_steps, "rows_per_step": rows}
        run.arguments.update(config=config, max_steps=max_steps, learning_rate=rate)
        write_page([run], tmp_path / "report.html")
        open_page(page, tmp_path / "report.html")
        chart = page.locator("figure svg").first.inner_html()
        legends.append([f"{name}, default run" in chart for name in ("training", "validation")])
    # There is no record of the other stage, nor of a run of that length, learning rate or batch.
    assert legends == [[True, True], *[[False, False]] * 4]
    # Another file of this name is the user's own.
    (tmp_path / "expected.json").write_text('{"pretrain": ["mine"]}')
    write_page([run], tmp_path / "report.html")


def test_a_run_that_resumed_shows_the_step_that_it_resumed_from(tmp_path):
    write_run(tmp_path / "mine")
    History(tmp_path / "mine", is_writer=True).begin(20, checkpoint="checkpoint-20")
    write_page([read_run(tmp_path / "mine")], tmp_path / "report.html")
    rows = re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", (tmp_path / "report.html").read_text(encoding="utf-8"))
    expected = {("steps", "20"), ("tokens seen", "20,000"), ("newest checkpoint", "checkpoint-20")}
    assert expected <= set(rows)


def test_a_run_without_a_logged_speed_has_charts_over_the_time_on_the_clock(page, tmp_path):
    run = write_run(tmp_path / "dpo")
    for entry in run.logs:
        entry.pop("tokens_per_second", None)
    write_page([run], tmp_path / "report.html")
    assert open_page(page, tmp_path / "report.html") == []
    captions = page.locator("figcaption").all_inner_texts()
    assert captions[:2] == ["Loss over tokens", "Loss over minutes"] and "Speed" not in captions
    assert num_drawn_pixels(page, 1) > 300
    assert "minutes of training and evaluation" in page.locator("figure svg").nth(1).inner_html()


def test_the_page_of_reinforcement_shows_rewards_beside_those_of_the_default_run(page, tmp_path):
    run = write_run(tmp_path / "grpo")
    run.launches[-1] |= {"directory": str(tmp_path), "steps": 40, "rows_per_step": 8, "loss_unit": "GRPO"}
    run.arguments["config"] = "grpo.yaml"
    for entry in run.logs:
        if (loss := entry.pop("eval_loss", None)) is not None:
            entry["eval_reward"] = 1 / loss
        else:
            entry |= {"reward": 1 / entry["loss"], "completions/mean_length": 20.0, "kl": 0.1}
    curves = {name: [[5_000, 0.1], [40_000, 0.9]] for name in ("loss", "reward", "eval_reward")}
    (tmp_path / "expected.json").write_text(
        json.dumps({"grpo": {"steps": 40, "rows_per_step": 8, "arguments": {}, "curves": curves}})
    )
    write_page([run], tmp_path / "report.html")
    assert open_page(page, tmp_path / "report.html") == []
    captions = page.locator("figcaption").all_inner_texts()
    assert captions[:4] == ["Reward over tokens", "Reward over minutes", "Loss over tokens", "Loss over minutes"]
    assert {"Completion length", "KL divergence from the reference model"} < set(captions)
    reward, _, loss = (page.locator("figure svg").nth(number).inner_html() for number in range(3))
    for name in ("training", "validation", "training, default run", "validation, default run"):
        assert f">{name}<" in reward
    assert "loss (GRPO)" in loss and ">training, default run<" in loss and ">validation, default run<" not in loss


def test_the_unit_of_the_loss_is_that_of_the_algorithm(page, tmp_path):
    runs = [write_run(tmp_path / "sft"), write_run(tmp_path / "dpo")]
    runs[1].launches[-1]["loss_unit"] = "DPO"
    for run, unit in zip(runs, ("nats per token", "DPO"), strict=True):
        write_page([run], tmp_path / "report.html")
        open_page(page, tmp_path / "report.html")
        assert f"validation loss\t{7 / 40**0.5:.4f} {unit}\n" in page.inner_text("body")
        assert f"loss ({unit})" in page.locator("figure svg").first.inner_html()
    # Losses of different units share an axis without a unit.
    write_page(runs, tmp_path / "report.html")
    assert "loss (" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_lists_the_bad_lines_as_an_event(page, tmp_path):
    write_run(tmp_path / "mine")
    (tmp_path / "mine/rejected.jsonl").write_text('{"line": 1}\n{"line": 7}\n')
    write_page([read_run(tmp_path / "mine")], tmp_path / "report.html")
    open_page(page, tmp_path / "report.html")
    assert "bad lines left out: 2, listed in rejected.jsonl" in page.inner_text("body")


def test_a_finished_run_shows_the_next_commands_and_no_resume(page, tmp_path):
    run = write_run(tmp_path / "mine")
    run.launches[-1] |= {"ended": "2026-07-01", "next_commands": [["Talk to it", "hf-pretrain chat --web"]]}
    write_page([run], tmp_path / "report.html")
    open_page(page, tmp_path / "report.html")
    text = page.inner_text("body")
    assert "Talk to it:" in text and "hf-pretrain chat --web" in text and "--resume_from_checkpoint" not in text


def test_a_run_without_figures_has_a_page(page, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / RECORD_NAME).write_text("[{}]")
    write_page([read_run(tmp_path / "new")], tmp_path / "report.html")
    assert open_page(page, tmp_path / "report.html") == []
    assert page.locator("figure").count() == 0

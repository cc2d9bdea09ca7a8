"""The board in a real browser: real runs that a form or a terminal starts, and the guards in front of the page."""

import asyncio
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import numpy as np
import psutil
import pytest
import requests
from matplotlib.axes import Axes

from hf_pretrain.board import launching, runs, serving
from hf_pretrain.board import page as board_page
from hf_pretrain.reports.page import draw_charts, write_page
from hf_pretrain.run_directory.directory import LOG_NAME, OUTPUT_NAME, RECORD_NAME
from hf_pretrain.run_directory.history import RunHistory, read_run, read_runs
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.texts import preferred_language
from hf_pretrain.runtime.writing import LOCK_NAME, find_holder, write_holder
from tests.faults.driving import command as toy_command
from tests.faults.driving import make_workspace, steps_of, wait_for
from tests.hub_server import HubServer
from tests.invariants.launching import ROOT, cpu_environment, free_port
from tests.toys import limited_file_size, write_jsonl


# The machine may be busy with other tests.
TIMEOUT = 500_000
RECIPE = str(ROOT / "recipes/pretrain.py")
CONFIGS = ROOT / "recipes/accelerate_configs"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


class Board:
    """A board process in a workspace, which can be started again at the same address."""

    def __init__(self, workspace: Path, *flags: str, **environment: str):
        self.workspace, self.port, self.flags, self.environment = workspace, free_port(), flags, environment
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, str(ROOT / "recipes/board.py"), "--port", str(self.port), *self.flags]
        environment = cpu_environment(
            PYTHONPATH=str(ROOT),
            http_proxy="http://127.0.0.1:9",
            no_proxy="127.0.0.1",
            **self.environment | {"HF_HOME": str(self.workspace / "hf")},
        )
        self.process = subprocess.Popen(
            command, cwd=self.workspace, env=environment, stdout=subprocess.PIPE, text=True
        )

        def answers() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", self.port)) == 0

        # Before this line, the board opens the port only to see whether it is free.
        self.token = re.search(r"token=(\S+)", self.process.stdout.readline())[1]
        assert wait_for(answers, self.process, timeout=300), "The board did not start."

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def board(workspace, hub) -> Iterator[Board]:
    """Serve a board. At the end, kill the runs that tests have started."""
    board = Board(workspace, **hub.client_environment())
    yield board
    board.end()
    for lock in workspace.glob(f"out/*/{LOCK_NAME}"):
        if (process := find_holder(lock)) is not None:
            process.kill()


def open_page(page, url: str, size: str = "desktop") -> None:
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.set_default_timeout(TIMEOUT)
    page.goto(url)
    page.locator("#runs").wait_for()


def wait_for_text(page, place: str, text: str) -> None:
    page.wait_for_function(
        "([place, text]) => document.querySelector(place)?.innerText.includes(text)", arg=[place, text]
    )


def field(page, name: str):
    return page.locator(f"#{name} input, #{name} textarea").first


def open_form(page, board: Board) -> None:
    open_page(page, f"{board.url}/en/?token={board.token}")
    page.get_by_role("tab", name="New run").click()


def choose(page, name: str, option: str) -> None:
    page.locator(f"#{name} input").click()
    page.get_by_role("option", name=option, exact=True).click()


def wait_for_output(page, name: str, pattern: str) -> str:
    """Wait until a box of text shows the pattern, and return the text."""
    text = f"document.querySelector('#{name} textarea')?.value"
    page.wait_for_function(f"() => /{pattern}/.test({text} ?? '')")
    return page.evaluate(text)


@pytest.mark.slow
def test_a_run_is_planned_started_stopped_and_resumed_while_the_board_starts_again(page, board, workspace):
    open_form(page, board)
    field(page, "name").fill("mine")
    # The run ends only if it is stopped, and saves no checkpoint before.
    page.locator("#group-1 button").first.click()
    field(page, "flag-max_steps").fill("100000")
    # The page shows the end of the log: with more lines, the one of the resume would soon be gone.
    words = toy_command(workspace, Path("unused"), launcher="python")
    words = [*words[2 : words.index("--output_dir")], "--save_steps", "100000", "--eval_strategy", "no"]
    more = " ".join([*words, "--logging_steps", "20"]).replace("--max_steps 8 ", "").replace("--save_steps 2 ", "")
    field(page, "more").fill(more + " --max_length 1")
    # The mistake is shown.
    page.locator("#make-plan").click()
    assert "error: --max_length 1 must be" in wait_for_output(page, "plan", "exit status 2")
    field(page, "more").fill(more)
    page.locator("#make-plan").click()
    wait_for_output(page, "plan", "Files +out.mine")
    command = page.locator("#command textarea").input_value()
    assert command.startswith("hf-pretrain pretrain --preset auto --max_steps 100000 --use_cpu ")
    assert not (workspace / "out/mine").exists()
    # A changed field needs no new plan, and the run that was started is shown.
    field(page, "more").fill(f"{more} --run_name other")
    page.locator("button#start").click()
    wait_for_text(page, "#view", "out/mine")
    assert page.locator("#runs input:checked").input_value() == "mine"
    wait_for_text(page, "#view", "running")
    wait_for_text(page, "#view", "/ 100000")
    wait_for_output(page, "log", "step 2")
    # The run outlives the board, and the same page shows it again.
    lock = workspace / "out/mine" / LOCK_NAME
    pid = find_holder(lock).pid
    board.end()
    board.start()
    seen = page.locator("#log textarea").input_value()
    # gradio loads the page again.
    page.wait_for_function("seen => (document.querySelector('#log textarea')?.value ?? seen) !== seen", arg=seen)
    wait_for_text(page, "#view", "running")
    assert find_holder(lock).pid == pid and steps_of(workspace / "out/mine") == []
    page.locator("button#stop").click()
    wait_for_text(page, "#view", "stopped: after step")
    (step,) = steps_of(workspace / "out/mine")
    page.locator("button#resume").click()
    wait_for_text(page, "#view", "running")
    wait_for_output(page, "log", f"checkpoint-{step}")
    wait_for_text(page, "#view", "Time left")
    # A run that is stopped while it still reads its data has no step to end after.
    steps = "[...document.querySelector('#log textarea').value.matchAll(/step ([0-9]+)/g)].map(each => each[1])"
    page.wait_for_function(f"() => {steps}.some(each => each > {step})")
    page.locator("button#stop").click()
    wait_for_text(page, "#view", "stopped: after step")
    first, second = json.loads((workspace / "out/mine" / RECORD_NAME).read_text())
    assert first["resumed_from"] is None and second["resumed_from"].endswith(f"checkpoint-{step}")
    steps = [json.loads(line)["step"] for line in (workspace / "out/mine" / LOG_NAME).read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_the_form_shows_the_data_and_plans_two_processes_of_deepspeed(page, board, workspace):
    write_jsonl(workspace / "chats.jsonl", [{"prompt": f"{n} <i>?", "completion": f"<b> {n}"} for n in range(20)])
    open_form(page, board)
    choose(page, "stage", "sft")
    page.wait_for_function("() => document.querySelector('#name input, #name textarea').value.startsWith('sft')")
    for flag, text in (("dataset_name", "missing.jsonl"), ("model_name_or_path", "toy"), ("max_length", "64")):
        field(page, f"flag-{flag}").fill(text)
    page.locator("#show-data").click()
    wait_for_text(page, "#data", "exit status 2")
    assert "error: There is no file or directory missing.jsonl" in page.locator("#data").inner_text()
    field(page, "flag-dataset_name").fill("chats.jsonl")
    page.locator("#show-data").click()
    wait_for_text(page, "#data", "Marked tokens are trained.")
    page.wait_for_function("() => document.querySelectorAll('#data mark').length > 4")
    marked = page.locator("#data mark").all_inner_texts()
    assert all(re.fullmatch(r"<b> \d+<\|im_end\|>", text) for text in marked)
    assert re.search(r"<\|im_start\|>user\s\d+ <i>\?<\|im_end\|>", page.locator("#data").inner_text())
    assert "\033" not in page.locator("#data").inner_text()
    page.locator("#group-6 button").first.click()
    field(page, "flag-nproc").fill("2")
    choose(page, "flag-ds", "zero2")
    field(page, "more").fill("--use_cpu --bf16 false --validation_fraction 0 --max_steps 4")
    page.locator("#make-plan").click()
    plan = wait_for_output(page, "plan", "Files +out|exit")
    assert "2 process(es) on CPU" in plan and "ds_configs/zero2.json" in plan


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_runs_of_a_terminal_are_shown_compared_and_pushed_in_chinese(browser_in_chinese, board, workspace, hub, size):
    page = browser_in_chinese
    if not (workspace / "out/terminal").exists():
        assert run_toy(workspace, "terminal") == 0
    # The browser's language chooses.
    open_page(page, f"{board.url}/?token={board.token}", size)
    assert page.url == f"{board.url}/zh/"
    page.locator("#runs label", has_text="terminal").click()
    for text in ("out/terminal", "已完成", "8 / 8", "训练损失", "内存"):
        wait_for_text(page, "#view", text)
    assert page.locator("#view svg").count() >= 4 and "损失随 token 数的变化" in page.locator("#view").inner_text()
    if size == "desktop":
        page.locator("#evaluation button").first.click()
        page.get_by_label("验证数据").fill("train.jsonl")
        page.locator("#evaluation").get_by_label("其他参数").fill("--max_length 32 --use_cpu")
        page.locator("button#evaluate").click()
        words = "--model_name_or_path out/terminal --eval_dataset_name train.jsonl --max_length 32 --use_cpu"
        output = wait_for_output(page, "evaluation-output", "per byte|exit")
        assert output.startswith(f"$ hf-pretrain evaluate {words}\n")
        assert (workspace / "out/terminal/evaluation.json").is_file()
        page.locator("#export button").first.click()
        page.get_by_label("格式").click()
        page.get_by_role("option", name="minimind", exact=True).click()
        page.get_by_label("Hub 上的仓库").fill("user/pushed")
        page.locator("button#export-run").click()
        pushed = wait_for_output(page, "export-output", "Pushed to|exit")
        assert f"Pushed to {hub.endpoint}/user/pushed" in pushed
        assert {"config.json", "model.safetensors", "README.md"} <= hub.repos["user/pushed"].files.keys()
    for name, place in (("新建训练", "#more"), ("对比", "#compare"), ("训练列表", "#runs")):
        page.get_by_role("tab", name=name).click()
        page.locator(place).wait_for()
        if place == "#more":
            page.get_by_text("每个打包序列的 token 数。").wait_for()
        # Nothing is wider than the screen.
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    page.get_by_role("tab", name="对比").click()
    page.locator("#compared label", has_text="terminal").click()
    page.locator("#compare").click()
    report = page.frame_locator("#report iframe")
    report.get_by_role("heading", name="结果").wait_for()
    assert "out/terminal" in report.locator("h1").inner_text()
    if size == "phone":
        # Beside another run, both columns fit the screen.
        record(workspace / "out/beside", "", arguments={"learning_rate": 1.0})
        (workspace / "out/beside" / LOG_NAME).write_text('{"step": 1, "loss": 2.5}\n')
        page.get_by_role("tab", name="训练列表").click()
        page.get_by_role("tab", name="对比").click()
        page.locator("#compared label", has_text="beside").click()
        page.locator("#compare").click()
        report.locator("h1", has_text="out/beside").wait_for()
        for table in report.locator(".wide").all()[:2]:
            assert table.evaluate("table => table.scrollWidth <= table.clientWidth")


@pytest.mark.slow
def test_what_is_chosen_and_typed_before_the_board_answers_stays(page, hub, workspace, request):
    command = shlex.join(["A=1", "python", RECIPE, "--preset", "tiny", "--dataset_name", "a b.jsonl", "c.jsonl"])
    command += " --max_steps=7 --use_cpu --warmup_steps 0.1 --output_dir out/older"
    for name in ("older", "newer"):
        record(workspace / "out" / name, command, directory=str(workspace))
    # A board that starts later knows these runs from the beginning.
    board, held = Board(workspace, **hub.client_environment()), []
    request.addfinalizer(board.end)
    page.route("**/queue/join*", lambda route: held.append(route))
    open_page(page, f"{board.url}/en/?token={board.token}")
    page.locator("#runs label", has_text="older").click()
    page.get_by_role("tab", name="New run").click()
    name = field(page, "name")
    name.fill("typed")
    # The buttons act on what is chosen when the answer to the first questions has come.
    for each in held:
        each.continue_()
    page.unroute("**/queue/join*")
    page.get_by_role("tab", name="Runs", exact=True).click()
    wait_for_text(page, "#view", "out/older")
    assert page.locator("#runs input:checked").input_value() == "older"
    # The form gets the flags of an earlier run, also if its preset proposes another name.
    page.get_by_role("tab", name="New run").click()
    choose(page, "earlier", "older")
    words = "pretrain --preset tiny --dataset_name 'a b.jsonl' c.jsonl --max_steps 7 --use_cpu true --nproc 1"
    expected = f"hf-pretrain {words} --warmup_steps 0.1 --output_dir out/typed"
    page.wait_for_function("text => document.querySelector('#command textarea').value === text", arg=expected)
    assert name.input_value() == "typed"
    # What is there can be chosen: data beside the runs, and no configs of models.
    page.locator("#flag-dataset_name input").click()
    options = page.get_by_role("option").all_inner_texts()
    assert {"embedded", "train.jsonl"} <= {*options} and not any("config" in each for each in options)
    # Six fields are open, and the help keeps its asterisks.
    page.keyboard.press("Escape")
    assert page.locator("[id^=flag-]:visible").count() == 6
    page.locator("#group-3 button").first.click()
    help_text = page.locator("#flag-gradient_accumulation_steps").inner_text()
    assert "batch_size ∗ num_devices ∗ gradient" in " ".join(help_text.split()).replace("per_device_train_", "")
    # GRPO counts completions.
    assert "Completions" not in page.locator("#flag-per_device_train_batch_size").inner_text()


def run_toy(workspace: Path, name: str, *flags: str) -> int:
    """Run the toy command in a terminal, and return its status."""
    words = toy_command(workspace, Path("out", name), *flags, launcher="python")
    return subprocess.run(words, cwd=workspace, env=cpu_environment(PYTHONPATH=str(ROOT))).returncode


@pytest.mark.slow
def test_a_run_of_a_terminal_that_fails_before_its_first_step_shows_why(workspace, monkeypatch):
    assert run_toy(workspace, "failed", "--dataset_name", "missing.jsonl") == 2
    monkeypatch.chdir(workspace)
    assert re.search("interrupted: [^<]*missing.jsonl", runs.show("failed", str))


@pytest.fixture
def browser_in_chinese(page):
    context = page.context.browser.new_context(locale="zh-CN")
    yield context.new_page()
    context.close()


@pytest.mark.slow
def test_foreign_pages_and_requests_without_the_token_are_refused(board, workspace):
    own = {"Host": f"127.0.0.1:{board.port}", "Origin": board.url}
    cookies = {"hf_pretrain_board": board.token}
    # A page at another port of the same host is foreign, too.
    origins = [{"Origin": "http://evil.com"}, {"Origin": "http://127.0.0.1:9999"}]
    for foreign, status in (({}, 200), ({"Host": "evil.com"}, 403), *((origin, 403) for origin in origins)):
        for method, path in (("get", "/en/"), ("get", "/en/config"), ("post", "/en/gradio_api/queue/join")):
            headers, known = own | foreign, {"cookies": cookies, "timeout": 60}
            answer = requests.request(method, board.url + path, headers=headers, **known)
            assert (answer.status_code == 403) == (status == 403), (foreign, path)
    assert requests.get(f"{board.url}/en/config", headers=own, timeout=60).status_code == 401
    assert (workspace / "hf/hf_pretrain/board_token").stat().st_mode & 0o077 == 0
    network = Board(workspace, "--host", "0.0.0.0", "--language", "zh")
    try:
        token = network.token
        for path in ("/", "/zh/", "/zh/config", "/?token=wrong"):
            assert requests.get(network.url + path, timeout=60).status_code == 401
        with requests.Session() as session:
            answer = session.get(f"{network.url}/?token={token}", timeout=60)
            # The token leaves the address, and the flag chooses the language.
            assert (answer.status_code, answer.url) == (200, f"{network.url}/zh/")
            for path in ("/zh/config", "/favicon.ico"):
                assert session.get(network.url + path, timeout=60).status_code == 200
    finally:
        network.end()


# Parts


def test_a_token_is_written_whole_and_one_that_can_be_guessed_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "HF_HOME", str(tmp_path))
    place = tmp_path / "hf_pretrain/board_token"
    with limited_file_size(0), pytest.raises(OSError):
        serving.read_token()
    assert not place.exists()
    seen = set()
    for bad in (b"", b"\n", b"short", b"\xff" * 40, "ü".encode() * 30, b"a b" * 20):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(bad)
        token = serving.read_token()
        assert len(token) >= 22 and serving.read_token() == token == place.read_text()
        assert place.stat().st_mode & 0o077 == 0
        seen.add(token)
    assert len(seen) == 6


def test_a_form_becomes_a_command():
    flags = launching.read_flags()["pretrain"]
    values = {"dataset_name": "'my file.jsonl' b.jsonl", "max_steps": "", "use_cpu": "true", "rewards": "unknown here"}
    words = launching.make_words(flags, "pretrain", "tiny", "a", values, "--bf16 false")
    assert words == [
        *("pretrain", "--preset", "tiny", "--dataset_name", "my file.jsonl", "b.jsonl", "--use_cpu", "true"),
        *("--bf16", "false", "--output_dir", "out/a"),
    ]
    for name in ("", "../a", "a/b", "-a"):
        with pytest.raises(UserError):
            launching.make_words(flags, "pretrain", "tiny", name, values, "")
    assert launching.find_defaults("sft", "tiny")["output_dir"] == "out/sft-tiny"


def test_exports_and_evaluations_name_their_weights_tasks_and_data():
    words = launching.export_words(Path("out/a"), "gguf", "q8_0", "")
    assert shlex.join(words) == "convert --from out/a --to out/a-gguf-q8_0 --format gguf --dtype q8_0"
    words = launching.export_words(Path("out/a"), "llama", "", "me/b")
    assert shlex.join(words) == "convert --from out/a --to out/a-llama --format llama --push --hub_model_id me/b"
    words = launching.evaluation_words(Path("out/a"), "small,piqa", "'my test.jsonl' b.jsonl", "--limit 3")
    assert shlex.join(words) == (
        "evaluate --model_name_or_path out/a --tasks small,piqa --eval_dataset_name 'my test.jsonl' b.jsonl --limit 3"
    )
    assert launching.evaluation_words(Path("out/a"), "", "", "") == words[:3]


def last_text(*words: str, **options: str) -> str:
    async def wait() -> str:
        return [text async for text in launching.run_command(*words, **options)][-1]

    return asyncio.run(wait())


def test_a_command_prints_in_the_language_of_the_page():
    assert last_text("list", language="zh").startswith("训练阶段:")


def stand_in(monkeypatch, program: str) -> None:
    """Let a program in Python stand for every command of `hf-pretrain`."""
    monkeypatch.setattr(launching, "command_of", lambda *words: [sys.executable, "-c", program, *words])


def test_long_lines_and_progress_bars_are_shown(monkeypatch):
    """lm-eval's progress bars end no line, and a row of data may be one line of any length."""
    stand_in(monkeypatch, "print('数' * 200_000 + '\\n' + '\\r 1%' * 50_000 + '\\rdone', end='')")
    assert last_text("evaluate") == "数" * 200_000 + "\ndone"


def test_a_stop_during_the_start_reaches_the_ranks_of_a_launcher(monkeypatch, tmp_path):
    """DeepSpeed's launcher ends at a signal, and its ranks would go on."""
    rank = "open('rank', 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', \"import os, time; {rank}\"])"
    stand_in(monkeypatch, program)
    monkeypatch.chdir(tmp_path)
    # Reading it waits for the rank.
    os.mkfifo("rank")
    launching.start_run(["pretrain", "--output_dir", "out/new"])
    rank = psutil.Process(int(Path("rank").read_text()))
    launching.stop(Path("out/new"))
    assert not psutil.wait_procs([rank], timeout=300)[1]


def test_the_form_shows_flags_of_each_stage():
    flags = launching.read_flags()
    assert {each["form"].split(": ")[0] for stage in flags.values() for each in stage.values()} == {*launching.GROUPS}
    assert flags["grpo"].keys() - flags["sft"].keys() == {"rewards"}
    assert flags["distill"]["teacher_name_or_path"]["form"] == "What to train: Teacher"


def test_only_a_living_process_holds_a_directory(tmp_path):
    place = tmp_path / LOCK_NAME
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_holder(place, process.pid)
    assert find_holder(place).pid == process.pid
    # The number of a process that has ended may belong to another one.
    holder = json.loads(place.read_text())
    place.write_text(json.dumps(holder | {"created": holder["created"] - 60}))
    assert find_holder(place) is None
    place.write_text(json.dumps(holder | {"host": "elsewhere"}))
    assert find_holder(place) is None
    place.write_text(json.dumps(holder))
    process.send_signal(signal.SIGKILL)
    # Its parent has not asked for its status yet.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert find_holder(place) is None
    process.wait()
    place.write_text("")
    assert find_holder(place) is None


def record(run: Path, command: str, **fields) -> Path:
    """Write the record of a run that was started in the working directory."""
    run.mkdir(parents=True, exist_ok=True)
    launch = {"command": command, "directory": os.getcwd()} | fields
    (run / RECORD_NAME).write_text(json.dumps([launch]))
    return run


@pytest.mark.parametrize(
    ("before", "launcher"),
    [
        ("LD_PRELOAD=/tmp/x.so OMP_NUM_THREADS=1 /usr/bin/python3.12", "--nproc 1"),
        ("python /b/torchrun --nproc_per_node=4 --master_port 29501", "--nproc 4"),
        ("/elsewhere/torchrun --standalone --nproc-per-node 2", "--nproc 2"),
        ("C:/b/python.exe C:/b/torchrun --nproc_per_node=2", "--nproc 2"),
        ("torchrun --signals-to-handle SIGTERM,SIGINT --nproc_per_node 2", "--nproc 2"),
        ("deepspeed --quiet --include localhost:0,1,2 --master_port 1", "--nproc 3 --launcher deepspeed"),
        ("deepspeed", "--nproc 1 --launcher deepspeed"),
        (
            f"accelerate launch --config_file {CONFIGS}/zero2.yaml --deepspeed_config_file x.json --num_processes 2 "
            "--main_process_port 1",
            "--nproc 2 --accelerate zero2",
        ),
    ],
)
def test_a_run_of_any_launcher_is_resumed_by_the_command_of_this_package(tmp_path, monkeypatch, before, launcher):
    monkeypatch.chdir(tmp_path)
    flags = ["--preset", "tiny", "--run_name", "a b"]
    place = ["--output_dir", "out/a"]
    for more, then in ((place, []), (["--output_dir", "/b"], ["--output_dir", "/b"])):
        text = f"{before} {shlex.join([RECIPE, *flags, *more])}"
        for command in (text, f"{text} --resume_from_checkpoint auto"):
            words = launching.recorded_words(record(Path("out/a"), command))
            assert words == ["pretrain", *launcher.split(), *flags, *then]


GRPO = f"python {ROOT}/recipes/grpo.py"
PROGRAM = "import pathlib; pathlib.Path('ran').touch()"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "touch ran",
        f"sh -c 'touch ran' {RECIPE}",
        f'{sys.executable} -c "{PROGRAM}" {RECIPE}',
        f"torchrun --no-python touch ran {RECIPE}",
        f"accelerate launch --config_file mine.yaml {RECIPE}",
        f"deepspeed --include other:0 {RECIPE}",
        f"torchrun -m mine {RECIPE}",
        "python pretrain.py",
        f"python {ROOT}/recipes/../hf_pretrain_cli.py pretrain",
        f"python {RECIPE} --help",
        f"python {RECIPE} --run_name <token>",
        f"python {RECIPE} --eval_tasks_path out/a",
        f"{GRPO} --rewards out.a.mine:run",
        f"{GRPO} --tools out.a.mine:run",
        f"{GRPO} --config out/a/mine.yaml",
        f"{GRPO} --rewards out/a --trust_remote_code true",
        f"{GRPO} --reward_model_path out/a",
    ],
)
def test_a_record_starts_no_program_and_no_code_of_its_own(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    run = record(Path("out/a"), command)
    (run / "mine.py").write_text(f"{PROGRAM}\nrun = print\n")
    (run / "mine.yaml").write_text("rewards: [out.a.mine:run]\n")
    with pytest.raises(UserError):
        launching.resume_run(run)
    assert {path.name for path in run.iterdir()} == {RECORD_NAME, "mine.py", "mine.yaml"}


def test_states_and_output_of_runs_come_from_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "out/from-scratch/pretrain"
    run.mkdir(parents=True)
    (run / OUTPUT_NAME).write_text("0%\r10%\rstep 1: loss 2\nerror: <b>\n")
    (name,) = runs.find_runs()
    assert (name, runs.state_of(name)) == ("from-scratch/pretrain", "interrupted")
    assert runs.read_output(name) == "step 1: loss 2\nerror: <b>\n"
    (run / LOCK_NAME).write_text('{"error": "--max_length 1 <i>"}')
    assert "interrupted: --max_length 1 &lt;i&gt;" in runs.show(name, str)
    write_holder(run / LOCK_NAME, os.getpid())
    assert runs.state_of(name) == "starting"
    (run / LOCK_NAME).unlink()
    expected = json.loads((ROOT / "recipes/tiny/expected.json").read_text())["pretrain"]
    arguments = expected["arguments"] | {"config": "recipes/tiny/pretrain.yaml"}
    log = [{"step": 10, "loss": 2.0, "num_input_tokens_seen": 9, "training_seconds": 5.0, "max_steps": 30}]
    # The last line is not complete yet.
    (run / LOG_NAME).write_text("".join(f"{json.dumps(entry)}\n" for entry in log) + '{"step"')
    for value, is_expected in ((expected["arguments"]["max_length"], True), (9, False)):
        launch = {"arguments": arguments | {"max_length": value}, "stopped": "<i>", "samples": [[1, [["<u>", "x"]]]]}
        (run / RECORD_NAME).write_text(json.dumps([launch]))
        shown = runs.show(name, lambda text: text)
        assert (">expected<" in shown) == is_expected
        assert "stopped: &lt;i&gt;" in shown and "<i>&lt;u&gt;</i> x" in shown
    assert runs.read(name).seconds_left == 10.0
    assert runs.summarize(name, str) == "from-scratch/pretrain · stopped · Step 10/30 · Training loss 2.000"


STEP = {"step": 10, "loss": 2.0, "num_input_tokens_seen": 9, "training_seconds": 5.0, "max_steps": 30}
LINE = json.dumps(STEP).encode() + b"\n"
FILES = (RECORD_NAME, LOG_NAME, LOCK_NAME, launching.CHAT_NAME, OUTPUT_NAME, "trainer_state.json")
# Contents of a file of a run, by its name.
DAMAGED = [
    *({name: content} for name in FILES for content in (b"", b"\xff\xfe", b"[" * 99_999, b"null", b"[null, 1]", b"7")),
    *({RECORD_NAME: b'[{"command": 1, "directory": 2, "%s": %s}]' % pair} for pair in itertools.product(
        (b"arguments", b"samples", b"versions", b"data", b"loss_unit", b"unigram_loss", b"stopped", b"next_commands"),
        (b"7", b"[[]]", b'{"counts": 3}', b'[[1, "ab"], ["x", [["", ""]]]]', b'"\\ud800"'),
    )),
    *({LOG_NAME: LINE + line + b"\n" + LINE} for line in (
        *(b"null", b"[]", b"{", b'{"step": null}', b'{"step": 1e999}', b'{"loss": 1}', b'{"step": 20, "lo\xff": 3}'),
        *(b'{"step": 20, "%s": %s}' % pair for pair in itertools.product(
            (b"step", b"loss", b"num_input_tokens_seen", b"max_steps", b"training_seconds"),
            (b'"x"', b"{}", b"1" + b"0" * 400, b"1e308"),
        )),
    )),
    {"trainer_state.json": b'{"log_history": {"step": 3}}'},
    {"trainer_state.json": b'{"log_history": [7, null, {"step": "x"}]}'},
]  # fmt: skip


def make_damaged(out: Path) -> list[str]:
    """Write damaged runs beside a good one, and return their names."""
    for number, files in enumerate(DAMAGED):
        run = out / f"damaged-{number}"
        run.mkdir(parents=True)
        for name, content in ({RECORD_NAME: b"[{}]"} | files).items():
            (run / name).write_bytes(content)
    kinds = {"fifo": os.mkfifo, "directory": os.mkdir, "loop": lambda path: path.symlink_to(path.name)}
    kinds |= {
        "zeros": lambda path: path.symlink_to("/dev/zero"),
        "huge": lambda path: (path.touch(), os.truncate(path, 1 << 36)),
    }
    for name, (kind, make) in itertools.product(FILES, kinds.items()):
        run = out / f"{kind}-{name.strip('.')}"
        run.mkdir()
        (run / RECORD_NAME).write_bytes(b"[{}]")
        (run / name).unlink(missing_ok=True)
        make(run / name)
    # A name that is not UTF-8, a checkpoint without an end, and a link to the directory itself.
    os.mkdir(os.fsencode(out) + b"/\xff")
    (out / os.fsdecode(b"\xff") / RECORD_NAME).write_bytes(b"[{}]")
    (out / os.fsdecode(b"\xff") / LOG_NAME).write_bytes(LINE)
    (out / "damaged-0/checkpoint-3").symlink_to("checkpoint-3")
    (out / "damaged-1/self").symlink_to(out)
    record(out / "good", "x")
    (out / "good" / LOG_NAME).write_bytes(LINE)
    return os.listdir(out)


def test_a_damaged_run_hides_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = make_damaged(tmp_path / "out")
    found = runs.find_runs()
    assert "good" in found and len(found) > 100
    listed = dict((name, text) for text, name in board_page._choices(str))
    assert listed["good"] == "good · interrupted · Step 10/30 · Training loss 2.000"
    json.dumps([*listed.items()], ensure_ascii=False).encode()
    # Drawing all charts would take a minute.
    monkeypatch.setattr(runs, "draw_charts", lambda *_, **__: [])
    assert "cards" in board_page._refresh(str, "good", None)[3]
    for name in found:
        shown, log, link = runs.show(name, str), runs.read_output(name), board_page._link(name, str)
        assert "cards" in shown.encode().decode() and not link and isinstance(log, str)
    compared, left_out = read_runs(Path("out", name) for name in names)
    assert "out/good" in {run.name for run in compared} and len(compared) + len(left_out) == len(names)
    several = [run for run in compared if len(run.log) > 1 or "good" in run.name][:30]
    write_page([*several, *(run for run in compared if "�" in run.name)], tmp_path / "report.html")
    assert "out/good" in (tmp_path / "report.html").read_text()


def test_a_log_is_read_from_where_it_has_grown(tmp_path):
    """A launch that resumes writes the log anew."""
    record(tmp_path, "x")
    log = tmp_path / LOG_NAME

    def write(*steps: int, mode: str = "a", end: str = "\n") -> list[int]:
        with log.open(mode) as file:
            file.write("\n".join(json.dumps(STEP | {"step": step}) for step in steps) + end)
        return [entry["step"] for entry in read_run(tmp_path).log]

    assert write(*range(40)) == [*range(40)]
    # The beginning is not read again.
    with log.open("r+") as file:
        file.write("damaged")
    assert write(40) == [*range(41)]
    # The last line is not complete yet.
    assert write(41, end="") == [*range(41)] and write(end="\n") == [*range(42)]
    for steps in ([1, 2], [*range(60)], [3]):
        assert write(*steps, mode="w") == steps


def test_long_curves_are_thin_and_keep_their_extremes(monkeypatch):
    size = 20_000
    log = [STEP | {"step": step, "num_input_tokens_seen": step * 1000, "loss": 2.0} for step in range(1, size)]
    log[777]["loss"], log[7777]["loss"] = 9.25, 0.25
    calls, interpolate = [], np.interp
    monkeypatch.setattr(np, "interp", lambda *values: calls.append(1) or interpolate(*values))
    plotted, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, **how: plotted.append((x, y)) or plot(self, x, y, **how))
    assert len([*draw_charts([RunHistory("long", [], log)])]) == 2
    # One call for a curve: a call for each point makes the time quadratic.
    assert len(calls) < size / 100
    for x, y in plotted:
        assert len(x) == len(y) <= 1000 and (max(y), min(y), y[0], y[-1]) == (9.25, 0.25, 2.0, 2.0)
    assert (plotted[0][0][0], plotted[0][0][-1]) == (0.001, (size - 1) / 1000)
    # A short curve has all its points.
    plotted.clear()
    [*draw_charts([RunHistory("short", [], log[:300])])]
    assert {len(x) for x, _ in plotted} == {300}


def test_the_charts_of_a_run_that_trains_wait_and_the_rest_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = record(tmp_path / "out/mine", "x")
    (run / LOG_NAME).write_bytes(LINE)
    _, newest, seen, shown, _, _ = board_page._refresh(str, None, None)
    assert newest == "mine" and "svg" in shown
    with (run / LOG_NAME).open("ab") as file:
        file.write(LINE.replace(b"10", b"20"))
    os.utime(run / LOG_NAME, (1, 1))
    choices, _, waits, shown, log, _ = board_page._refresh(str, "mine", seen)
    assert shown == gr.skip() and waits == seen and "step 20" in log and "Step 20" in choices["choices"][0][0]
    # When the time has come, they are drawn.
    assert "svg" in board_page._refresh(str, "mine", (seen[0], 0.0))[3]
    # A change of the state is shown at once.
    (run / RECORD_NAME).write_text(json.dumps([{"stopped": "by me", "command": "x"}]))
    assert "by me" in board_page._refresh(str, "mine", seen)[3]


def test_the_link_to_a_chat_appears_when_it_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = record(tmp_path / "out/mine", "x") / launching.CHAT_NAME
    port = free_port()
    write_holder(place, os.getpid(), url=f"http://127.0.0.1:{port}")
    assert board_page._link("mine", str) == ""
    with socket.create_server(("127.0.0.1", port)):
        assert f'href="http://127.0.0.1:{port}"' in board_page._link("mine", str)
        address = f"127.0.0.1:{port}"
        for url in (
            "javascript:alert(1)",
            f'http://{address}"><script>',
            "http://127.0.0.1:99999",
            f"http://a:{port}",
        ):
            write_holder(place, os.getpid(), url=url)
            assert board_page._link("mine", str) == ""


def test_the_language_is_the_one_that_the_browser_prefers():
    for accepted, language in (("zh-CN,zh;q=0.9,en;q=0.8", "zh"), ("fr,en-US;q=0.8,zh;q=0.5", "en"), ("", "en")):
        assert preferred_language(accepted) == language

"""The runs below `out/`, as their files show them: find them, tell what they do, and show one as HTML."""

import shlex
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import hf_pretrain_cli

from ..data.formats import EXTENSIONS
from ..reports.page import Line, draw_charts, environment
from ..run_directory.directory import OUTPUT_NAME, RECORD_NAME, RunDirectory
from ..run_directory.history import RunHistory, read_run
from ..runtime.json_files import read_json
from ..runtime.texts import Translation
from ..runtime.writing import find_holder, find_reason
from .launching import overwrite_lines


OUT = Path("out")
_LOG_BYTES = 20_000
# Inches of a chart whose text can be read on a phone.
_SIZE = (4.2, 2.8)


def find_runs() -> list[str]:
    """Return the names of the runs below `out/`, newest first."""
    # `hf-pretrain from_scratch` puts its stages into one directory.
    patterns = (f"{depth}/{name}" for depth in ("*", "*/*") for name in (RECORD_NAME, OUTPUT_NAME))
    found = {path.parent for pattern in patterns for path in OUT.glob(pattern)}
    newest = sorted(found, key=lambda directory: max(stamp(directory)), reverse=True)
    names = [directory.relative_to(OUT).as_posix() for directory in newest]
    # A browser gets text in UTF-8, which some names of files are not.
    return [name for name in names if name.isprintable()]


def find_names(kind: str | None) -> list[str]:
    """Return names of a `model` or `dataset` that are there: runs, and files in at most one directory."""
    if kind == "model":
        models = (f"out/{name}" for name in find_runs() if any((OUT / name).glob("model*.safetensors")))
        return [*models, "embedded:smollm2"]
    if kind != "dataset":
        return []
    found = sorted(path for place in ("*", "*/*") for path in Path().glob(place) if path.suffix in EXTENSIONS)
    # Models and runs hold other files.
    data = [str(path) for path in found if not (path.parent / "config.json").exists() and path.parts[0] != OUT.name]
    return ["embedded", *(shlex.quote(name) for name in data[:100] if name.isprintable())]


def stamp(directory: Path) -> tuple[int, ...]:
    """Return times of changes. As long as they stay the same, the run shows the same."""
    run = RunDirectory(directory)
    paths = (run.record_file, run.log_file, run.output_file, run.lock_file)
    return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths)


def read(name: str) -> RunHistory:
    """Read a run, unless it has not changed since the last time."""
    return _read(OUT / name, stamp(OUT / name)[:2])


@lru_cache(1024)
def _read(directory: Path, times: tuple[int, ...]) -> RunHistory:
    return read_run(directory)


def state_of(name: str) -> str:
    """Return what a run does: a key of the texts."""
    directory, launch = RunDirectory(OUT / name), read(name).last_launch
    if find_holder(directory.lock_file) is not None:
        return "running" if directory.log_file.is_file() else "starting"
    return next(
        (state for key, state in (("ended", "finished"), ("stopped", "stopped")) if key in launch), "interrupted"
    )


def summarize(name: str, t: Translation) -> str:
    """Return a line for the list of runs."""
    run = read(name)
    steps = f"{run.last('step') or 0:,}" + (f"/{total:,}" if (total := _total(name, run)) else "")
    losses = (("Validation loss", run.last("eval_loss")), ("Training loss", run.last("loss")))
    loss = [f"{t(label)} {value:.3f}" for label, value in losses if value][:1]
    figures = [f"{t('Step')} {steps}", *loss]
    return " · ".join([name, t(state_of(name)), *(figures if run.log else [])])


def _total(name: str, run: RunHistory) -> int | None:
    """Return the number of steps of a whole run. The state at its end does not repeat it in each entry."""
    return run.last("step") if state_of(name) == "finished" else run.last("max_steps")


def show(name: str, t: Translation) -> str:
    """Return the figures, curves and samples of a run as HTML."""
    run = read(name)
    charts = [*draw_charts([run], expected=_expected(run), size=_SIZE, t=t)]
    template = environment.get_template("board/run.html.jinja")
    text = template.render(run=run, figures=_figures(name, run, t), charts=charts, t=t)
    # A sample may hold half of a surrogate pair, which UTF-8 cannot write.
    return text.encode(errors="replace").decode()


def _figures(name: str, run: RunHistory, t: Translation) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of the newest figures."""
    state = state_of(name)
    why = run.last_launch.get("stopped") if state == "stopped" else None
    if state == "interrupted":
        why = find_reason(RunDirectory(OUT / name).lock_file)
    yield f"out/{name}", t(state) + (f": {why}" if why else "")
    if step := run.last("step"):
        yield t("Step"), f"{step:,} / {_total(name, run) or '?'}"
    if state == "running" and run.seconds_left is not None:
        yield t("Time left"), str(timedelta(seconds=round(run.seconds_left)))
    for label, key, form in (
        ("Training loss", "loss", "{:.4f}"),
        ("Validation loss", "eval_loss", "{:.4f}"),
        ("Speed", "tokens_per_second", "{:,.0f} tokens/s"),
        ("Memory", "peak_memory_gib", "{:.2f} GiB"),
    ):
        if (value := run.last(key)) is not None:
            yield t(label), form.format(value)


def _expected(run: RunHistory) -> list[Line]:
    """Return the recorded loss of a run with the same arguments, if its preset has one (`benchmarks/expected.py`)."""
    config = Path(str(run.arguments.get("config") or ""))
    path = hf_pretrain_cli.RECIPES / config.parent.name / "expected.json"
    recorded = read_json(path).get(config.stem, {}) if path.is_file() else {}
    if not recorded or any(run.arguments.get(name) != value for name, value in recorded["arguments"].items()):
        return []
    tokens, losses = zip(*recorded["curves"]["loss"], strict=True)
    return [("expected", [each / 1e6 for each in tokens], losses, {"color": "#6b7280", "linestyle": "--"})]


def read_output(name: str) -> str:
    """Return the end of what a run has printed, or of its log if it was started in a terminal."""
    path = RunDirectory(OUT / name).output_file
    if not path.is_file():
        entries = read(name).log[-100:]
        keys = ("loss", "eval_loss", "reward", "tokens_per_second", "peak_memory_gib")
        return "\n".join(
            f"step {entry['step']}: " + ", ".join(f"{key} {entry[key]:.4g}" for key in keys if key in entry)
            for entry in entries
        )
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        return overwrite_lines(file.read().decode(errors="replace"))

"""The page of the board in one language: gradio's components, and what happens when one is used."""

import re
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from itertools import count
from pathlib import Path
from typing import Any

import hf_pretrain_cli

from ..model.presets import PRESETS
from ..runtime.errors import needing_extra
from ..runtime.json_files import read_json
from ..runtime.texts import LANGUAGES, Translation, translation
from ..runtime.writing import find_holder, read_holder
from ..weights.exporting import EXPORT_FORMATS
from ..weights.gguf import GGUF_TYPES
from . import launching, runs
from .launching import GROUPS, answers, find_defaults, make_words, run_command
from .runs import OUT


with needing_extra("web", "The board needs gradio"):
    import gradio as gr

_SECONDS = 2.0
CSS = Path(__file__).with_name("board.css").read_text(encoding="utf-8")


def make_page(language: str, flags: dict[str, Any]) -> gr.Blocks:
    """
    Return the page in a language.

    Args:
        language (`str`): a key of `LANGUAGES`.
        flags (`dict`): the result of [`~board.launching.read_flags`].
    """
    t = translation(language)
    with gr.Blocks(title="hf_pretrain board", analytics_enabled=False) as page:
        others = " · ".join(f'<a href="/{key}/">{name}</a>' for key, name in LANGUAGES.items() if key != language)
        gr.HTML(f"<h2>{t('Training board')}</h2>{others}")
        with gr.Tabs() as tabs:
            with gr.Tab(t("Runs"), id="runs"):
                chosen = _add_runs(page, gr.Timer(_SECONDS), t)
            with gr.Tab(t("New run")) as tab:
                _add_form([page.load, tab.select], tabs, chosen, _Form(flags, language, t))
            with gr.Tab(t("Compare")) as tab:
                _add_comparison(tab, language, t)
    return page.queue(default_concurrency_limit=None)


def _choices(t: Translation) -> list[tuple[str, str]]:
    return [(runs.summarize(name, t), name) for name in runs.find_runs()]


def _check_chosen(name: str | None, t: Translation) -> str:
    if name not in runs.find_runs():
        raise gr.Error(t("Choose a run first."), print_exception=False)
    return name


def _act(t: Translation, action: Callable[[Path], None], done: str, name: str | None) -> None:
    """Do something with the chosen run, and say what was done."""
    with _shown_errors(t):
        action(OUT / _check_chosen(name, t))
    if done:
        gr.Info(t(done))


@contextmanager
def _shown_errors(t: Translation) -> Iterator[None]:
    """Show mistakes of the user on the page."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise gr.Error(t(str(error)), print_exception=False) from error


def _add_runs(page: gr.Blocks, timer: gr.Timer, t: Translation) -> gr.Radio:
    # The browser keeps its choice while the board starts again, so the choices must be known from the beginning.
    chosen = gr.Radio(_choices(t), label=t("Runs"), elem_id="runs")
    shown, newest = gr.State(), gr.Textbox(visible="hidden")
    with gr.Row():
        stop = gr.Button(t("Stop"), variant="stop", elem_id="stop", min_width=120)
        resume = gr.Button(t("Resume"), elem_id="resume", min_width=120)
        chat = gr.Button(t("Chat"), elem_id="chat", min_width=120)
        end_chat = gr.Button(t("End chat"), elem_id="end-chat", min_width=120)
    link, view = gr.HTML(elem_id="link"), gr.HTML(elem_id="view")
    log = gr.Textbox(label=t("Log"), lines=12, max_lines=12, interactive=False, elem_id="log")
    with gr.Accordion(t("Evaluate"), open=False, elem_id="evaluation"):
        with gr.Row():
            tasks = gr.Textbox(label=t("Tasks"), placeholder="minimind,small,tool_call", min_width=200)
            data = gr.Textbox(label=t("Validation data"), placeholder=f"{t('default')}: embedded", min_width=200)
            more = gr.Textbox(label=t("More flags"), placeholder="--limit 100", min_width=200)
        evaluate = gr.Button(t("Evaluate"), elem_id="evaluate")
        results = gr.Textbox(label=t("Output"), lines=8, interactive=False, elem_id="evaluation-output")
    with gr.Accordion(t("Export and push"), open=False, elem_id="export"):
        with gr.Row():
            form = gr.Dropdown(list(EXPORT_FORMATS), value="llama", label=t("Format"), min_width=200)
            dtype = gr.Dropdown(
                [(t("as in the run"), ""), *GGUF_TYPES], value="", label=t("Type of the weights"), min_width=200
            )
            repository = gr.Textbox(label=t("Repository on the Hub, to push the export"), min_width=240)
        export = gr.Button(t("Export"), elem_id="export-run")
        output = gr.Textbox(label=t("Output"), lines=4, interactive=False, elem_id="export-output")

    # matplotlib draws one chart at a time.
    options: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 1, "concurrency_id": "refresh"}
    options |= {"trigger_mode": "always_last"}
    changing = [chosen, newest, shown, view, log, link]
    refreshed = gr.on(
        [timer.tick, page.load, chosen.input], partial(_refresh, t), [chosen, shown], changing, **options
    )
    # The user may choose while the board answers, so the browser decides whether there is a choice.
    keep = "(chosen, newest) => chosen || newest || null"
    refreshed.then(None, [chosen, newest], chosen, js=keep, show_progress="hidden")
    stop.click(partial(_act, t, launching.stop, "Stops after this step, with a checkpoint."), chosen)
    resume.click(partial(_act, t, launching.resume_run, "Resumes from the newest checkpoint."), chosen)
    chat.click(partial(_act, t, launching.start_chat, "The chat page is loading the model."), chosen)
    end_chat.click(partial(_act, t, partial(launching.stop, holder=launching.CHAT_NAME), ""), chosen)

    evaluate.click(partial(_show_output, t, launching.evaluation_words), [chosen, tasks, data, more], results)
    export.click(partial(_show_output, t, launching.export_words), [chosen, form, dtype, repository], output)
    return chosen


def _refresh(t: Translation, name: str | None, seen: Any) -> list[Any]:
    """Return the list of runs, the newest one, the state of the session, the view, the log and the link of now."""
    found = runs.find_runs()
    newest = next(iter(found), None)
    shown = name if name in found else newest
    first = [gr.update(choices=_choices(t)), newest]
    if shown is None:
        return [*first, None, t("There is no run in out/ yet. Start one in the tab “New run”."), "", ""]
    last = [runs.read_output(shown), _link(shown, t)]
    # Nothing moves while nothing changes, so that a reader keeps what is open. The charts of a run that trains take a
    # twentieth of the time at most: it needs the cores.
    now, started = (shown, runs.state_of(shown), runs.stamp(OUT / shown)[:2]), time.monotonic()
    if seen is not None and (seen[0] == now or (seen[0][:2] == now[:2] and started < seen[1])):
        return [*first, seen, gr.skip(), *last]
    view = runs.show(shown, t)
    return [*first, (now, started + 20 * (time.monotonic() - started)), view, *last]


async def _show_output(
    t: Translation, make_words: Callable[..., list[str]], name: str | None, *values: str
) -> AsyncIterator[str]:
    """Run a command on the chosen run, and yield the command and its output while it grows."""
    with _shown_errors(t):
        words = make_words(OUT / _check_chosen(name, t), *values)
    async for text in run_command(*words):
        yield f"$ {shlex.join(['hf-pretrain', *words])}\n{text}"


def _link(name: str, t: Translation) -> str:
    """Return a link to the chat with a run, while a server has its model."""
    place = OUT / name / launching.CHAT_NAME
    if find_holder(place) is None:
        return ""
    url = str(read_holder(place).get("url"))
    # Others can write the file. The server opens the port of the page when the model is loaded.
    return f'<a href="{url}" target="_blank" rel="noopener">{t("Open the chat")}</a>' if answers(url) else ""


def _make_field(name: str, flag: dict[str, Any], t: Translation, info: str) -> gr.Dropdown | gr.Textbox:
    """Return the field of a flag. If it is empty, the flag is left out."""
    label = t(flag["form"].partition(": ")[2])
    about: dict[str, Any] = {"label": label, "info": info, "elem_id": f"flag-{name}", "min_width": 280}
    if _words(flag["action"]) or "names" in flag:
        # Its first choice is the default.
        return gr.Dropdown([""], value="", allow_custom_value="names" in flag, **about)
    return gr.Textbox(**about)


def _words(action: Any) -> list[str]:
    """Return the words that a flag takes; an empty list if it takes any."""
    # The parser reads a switch as text, and `true` stands for a switch without a value.
    return [str(word) for word in action.choices or (("true", "false") if action.nargs == "?" else ())]


def _add_form(opened: list[Any], tabs: gr.Tabs, chosen: gr.Radio, handlers: "_Form") -> None:
    t = handlers.t
    # While the board answers, the last change waits. By default, gradio would drop it.
    quiet: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
    with gr.Row():
        stage = gr.Dropdown(list(handlers.flags), value="pretrain", label=t("Stage"), elem_id="stage", min_width=200)
        presets: list[Any] = ["auto", *PRESETS, (t("none"), "")]
        preset = gr.Dropdown(presets, value="auto", label=t("Preset"), elem_id="preset", min_width=200)
        name = gr.Textbox("", label=t("Name"), info=t("Directory below out/"), elem_id="name", min_width=200)
        earlier = gr.Dropdown([], label=t("Fill in from a run"), elem_id="earlier", min_width=200)
    fields: list[Any] = []
    for number, group in enumerate(GROUPS):
        with gr.Accordion(t(group), open=number == 0, elem_id=f"group-{number}"), gr.Row():
            flags = {name: flag for name, flag in handlers.fields.items() if flag["form"].startswith(group)}
            fields += [_make_field(name, flag, t, handlers.help(name, flag)) for name, flag in flags.items()]
    more = gr.Textbox(label=t("More flags"), placeholder="--warmup_steps 0.1", elem_id="more")
    command = gr.Textbox(label=t("Command to copy"), lines=2, buttons=["copy"], interactive=False, elem_id="command")
    with gr.Row():
        preview = gr.Button(t("Show the data"), elem_id="show-data", min_width=120)
        plan = gr.Button(t("Make the plan"), elem_id="make-plan", min_width=120)
        start = gr.Button(t("Start"), variant="primary", elem_id="start", min_width=120)
    rows = gr.HTML(elem_id="data")
    info = t("A few steps are measured, and nothing is written.")
    planned = gr.Textbox(label=t("Plan"), info=info, lines=8, interactive=False, elem_id="plan")
    proposed, last = gr.Textbox(visible="hidden"), gr.Textbox(visible="hidden")
    everything: list[Any] = [stage, preset, name, more, *fields]
    shown = [proposed, earlier, *fields]
    changed = gr.on([*opened, stage.change, preset.change], handlers.choose, [stage, preset], shown, **quiet)
    # The user may type a name while the board answers, so the browser decides whether there is one.
    keep = "(name, proposed, last) => name && name !== last ? [name, last] : [proposed, proposed]"
    named = changed.then(None, [name, proposed, last], [name, last], js=keep, **quiet)
    named.then(handlers.show_command, everything, command, **quiet)
    earlier.input(handlers.fill, earlier, [stage, preset, more, *fields], **quiet)
    gr.on([each.change for each in everything], handlers.show_command, everything, command, **quiet)
    preview.click(handlers.show_data, everything, rows)
    plan.click(handlers.make_plan, everything, planned)
    start.click(handlers.start, everything, [chosen, tabs])


class _Form:
    """
    The handlers of the form.

    Args:
        flags (`dict`): the flags of each stage.
        language (`str`): a key of `LANGUAGES`.
        t (`Callable`): translates texts.
    """

    def __init__(self, flags: dict[str, Any], language: str, t: Translation):
        self.flags, self.language, self.t = flags, language, t
        self.chinese = read_json(hf_pretrain_cli.RECIPES / "chinese.json") if language == "zh" else {}
        fields = {name: flag for stage in flags.values() for name, flag in stage.items()}
        # In the order of the form.
        self.fields = dict(sorted(fields.items(), key=lambda each: GROUPS.index(each[1]["form"].split(": ")[0])))

    def choose(self, stage: str, preset: str) -> list[Any]:
        """Show the flags of a stage with the defaults of a preset, propose a name that is free, and list the runs."""
        defaults = find_defaults(stage, preset)
        base = Path(str(defaults.get("output_dir", stage))).name
        names = (base if number == 1 else f"{base}-{number}" for number in count(1))
        free = next(each for each in names if not (OUT / each).exists())
        fields = (self._update(name, self.flags[stage].get(name), defaults) for name in self.fields)
        return [free, gr.update(choices=runs.find_runs()), *fields]

    def help(self, name: str, flag: dict[str, Any]) -> str:
        """Return the text beside the field of a flag, which differs between the stages."""
        # gradio takes two asterisks for emphasis, and knows no way to escape them. This letter looks alike.
        info = self.chinese.get(name) or (flag["action"].help or "").replace("%%", "%")
        return f"{info.replace('*', '∗')} `--{name}`"

    def _update(self, name: str, flag: dict[str, Any] | None, defaults: dict[str, Any]) -> Any:
        if flag is None:
            return gr.update(visible=False, value="")
        value = defaults.get(name, flag["action"].default)
        text = " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        text = text and f"{self.t('default')}: {text}"
        shown: dict[str, Any] = {"visible": True, "info": self.help(name, flag)}
        if words := runs.find_names(flag.get("names")) or _words(flag["action"]):
            return gr.update(choices=[(text, ""), *((word, word) for word in words)], **shown)
        return gr.update(placeholder=text, **shown)

    def fill(self, name: str) -> list[Any]:
        """Return the stage, the preset, more flags and the fields of an earlier run."""
        with _shown_errors(self.t):
            stage, *words = launching.recorded_words(OUT / _check_chosen(name, self.t))
        preset, values, more = launching.read_words(self.flags[stage], words)
        return [stage, preset, more, *(values.get(name, "") for name in self.fields)]

    def _read(self, stage: str, preset: str, name: str, more: str, *values: str) -> list[str]:
        with _shown_errors(self.t):
            named = dict(zip(self.fields, values, strict=True))
            return make_words(self.flags[stage], stage, preset, name, named, more)

    def show_command(self, *values: str) -> str:
        """Return the command."""
        try:
            return shlex.join(["hf-pretrain", *self._read(*values)])
        except gr.Error as error:
            return error.message

    async def show_data(self, *values: str) -> AsyncIterator[str]:
        """Show the first rows of the training data, with the trained tokens in colour."""
        async for text in run_command(*self._read(*values), "--preview", "5", language=self.language):
            marked = re.sub("\033\\[3(.)m", r'<mark class="color-\1">', escape(text)).replace("\033[0m", "</mark>")
            legend = self.t("Marked tokens are trained.") if marked != escape(text) else ""
            yield f"{legend}<pre>{marked}</pre>"

    async def make_plan(self, *values: str) -> AsyncIterator[str]:
        """Show the output of a dry run while it grows."""
        async for text in run_command(*self._read(*values), "--dry_run", language=self.language):
            yield text

    def start(self, *values: str) -> list[Any]:
        """Start the run, and show it."""
        with _shown_errors(self.t):
            launching.start_run(words := self._read(*values))
        return [gr.update(choices=_choices(self.t), value=Path(words[-1]).name), gr.Tabs(selected="runs")]


def _add_comparison(tab: gr.Tab, language: str, t: Translation) -> None:
    names = gr.CheckboxGroup(runs.find_runs(), label=t("Runs to compare"), elem_id="compared")
    compare = gr.Button(t("Show the report"), elem_id="compare")
    report = gr.HTML(elem_id="report")

    async def write_report(names: list[str]) -> str:
        if not names:
            raise gr.Error(t("Choose a run first."), print_exception=False)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "report.html")
            words = ["compare", *(str(OUT / name) for name in names), "--language", language, "--output", str(path)]
            printed = [text async for text in run_command(*words)]
            if not path.is_file():
                return f"<pre>{escape(printed[-1])}</pre>"
            # The page of a run has no scripts, and no rights here.
            return f'<iframe sandbox srcdoc="{escape(path.read_text(encoding="utf-8"))}"></iframe>'

    tab.select(lambda: gr.CheckboxGroup(choices=runs.find_runs()), None, names, show_progress="hidden")
    compare.click(write_report, names, report)

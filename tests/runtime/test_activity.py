"""A run whose output is no terminal is never silent for long."""

import time

from hf_pretrain.runtime import activity as activity_module
from hf_pretrain.runtime.activity import Activity


def test_a_line_appears_after_each_silence(monkeypatch):
    monkeypatch.setattr(activity_module, "shows_bars", lambda: False)
    activity, lines = Activity(), []
    activity.begin("step 3/10")
    activity.start(lines.append, seconds=0.2)
    # As long as something is printed, there is no line.
    for _ in range(10):
        time.sleep(0.05)
        activity.note_output()
    assert lines == []
    time.sleep(0.9)
    activity.stop()
    assert 2 <= len(lines) <= 5 and set(lines) <= {"step 3/10, 0 s", "step 3/10, 1 s"}
    number = len(lines)
    time.sleep(0.5)
    assert len(lines) == number


def test_progress_bars_need_no_lines(monkeypatch):
    monkeypatch.setattr(activity_module, "shows_bars", lambda: True)
    activity, lines = Activity(), []
    activity.start(lines.append, seconds=0.05)
    time.sleep(0.3)
    assert lines == []

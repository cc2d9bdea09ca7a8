"""The kept text of `--help` is printed while nothing has changed, and never afterwards."""

import ast
import os
import re
import subprocess
import sys
import time
from types import ModuleType

import pytest

from hf_pretrain.runtime import help_cache
from hf_pretrain.runtime.help_cache import keep_help, print_kept_help
from tests.invariants.launching import ROOT, process_options


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Keep the help of a script that has imported a module, and return its path."""
    script, module = tmp_path / "script.py", ModuleType("module_of_the_script")
    module.__file__ = str(tmp_path / "module.py")
    for path in (script, tmp_path / "module.py"):
        path.write_text("first")
        os.utime(path, (1, 1))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(help_cache, "HF_HOME", str(tmp_path))
    # Other tests of this process have imported modules that they wrote.
    monkeypatch.setattr(help_cache, "_START", time.time_ns())
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    keep_help("usage: script\n")
    return script


def test_the_text_is_kept(script, capsys):
    with pytest.raises(SystemExit) as ended:
        print_kept_help()
    assert not ended.value.code and capsys.readouterr().out == "usage: script\n"


@pytest.mark.parametrize("change", ["script", "module", "gone", "width", "name", "words", "no help", "damaged"])
def test_a_change_makes_the_text_invalid(script, change, capsys, monkeypatch):
    if change in ("script", "module"):
        script.with_name(f"{change}.py").write_text("other")
    elif change == "gone":
        script.with_name("module.py").unlink()
    elif change == "width":
        monkeypatch.setenv("COLUMNS", "61")
    elif change == "name":
        monkeypatch.setenv("HF_PRETRAIN_PROGRAM", "hf-pretrain script")
    elif change in ("words", "no help"):
        monkeypatch.setattr(sys, "argv", [str(script), *(["--stage", "--help"] if change == "words" else ["--stage"])])
    else:
        next(script.parent.glob("hf_pretrain/help/*")).write_text("{")
    print_kept_help()
    assert not capsys.readouterr().out


def test_code_without_a_file_is_not_kept(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c", "--help"])
    keep_help("usage: other\n")
    assert len(list(script.parent.glob("hf_pretrain/help/*"))) == 1


def test_a_change_while_the_script_runs_is_not_kept(script):
    script.with_name("module.py").write_text("other")
    for path in script.parent.glob("hf_pretrain/help/*"):
        path.unlink()
    keep_help("usage: script\n")
    assert not list(script.parent.glob("hf_pretrain/help/*"))


def test_every_recipe_imports_the_package_first():
    """An import of torch before the package would take seconds, although the package has the text."""
    for path in (ROOT / "recipes").glob("*.py"):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in statement.names]
                package = (statement.module if isinstance(statement, ast.ImportFrom) else names[0]).partition(".")[0]
                if package == "hf_pretrain":
                    break
                assert package in sys.stdlib_module_names, path.name
        else:
            pytest.fail(f"{path.name} does not import the package.")


@pytest.mark.slow
def test_the_second_help_of_a_recipe_is_equal_and_imports_no_torch(tmp_path):
    words = [sys.executable, "-X", "importtime", "recipes/pretrain.py", "--help"]
    options = process_options(HF_HOME=str(tmp_path)) | {"stderr": subprocess.PIPE}
    first, second = (subprocess.run(words, **options) for _ in range(2))
    assert first.returncode == second.returncode == 0 and "--learning_rate" in first.stdout
    assert first.stdout == second.stdout
    assert [re.search(r"\| +torch\n", run.stderr) is not None for run in (first, second)] == [True, False]

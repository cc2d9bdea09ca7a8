"""The command that installs an extra, in a checkout and without one."""

import re
import sys
import tomllib

from hf_pretrain.runtime import errors
from hf_pretrain.runtime.errors import install_command
from tests.invariants.launching import ROOT


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_hint_names_an_extra():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "hf_pretrain").rglob("*.py")]
    extras = {
        extra
        for source in sources
        for extra in re.findall(r"(?:install_command|needing_extra)\(['\"](\w+)['\"]", source)
    }
    assert "trl" in extras and extras <= EXTRAS.keys()


def test_a_printed_program_is_one_that_the_shell_of_the_user_finds(monkeypatch, tmp_path):
    environment = tmp_path / ".venv/bin"
    environment.mkdir(parents=True)
    for name in ("python", "hf-pretrain"):
        (environment / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert errors.find_program("hf-pretrain") == str(environment / "hf-pretrain")
    monkeypatch.chdir(tmp_path)
    assert errors.find_program("hf-pretrain") == ".venv/bin/hf-pretrain"
    # `pip install --user` puts no program beside Python.
    assert errors.find_program("pip") == "pip"
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert errors.find_program("hf-pretrain") == "hf-pretrain"


def test_a_checkout_is_installed_from_its_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert install_command("trl") == f"pip install -e '{ROOT}[trl]'"
    monkeypatch.setattr(errors, "_ROOT", tmp_path)
    assert install_command("trl") == "pip install 'hf_pretrain[trl]'"

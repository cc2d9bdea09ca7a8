"""The command that installs an extra, in a checkout and without one."""

import re
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


def test_a_checkout_is_installed_from_its_directory(monkeypatch, tmp_path):
    assert install_command("trl") == f"pip install -e '{ROOT}[trl]'"
    monkeypatch.setattr(errors, "_ROOT", tmp_path)
    assert install_command("trl") == "pip install 'hf_pretrain[trl]'"

"""The command that installs an extra, in real installations of this checkout and of its wheel."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from hf_pretrain.runtime import installation
from hf_pretrain.runtime.installation import install_command
from tests.invariants.launching import ROOT, cpu_environment


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_hint_names_an_extra_and_none_is_written_by_hand():
    sources = [
        path.read_text(encoding="utf-8") for part in ("hf_pretrain", "recipes") for path in (ROOT / part).rglob("*.py")
    ]
    extras = {extra for source in sources for extra in re.findall(r"install_command\(['\"](\w+)['\"]\)", source)}
    assert {"trl", "data", "gguf", "zstd"} <= extras <= EXTRAS.keys()
    assert not [source for source in sources if re.search(r"pip install[^\n]{0,4}hf_pretrain", source)]


@pytest.mark.parametrize(
    ("recorded", "command"),
    [
        (None, "pip install 'hf_pretrain[trl]'"),
        ('{"url": "file:///my%20code", "dir_info": {"editable": true}}', "pip install -e '/my code[trl]'"),
        ('{"url": "file:///my/code", "dir_info": {}}', "pip install '/my/code[trl]'"),
        ('{"url": "https://a.b/c.whl", "archive_info": {}}', "pip install 'hf_pretrain[trl] @ https://a.b/c.whl'"),
        (
            '{"url": "https://a.b/c", "vcs_info": {"vcs": "git", "commit_id": "0af"}}',
            "pip install 'hf_pretrain[trl] @ git+https://a.b/c@0af'",
        ),
    ],
)
def test_the_origin_that_pip_records_decides(recorded, command, tmp_path, monkeypatch):
    # The layout of an installed package on the path: https://packaging.python.org/en/latest/specifications/
    metadata = tmp_path / "hf_pretrain-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hf_pretrain\nVersion: 9\n")
    if recorded is not None:
        (metadata / "direct_url.json").write_text(recorded)
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("trl") == command


def test_a_checkout_that_nobody_installed(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert install_command("trl") == f"pip install -e '{Path(installation.__file__).parents[2]}[trl]'"


def run(*words: str, **environment: str) -> str:
    """Run a command in an environment without the checkout on its path, and return what it prints."""
    # Install only this package, and download nothing.
    settings = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PYTHONPATH": "", **environment}
    result = subprocess.run(
        words, cwd="/", env=cpu_environment(**settings), stdout=subprocess.PIPE, text=True, check=True
    )
    return result.stdout.strip()


def test_the_installation_of_this_environment():
    # `make test` installs the checkout in editable mode. pip itself says from where.
    found = json.loads(run(sys.executable, "-m", "pip", "list", "--format", "json"))
    (package,) = [package for package in found if package["name"].replace("-", "_") == "hf_pretrain"]
    command = install_command("trl")
    if "editable_project_location" in package:
        assert command == f"pip install -e '{package['editable_project_location']}[trl]'"
    else:
        assert "-e" not in shlex.split(command)


@pytest.mark.slow
def test_the_command_is_right_for_a_wheel_and_for_an_index(tmp_path):
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "--no-build-isolation", "-w", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    # A directory stands for the index.
    expected = {
        str(wheel): f"pip install 'hf_pretrain[trl] @ {wheel.as_uri()}'",
        "hf_pretrain": "pip install 'hf_pretrain[trl]'",
    }
    code = "from hf_pretrain.runtime.installation import install_command; print(install_command('trl'))"
    for number, (source, command) in enumerate(expected.items()):
        venv.create(tmp_path / f"venv{number}", symlinks=True)
        python = str(tmp_path / f"venv{number}/bin/python")
        run(*pip, "--python", python, "install", source, PIP_FIND_LINKS=str(tmp_path))
        packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        # The environment of the tests supplies the dependencies.
        (packages / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
        assert run(python, "-c", code) == command
        # The shell and pip understand the command.
        run(*pip, "--python", python, *shlex.split(command)[1:], "--dry-run", PIP_FIND_LINKS=str(tmp_path))

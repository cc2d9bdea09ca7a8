"""
Write checkpoints and models completely or not at all.

All files go into `.saving/` inside the output directory (`runtime/writing.py`). The main process flushes them to the
disk and only then renames them. A checkpoint also gets a manifest (`manifest.py`), and is read back and compared after
the rename.
"""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import wait_for_everyone
from huggingface_hub.constants import REPOCARD_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import CONFIG_NAME

from ..loading.adapters import base_model_of, is_adapted
from ..runtime.ranks import on_main_process
from ..runtime.writing import ASIDE, moved_when_whole, refused_write
from ..tokenizer.pretrained import save_tokenizer
from .directory import set_aside, summarize
from .manifest import find_damage, write_manifest


def checkpoint_bytes(model: nn.Module, args: TrainingArguments) -> int:
    """Estimate the size of a checkpoint of `model` in bytes."""
    # 4 bytes per saved weight, and 8 for the two moments of AdamW.
    num_saved = get_model_param_count(model, trainable_only=is_adapted(model))
    trainable = 0 if args.save_only_model else get_model_param_count(model, trainable_only=True)
    return 4 * num_saved + 8 * trainable


def write_model(
    directory: str, model: PreTrainedModel, tokenizer: Any, state_dict: dict[str, Any] | None, *, is_writer: bool
) -> None:
    """
    Write weights, config, code and tokenizer. Write no pickled arguments: they may hold a Hub token.

    With a sharded model, all ranks must call this function.
    """
    model.save_pretrained(directory, state_dict=state_dict, is_main_process=is_writer)
    if is_writer and is_adapted(model):
        # peft writes a model card whose fields are all blank. The trainer writes the real one.
        Path(directory, REPOCARD_NAME).unlink()
        # peft writes only the adapter. The run may have changed how the model generates, such as into a chat model.
        if (generation := base_model_of(model).generation_config) is not None:
            generation.save_pretrained(directory)
    if is_writer and tokenizer is not None:
        save_tokenizer(tokenizer, directory)


def cast_files(directory: Path, dtype: str) -> None:
    """Round the weights of a written model to a torch dtype such as `float16`, and name it in the config."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        # Loaded from bytes, because `load_file` maps the file that is written here.
        weights = {name: tensor.to(vars(torch)[dtype]) for name, tensor in load(path.read_bytes()).items()}
        save_file(weights, path, metadata=metadata)
    # An adapter has no config of a model.
    for path in directory.glob(CONFIG_NAME):
        content = json.loads(path.read_text(encoding="utf-8")) | {"dtype": dtype}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class CheckpointWriter:
    """
    Give files their final names once all of them are on the disk.

    Args:
        args ([`~transformers.TrainingArguments`]): where the run saves, how often, and which ranks write files.
        checkpoint_bytes (`Callable`): returns an estimate of a checkpoint's size in bytes.

    Attributes:
        directory (`Path`, *optional*): the directory that the current save writes into; `None` between saves.
    """

    def __init__(self, args: TrainingArguments, checkpoint_bytes: Callable[[], int]):
        self.args = args
        self.checkpoint_bytes = checkpoint_bytes
        self.directory: Path | None = None

    def writing_checkpoint(self, target: Path, run: dict[str, Any]) -> AbstractContextManager[Path]:
        """
        Return a block that gets a directory to write a checkpoint into. After the block, write its manifest, rename it
        to `target` and read it back. All ranks must enter the block.

        Args:
            target (`Path`): `checkpoint-N`. An existing one, of a run that resumed from an older one, is replaced.
            run (`dict`): the description of the run for the manifest.

        Raises:
            `OSError`: if the disk refuses to write, or if the files read back differ. They are then renamed to
                `damaged-checkpoint-N`.
        """
        return self._writing(target, run)

    def writing_model(self, target: Path) -> AbstractContextManager[Path]:
        """
        Return a block that gets a directory to write a model into. After the block, move its files into the directory
        `target`. All ranks must enter the block.
        """
        return self._writing(target / CONFIG_NAME)

    @contextmanager
    def _writing(self, target: Path, run: dict[str, Any] | None = None) -> Iterator[Path]:
        """Write a checkpoint, or without `run` the directory of the file `target`."""
        with self.explaining_full_disks(target), ExitStack() as main:

            def begin() -> Path:
                scratch = main.enter_context(moved_when_whole(target.parent, ASIDE))
                source = scratch if run is None else scratch / target.name
                source.mkdir(exist_ok=True)
                return source

            def publish() -> None:
                if run is not None:
                    write_manifest(source, run)
                main.close()
                # Some file systems report a successful write of data that they then lose.
                if run is not None and (damage := find_damage(target)):
                    message = f"the files written to {set_aside(target)} read back differently: {summarize(damage)}"
                    raise OSError(errno.EIO, message)

            source = on_main_process(self.args, begin)
            self.directory = target.parent / ASIDE
            try:
                yield source
            finally:
                self.directory = None
            # Every rank must have written its shards before one of them renames the directory.
            if self.args.world_size > 1:
                wait_for_everyone()
            on_main_process(self.args, publish)

    def check_space(self) -> None:
        """Raise `OSError` if a checkpoint does not fit on the disk."""
        if self.args.save_strategy == "no":
            return
        output_dir = Path(self.args.output_dir)
        # `disk_usage` needs an existing directory.
        output_dir.mkdir(parents=True, exist_ok=True)
        with self.explaining_full_disks(output_dir / "the first checkpoint"):
            if shutil.disk_usage(output_dir).free < self.checkpoint_bytes():
                raise OSError(errno.ENOSPC, "the disk is too small")

    @contextmanager
    def explaining_full_disks(self, target: Path) -> Iterator[None]:
        """Raise an `OSError` that says what to do if the disk refuses to write `target`. Earlier checkpoints stay."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            if not refused_write(error):
                raise
            free = shutil.disk_usage(target.parent).free
            checkpoints = sort_checkpoints(str(target.parent))
            raise OSError(
                f"{target} could not be saved: {error}. A checkpoint takes about "
                f"{self.checkpoint_bytes() / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB were free. "
                + (
                    f"{checkpoints[-1]} is intact: make room and resume with `--resume_from_checkpoint auto`"
                    if checkpoints
                    else ""
                )
            ) from error

"""The checkpoints of an output directory: find the newest, verify, rotate and set aside."""

from pathlib import Path

from transformers import trainer_utils
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import logging

from ..runtime.errors import UserError
from ..runtime.json_files import read_json
from .manifest import MANIFEST_NAME, find_damage


logger = logging.get_logger(__name__)

_REWARD_MODEL = "MiniMindForSequenceClassification"


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")


def newest_checkpoint(output_dir: str | Path, *, unverified: bool = False) -> str | None:
    """
    Return the newest intact checkpoint in `output_dir`, or `None`. Rename newer ones that are damaged.

    Args:
        unverified (`bool`): accept a checkpoint without a manifest, as another program writes it.

    Raises:
        `UserError`: for a checkpoint without a manifest unless `unverified`.
    """
    # Newest first; sort_checkpoints sorts by the number in the name.
    for path in map(Path, reversed(sort_checkpoints(str(output_dir)) if Path(output_dir).is_dir() else [])):
        # Without a manifest, do not fall back to an older checkpoint: this one may be intact, and only the user can
        # know.
        damage = find_damage(path) if _has_manifest(path, unverified=unverified) else []
        if not damage:
            return str(path)
        aside = set_aside(path)
        logger.warning(f"{path} is damaged and was renamed to {aside.name}: {summarize(damage)}.")
    return None


def abandon_later_checkpoints(path: Path) -> None:
    """Rename the checkpoints beside `path` that came after it, so that `auto` does not return to them."""
    # Resolve links: the user may have named the checkpoint by another path.
    found = [Path(other).resolve() for other in sort_checkpoints(str(path.parent))]
    for other in found[found.index(path.resolve()) + 1 :] if path.resolve() in found else []:
        logger.warning(f"Resuming from {path}: {other} was renamed to {set_aside(other, 'abandoned').name}.")


def verify_checkpoint(path: Path, *, unverified: bool) -> None:
    """
    Raise `UserError` for a checkpoint that is damaged or incomplete, or has no manifest unless `unverified`.
    """
    if not (path / TRAINER_STATE_NAME).is_file():
        raise UserError(f"--resume_from_checkpoint {path} is not a checkpoint: it has no {TRAINER_STATE_NAME}.")
    if _has_manifest(path, unverified=unverified) and (damage := find_damage(path)):
        raise UserError(
            f"--resume_from_checkpoint {path} is damaged: {summarize(damage)}. `--resume_from_checkpoint auto` takes "
            "the newest intact one in --output_dir."
        )


def _has_manifest(path: Path, *, unverified: bool) -> bool:
    """Return whether a checkpoint has a manifest. Raise `UserError` if it has none, or only warn if `unverified`."""
    if (path / MANIFEST_NAME).exists():
        return True
    if not unverified:
        raise UserError(
            f"{path} has no {MANIFEST_NAME}, so nothing says whether it is intact: another program wrote it. Resume "
            "with --allow_inexact_resume, or start from its weights alone with --model_name_or_path."
        )
    logger.warning(f"{path} has no {MANIFEST_NAME}: its files were not verified.")
    return False


def rotate_checkpoints(newest: Path, *, limit: int | None, best: str | Path | None = None) -> None:
    """Delete the checkpoints with the lowest steps until `limit` are left. `newest` and `best` stay."""
    # By its name: the directory of the run may have been renamed since `best` was saved.
    best_path = str(newest.with_name(Path(best).name)) if best else None
    trainer_utils.rotate_checkpoints(str(newest.parent), limit, best_path)


def summarize(damage: list[str]) -> str:
    """Join the lines of [`find_damage`] into one; it names five of them and counts the rest."""
    return "; ".join(damage[:5]) + (f"; and {len(damage) - 5} more" if len(damage) > 5 else "")


def set_aside(path: Path, why: str = "damaged") -> Path:
    """Rename a checkpoint so that no run finds it, and return its new path."""
    number = 0
    # A directory of this name may be left from an earlier resume; it is kept.
    while (aside := path.with_name(f"{why}-{path.name}" + (f"-{number}" if number else ""))).exists():
        number += 1
    path.rename(aside)
    return aside


def find_newest_run(directory: str = "out", *, with_adapters: bool = False) -> str:
    """
    Return the directory in `directory` that holds the MiniMind language model with the newest weights.

    Args:
        directory (`str`): the directory of the runs.
        with_adapters (`bool`): whether an adapter is such a model, too.

    Raises:
        `UserError`: if there is none.
    """
    runs = {}
    names = ("config.json", "adapter_config.json") if with_adapters else ("config.json",)
    for config in (path for name in names for path in Path(directory).glob(f"*/{name}")):
        # Use the weights' time, not the directory's: later commands add logs and evaluations to old runs.
        weights = "adapter_model" if config.name == "adapter_config.json" else "model*"
        times = [path.stat().st_mtime for path in config.parent.glob(f"{weights}.safetensors")]
        # Without a tokenizer, the run in the directory is not finished, and its config may be incomplete.
        is_finished = times and (config.parent / "tokenizer.json").is_file()
        try:
            fields = read_json(config) if is_finished else {}
        except UserError as error:
            logger.warning(f"{error} Its directory is left out.")
            continue
        # Other models may lie in out/, such as exports to llama, and reward models, which write no text.
        is_model = fields.get("model_type") == "minimind" and _REWARD_MODEL not in (fields.get("architectures") or [])
        if is_model or fields.get("task_type") == "CAUSAL_LM":
            runs[str(config.parent)] = max(times)
    if not runs:
        raise UserError(
            f"No model in {directory}/: run `hf-pretrain pretrain` first, or name one: --model_name_or_path DIR."
        )
    return max(runs, key=runs.get)
